"""The Trainer of the command line: Lightning's Trainer with the methods ``quantize`` and ``export``.

The module also has the default callbacks and plugins of the command line.
"""

from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.plugins import CheckpointIO
from rich.console import Console
from rich.table import Table

from cnnstrategies.callbacks import (
    BestCheckpoint,
    EpochMetrics,
    FirstBatch,
    FromConfiguration,
    GracefulStop,
    Guard,
    Pictures,
    PredictionWriter,
    SamplesPerSecond,
    SampleWeights,
    ServerTraffic,
    SlowLines,
    StartPanel,
    StreamCounts,
    TrainingSummary,
)
from cnnstrategies.checkpoints.check import check_weights
from cnnstrategies.checkpoints.io import AtomicCheckpointIO
from cnnstrategies.cluster.environment import environment_plugins
from cnnstrategies.cluster.hosts import Interconnect
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.commands.arguments.refuse import write_anywhere
from cnnstrategies.commands.run.quiet import quieten
from cnnstrategies.commands.run.start_from import KEYWORDS, find_checkpoint
from cnnstrategies.deploy.export import Format, export
from cnnstrategies.deploy.quantize import quantize

# Number of updates of the progress bar per second. An update takes 2 ms on rank 0, and the other ranks wait for rank 0.
# Lightning's own progress bar would be updated up to 100 times per second.
BAR_RATE = 4


class Trainer(LightningTrainer):
    """Lightning's Trainer with two more methods, for the commands ``quantize`` and ``export``.

    When a spawned rank unpickles the trainer, the rank also hides log messages, as the command line does.
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        quieten()
        write_anywhere()

    def quantize(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: Path,
        output: Path,
        calibration_batches: int,
    ) -> None:
        """Quantise a network to int8, and print its quality, size and inference time before and after quantisation.

        Args:
            model: Module with the network.
            datamodule: Data module with training data for the calibration, and validation data for the quality.
            ckpt_path: Checkpoint of the trained network, or ``best`` or ``last``.
            output: File to write.
            calibration_batches: Number of training batches with which the ranges of the activations are measured.
        """
        self._load(model, ckpt_path)
        report = quantize(model, datamodule, output, calibration_batches)
        table = Table("", "float32", "int8", "ratio", title=f"Quantisation, batches of {report.batch_size} on the CPU")
        before, after = report.before, report.after
        table.add_row(report.metric, f"{before.quality:.4f}", f"{after.quality:.4f}", "")
        for name, old, new in (
            ("weights, MB", before.megabytes, after.megabytes),
            ("time per batch, ms", before.milliseconds, after.milliseconds),
        ):
            table.add_row(name, f"{old:.2f}", f"{new:.2f}", f"{new / old:.2f}")
        console = Console(soft_wrap=True)
        console.print(table)
        if not report.lowered:
            console.print(
                "oneDNN has no int8 kernels for this CPU, so the time in the column int8 is the time of dequantised "
                "arithmetic."
            )
        console.print(f"Saved: {output}; load it with cnnstrategies.deploy.quantize.load_quantized({str(output)!r})")

    def export(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: Path,
        output: Path,
        format: Format,
    ) -> None:
        """Export a trained network for use without this package.

        Also print the largest difference between the logits of the exported and the original network.

        Args:
            model: Module with the network.
            datamodule: Data module with validation data for the comparison. The data module's preprocessing and class
                names are exported with the network.
            ckpt_path: Checkpoint of the trained network, or ``best`` or ``last``.
            output: Folder to create.
            format: File format of the exported network.
        """
        checkpoint = self._load(model, ckpt_path)
        report = export(model, datamodule, output, format, checkpoint)
        console = Console(soft_wrap=True)
        console.print(str(report))
        console.print(f"Saved: {report.file}, with export.json and README.md beside it")

    def _load(self, model: LightningModule, ckpt_path: Path) -> tuple[Path, dict[str, Any]]:
        path = find_checkpoint(str(ckpt_path), self) if str(ckpt_path) in KEYWORDS else ckpt_path
        check_weights(model, path, weights_only=True)
        checkpoint = self.strategy.checkpoint_io.load_checkpoint(path, weights_only=True)
        model.load_state_dict(checkpoint["state_dict"])
        return Path(path), checkpoint


def add_sections(parser: LightningArgumentParser) -> None:
    """Add this package's own sections and options to a parser of LightningCLI."""
    parser.add_class_arguments(BestCheckpoint, "checkpoint")
    parser.set_defaults(
        {
            "checkpoint.enable_version_counter": False,
            # StartPanel shows the number of parameters, so Lightning's model summary is not needed.
            "trainer.enable_model_summary": False,
        }
    )
    parser.add_class_arguments(PredictionWriter, "predictions")
    parser.add_argument(
        "--pictures",
        type=bool,
        default=True,
        help="Whether fit, validate and test draw pictures of the evaluation: confusion matrix, calibration, worst "
        "mistakes and masks, see the callback Pictures.",
    )
    parser.add_class_arguments(GracefulStop, "stop")
    # Only `submit` reads the section `cluster`. `fit` ignores it, so that both commands can use the same file.
    parser.add_class_arguments(ClusterOptions, "cluster")
    parser.add_class_arguments(Interconnect, "interconnect")
    parser.add_argument(
        "--slow_lines",
        type=bool,
        default=True,
        help="Whether fit prints a line with cause and remedy if its steps become slower for good.",
    )
    parser.add_argument(
        "--run_name",
        type=str | None,
        default=None,
        help="Name of the run and of its folder. If a run with this name exists, training continues from its last "
        "checkpoint. By default the launcher (SLURM, Kubernetes, Ray or torchrun) gives the name. Without a name, the "
        "run gets a folder with a number and cannot be restarted.",
    )
    parser.add_argument(
        "--guard",
        type=bool | Literal["warn", "stop"],
        default=False,
        help="Whether to look for silent errors while the run trains: true or warn prints a line for each finding, and "
        "stop also ends the run.",
    )


