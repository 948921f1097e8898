"""What a trainer of the command line has that Lightning's has not, unless the configuration says otherwise."""

from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.callbacks import ProgressBar as Bar
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.plugins import CheckpointIO

from cnnstrategies.callbacks import (
    BestCheckpoint,
    EpochMetrics,
    FirstBatch,
    FromConfiguration,
    GracefulStop,
    PredictionWriter,
    ProgressBar,
    RunMembers,
    SamplesPerSecond,
    ServerTraffic,
    StartPanel,
    TrainingSummary,
)
from cnnstrategies.checkpoints.io import AtomicCheckpointIO
from cnnstrategies.cluster.environment import environment_plugins
from cnnstrategies.cluster.hosts import Network
from cnnstrategies.cluster.options import ClusterOptions


def add_sections(parser: LightningArgumentParser) -> None:
    """Add the sections of a configuration that are ours."""
    parser.add_class_arguments(BestCheckpoint, "checkpoint")
    parser.set_defaults(
        {
            "checkpoint.enable_version_counter": False,
            # StartPanel counts the parameters too.
            "trainer.enable_model_summary": False,
        }
    )
    parser.add_class_arguments(PredictionWriter, "predictions")
    parser.add_class_arguments(GracefulStop, "stop")
    # What `submit` reads, so that one file serves both.
    parser.add_class_arguments(ClusterOptions, "cluster")
    parser.add_class_arguments(Network, "network")
    parser.add_argument(
        "--run_name",
        type=str | None,
        default=None,
        help="The run's name: its folder, and what goes on from its last checkpoint when it is started again. By "
        "default what the launcher offers.",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="Set aside what a run of this name has left, and start anew."
    )


def all_plugins(config: Namespace) -> list[Any]:
    """The plugins of a configuration and the default ones."""
    plugins = as_list(config.trainer.plugins)
    if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
        plugins.append(AtomicCheckpointIO())
    return plugins + environment_plugins(plugins, config.trainer.num_nodes)


def all_callbacks(config: Namespace) -> list[Callback]:
    """The callbacks of a configuration, and the default ones of other classes."""
    callbacks = as_list(config.trainer.callbacks)
    defaults: list[Callback] = [
        StartPanel(),
        FirstBatch(),
        FromConfiguration(),
        EpochMetrics(),
        SamplesPerSecond(),
        ServerTraffic(),
        RunMembers(),
        TrainingSummary(),
        config.predictions,
        config.stop,
    ]
    if config.trainer.logger is not False and not config.trainer.fast_dev_run:
        defaults.append(LearningRateMonitor())
    if config.trainer.enable_checkpointing is not False and not _has(callbacks, ModelCheckpoint):
        # Lightning's `save_last` writes last.ckpt only together with a new best; this one after each epoch.
        last = ModelCheckpoint(config.checkpoint.dirpath, filename="last", enable_version_counter=False)
        defaults += [config.checkpoint, last]
    if config.trainer.enable_progress_bar is not False and not any(isinstance(one, Bar) for one in callbacks):
        defaults.append(ProgressBar())
    return callbacks + [new for new in defaults if not _has(callbacks, type(new))]


def _has(callbacks: list[Callback], kind: type) -> bool:
    return any(type(callback) is kind for callback in callbacks)


def as_list(value: Any) -> list[Any]:
    """What a configuration gives as a list, a single thing or null."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
