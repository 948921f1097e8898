"""The Trainer of the command line: Lightning's, with two more subcommands, default callbacks and default plugins."""

from pathlib import Path
from typing import Any

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
    PredictionWriter,
    SamplesPerSecond,
    SampleWeights,
    ServerTraffic,
    StartPanel,
    TrainingSummary,
)
from cnnstrategies.checkpoints.check import check_weights
from cnnstrategies.checkpoints.io import AtomicCheckpointIO
from cnnstrategies.cluster.environment import environment_plugins
from cnnstrategies.cluster.hosts import Interconnect
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.commands.arguments.refuse import write_anywhere
from cnnstrategies.commands.run.quiet import quieten
from cnnstrategies.commands.run.start_from import WORDS, find_checkpoint
from cnnstrategies.deploy.export import Format, export
from cnnstrategies.deploy.quantize import quantize

# Updates of the progress bar per second. An update takes rank 0 2 ms, for which the other ranks wait; Lightning's bar
# updates up to 100 times per second.
BAR_RATE = 4


class Trainer(LightningTrainer):
    """Lightning's Trainer with ``quantize`` and ``export``.

    A spawned rank sets up its output when it unpickles the trainer: it hides log messages, as the command line does.
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
        """Quantise a trained checkpoint to int8 and print accuracy or mean IoU, size and time before and after.

        Args:
            model: Module with the network.
            datamodule: Training data for the calibration, and validation data for the measurement.
            ckpt_path: See :class:`cnnstrategies.commands.arguments.options.QuantizeOptions`, as for the other options.
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
            console.print("This processor has no int8 kernels in oneDNN: the time is that of dequantised arithmetic.")
        console.print(f"Saved: {output}; load it with cnnstrategies.deploy.quantize.load_quantized({str(output)!r})")

    def export(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: Path,
        output: Path,
        format: Format,
    ) -> None:
        """Write a trained checkpoint for use without this package, and print the largest difference of its logits.

        Args:
            model: Module with the network.
            datamodule: Validation data for the comparison, the preparation of images, and the names of classes.
            ckpt_path: See :class:`cnnstrategies.commands.arguments.options.ExportOptions`, as for the other options.
        """
        self._load(model, ckpt_path)
        report = export(model, datamodule, output, format)
        console = Console(soft_wrap=True)
        console.print(str(report))
        console.print(f"Saved: {report.file}, with export.json beside it")

    def _load(self, model: LightningModule, ckpt_path: Path) -> None:
        path = find_checkpoint(str(ckpt_path), self) if str(ckpt_path) in WORDS else ckpt_path
        check_weights(model, path, weights_only=True)
        checkpoint = self.strategy.checkpoint_io.load_checkpoint(path, weights_only=True)
        model.load_state_dict(checkpoint["state_dict"])


def add_sections(parser: LightningArgumentParser) -> None:
    """Add the sections of a configuration that Lightning does not have."""
    parser.add_class_arguments(BestCheckpoint, "checkpoint")
    parser.set_defaults(
        {
            "checkpoint.enable_version_counter": False,
            # StartPanel shows the number of parameters.
            "trainer.enable_model_summary": False,
        }
    )
    parser.add_class_arguments(PredictionWriter, "predictions")
    parser.add_class_arguments(GracefulStop, "stop")
    # `submit` reads this section; `fit` accepts it, so that one file serves both.
    parser.add_class_arguments(ClusterOptions, "cluster")
    parser.add_class_arguments(Interconnect, "interconnect")
    parser.add_argument(
        "--run_name",
        type=str | None,
        default=None,
        help="Name of the run, and of its folder. The same name again goes on from the run's last checkpoint. By "
        "default the launcher gives the name.",
    )


def all_plugins(config: Namespace) -> list[Any]:
    """Return the plugins of a configuration, and the default plugins."""
    plugins = as_list(config.trainer.plugins)
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpointIO())
    return plugins + environment_plugins(plugins, config.trainer.num_nodes)


def all_callbacks(config: Namespace) -> list[Callback]:
    """Return the callbacks of a configuration, and the default callbacks of other classes."""
    callbacks = as_list(config.trainer.callbacks)
    defaults: list[Callback] = [
        StartPanel(),
        FirstBatch(),
        FromConfiguration(),
        EpochMetrics(),
        SamplesPerSecond(),
        ServerTraffic(),
        SampleWeights(),
        TrainingSummary(),
        config.predictions,
        config.stop,
    ]
    if config.trainer.logger is not False and not config.trainer.fast_dev_run:
        defaults.append(LearningRateMonitor())
    if config.trainer.enable_checkpointing is not False and not _has(callbacks, ModelCheckpoint):
        # Lightning's `save_last` writes last.ckpt only together with a new best; this callback writes it every epoch.
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
    """Return a configuration's value as a list. The value may be a list, a single object, or None for an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