def all_plugins(config: Namespace) -> list[Any]:
    """Return the plugins of a configuration, followed by the command line's default plugins."""
    plugins = as_list(config.trainer.plugins)
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpointIO())
    return plugins + environment_plugins(plugins, config.trainer.num_nodes)


def all_callbacks(config: Namespace) -> list[Callback]:
    """Return the callbacks of a configuration, followed by the command line's default callbacks.

    A default callback is left out if the configuration has a callback of the same class.
    """
    callbacks = as_list(config.trainer.callbacks)
    defaults: list[Callback] = [
        StreamCounts(),
        StartPanel(),
        FirstBatch(),
        FromConfiguration(),
        EpochMetrics(),
        SamplesPerSecond(),
        ServerTraffic(),
        SampleWeights(),
        *([Pictures()] if config.pictures else []),
        TrainingSummary(),
        config.predictions,
        config.stop,
    ]
    if config.guard is not False:
        defaults.append(Guard("stop" if config.guard == "stop" else "warn"))
    if config.slow_lines:
        defaults.append(SlowLines())
    if config.trainer.logger is not False and not config.trainer.fast_dev_run:
        defaults.append(LearningRateMonitor())
    if config.trainer.enable_checkpointing is not False and not _has(callbacks, ModelCheckpoint):
        # A second callback writes last.ckpt in every epoch. The option `save_last` of `config.checkpoint` would write
        # last.ckpt only when there is a new best checkpoint.
        last = ModelCheckpoint(config.checkpoint.dirpath, filename="last", enable_version_counter=False)
        defaults += [config.checkpoint, last]
    if config.trainer.enable_progress_bar is not False and not any(
        isinstance(callback, ProgressBar) for callback in callbacks
    ):
        defaults.append(RichProgressBar(BAR_RATE))
    return callbacks + [default for default in defaults if not _has(callbacks, type(default))]


def _has(callbacks: list[Callback], kind: type) -> bool:
    return any(type(callback) is kind for callback in callbacks)


def as_list(value: Any) -> list[Any]:
    """Return the elements of a configuration's value as a list.

    The value may be a list, a single object, or None for an empty list.
    """
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
