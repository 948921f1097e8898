"""Private names of Lightning that this package needs, each with the reason why it is needed.

If Lightning changes one of the names, a test fails. `tests/test_lightning_private.py` tests the names for which no
other test would fail.
"""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.launchers.multiprocessing import _check_missing_main_guard
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import multiprocessing as launchers
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot as GlobalState
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as ScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, Sampler
from torchmetrics import Metric
from typing_extensions import override

from cnnstrategies.divided_batches import takes_sampler, with_divided_batches
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.protocol import facts_of

# Lightning's private classes, which this module exports under public names.
__all__ = ["GlobalState", "MultiProcessingLauncher", "ScriptLauncher"]


def chooses_version(logger: CSVLogger | TensorBoardLogger) -> bool:
    """Return whether a logger will choose its version itself, as the next number that has no folder yet."""
    return logger._version is None


def choose_next_version(logger: CSVLogger | TensorBoardLogger) -> None:
    """Make a logger choose its version again, because another run has just created the folder of its version."""
    logger._version = None


def acts_within_epochs(callback: Callback) -> str | None:
    """Return the argument that makes a Lightning callback act within an epoch.

    Such a callback needs all ranks to be at the same step. Examples are a ModelCheckpoint that saves within an epoch,
    and a Timer that stops the run within an epoch. For other callbacks the result is None.

    Returns:
        The argument and its value as a text, for an error message.
    """
    if isinstance(callback, ModelCheckpoint):
        if callback._every_n_train_steps:
            return f"every_n_train_steps={callback._every_n_train_steps}"
        return None if callback._train_time_interval is None else f"train_time_interval={callback._train_time_interval}"
    if isinstance(callback, Timer) and callback.time_remaining() is not None and callback._interval == "step":
        return "interval='step' (max_time)"
    return None


def saves_in_epoch(callback: ModelCheckpoint, trainer: Trainer) -> float:
    """Return the mean number of checkpoints that a callback saves in an epoch.

    Checkpoints that are saved at time intervals (``train_time_interval``), or within epochs of unknown length, are not
    counted.
    """
    batches, every = trainer.num_training_batches, callback._every_n_train_steps * trainer.accumulate_grad_batches
    if every:
        return batches / every if batches < float("inf") else 0.0
    return 1 / callback.every_n_epochs if callback.every_n_epochs else 0.0


class BatchesKept(_DataConnector):
    """Data connector that divides the sampler inside a batch sampler among the ranks, and keeps the batch size.

    Lightning's own connector divides ``loader.sampler``, which torch creates although the loader has a batch sampler,
    and uses ``loader.batch_size``. If a loader has torch's ``BatchSampler``, Lightning's connector would therefore make
    batches of one sample, or no batches at all. If Lightning cannot put a sampler into a user's batch sampler, whole
    batches are divided among the ranks instead.

    Attributes:
        divide_stream: Function that divides the samples of streams among the ranks; see :func:`keep_batches`.
    """

    divide_stream: Callable[[Any, Trainer, bool], Any]

    @override
    def _requires_distributed_sampler(self, dataloader: DataLoader[Any]) -> bool:
        if not super()._requires_distributed_sampler(dataloader):
            return False
        return not facts_of(self.trainer.strategy).keeps_sampler(dataloader)

    @override
    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        batches = getattr(dataloader, "batch_sampler", None)
        if isinstance(dataloader, DataLoader) and batches is not None and dataloader.batch_size is None:
            # A subclass whose `__init__` does not call `super().__init__` does not have the attribute `sampler`.
            if isinstance(getattr(batches, "sampler", None), Sampler):
                vars(dataloader)["sampler"] = batches.sampler
            divides_batches = mode != RunningStage.PREDICTING and not takes_sampler(batches)
            if divides_batches and self._requires_distributed_sampler(dataloader):
                sampling: Any = self.trainer.distributed_sampler_kwargs
                dataloader = with_divided_batches(dataloader, **sampling)
            if type(batches) is BatchSampler and self._requires_distributed_sampler(dataloader):
                arguments = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
                vars(dataloader).update(arguments)
                getattr(dataloader, "__pl_saved_kwargs", {}).update(arguments)
        prepared = super()._prepare_dataloader(dataloader, shuffle, mode)
        return self.divide_stream(prepared, self.trainer, mode != RunningStage.TRAINING)


def keep_batches(trainer: Trainer, divide_stream: Callable[[Any, Trainer, bool], Any]) -> None:
    """Make a trainer use the data connector :class:`BatchesKept`.

    Lightning's Trainer has no argument for the data connector, so the class of the existing connector is replaced.

    Args:
        trainer: The trainer.
        divide_stream: Function that takes a loader, the trainer, and whether the loader is for evaluation, and returns
            the loader or another one that divides the samples of a stream.
    """
    trainer._data_connector.__class__ = BatchesKept
    trainer._data_connector.divide_stream = divide_stream  # type: ignore[attr-defined]


class StreamPositions(_IndexBatchSamplerWrapper):
    """Positions of the samples of a stream's batches, where Lightning's prediction writers read indices.

    Lightning reads them from a batch sampler of this private class only.

    Attributes:
        seen_batch_indices: Positions of each batch's samples.
    """

    def __init__(self) -> None:
        self.seen_batch_indices: list[list[int]] = []


def leave_samplers(trainer: Trainer) -> None:
    """Make the trainer keep the loaders' samplers, as with ``use_distributed_sampler=False``.

    The strategy decides whether a DistributedSampler is needed, but the Trainer's argument must be set before the
    strategy exists.
    """
    trainer._accelerator_connector.use_distributed_sampler = False


class SkippingOptimization(_AutomaticOptimization):
    """Automatic optimization that skips the step if `training_step` returns None, with several ranks as with one.

    Lightning allows this for one rank only, because under DDP the other ranks would wait for the rank that skips.
    """

    @override
    def _training_step(self, kwargs: Any) -> Any:
        output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        self.trainer.strategy.post_training_step()
        return self.output_result_cls.from_training_step_output(output, self.trainer.accumulate_grad_batches)


def allow_skipped_steps(trainer: Trainer) -> None:
    """Allow `training_step` to return None. All ranks must return None in the same steps."""
    trainer.fit_loop.epoch_loop.automatic_optimization.__class__ = SkippingOptimization


def last_value_of(metric: Metric) -> Any:
    """Return what a metric has computed for the last batch, which Lightning logs for a step; None if it has not."""
    return metric._forward_cache


def set_last_value(metric: Metric, value: Any) -> None:
    """Set the value that Lightning logs for a step."""
    metric._forward_cache = value


def ask_of_sigterm(trainer: Trainer, ask: bool) -> None:
    """Turn on or off the broadcast that tells all ranks before each batch whether rank 0 has received a SIGTERM.

    Lightning broadcasts a tensor on the device and reads the tensor's value, so the CPU waits for the device in each
    step. The broadcast is not needed if Lightning's signal handler has been replaced.
    """
    loop = trainer.fit_loop.epoch_loop
    if ask:
        loop.__dict__.pop("_broadcast_sigterm_tensor", None)
    else:
        loop._broadcast_sigterm_tensor = bool  # type: ignore[method-assign, assignment]  # `bool()` has no effect.


def asks_of_sigterm(trainer: Trainer) -> bool:
    """Whether the broadcast that :func:`ask_of_sigterm` describes is turned on."""
    return "_broadcast_sigterm_tensor" not in trainer.fit_loop.epoch_loop.__dict__


def leave_signals(trainer: Trainer) -> None:
    """Prevent the trainer from installing its own signal handlers.

    Lightning's handler of SIGTERM sends SIGTERM to the other ranks and runs a broadcast, possibly in the middle of
    another collective.
    """
    trainer._signal_connector.register_signal_handlers = _register_nothing  # type: ignore[method-assign]


def note_sigterm_alone(trainer: Trainer) -> None:
    """Make Lightning's handler of SIGTERM only note the signal, and not begin a broadcast from rank 0.

    The handler may run in the middle of another collective, and the other ranks may not take part in the broadcast.
    """
    connector = trainer._signal_connector

    def note(signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note  # type: ignore[method-assign, assignment]


def _register_nothing() -> None:
    """Do nothing. A spawned rank gets a pickled trainer, so this cannot be a lambda expression."""


def built_by_cli() -> bool:
    """Whether LightningCLI is currently building a LightningModule from a configuration.

    ``save_hyperparameters`` then saves the configuration, which consists of plain values. Otherwise it saves deep
    copies of the objects that were passed to the constructor. Lightning has no public way to distinguish these cases.
    """
    return _given_hyperparameters.get() is not None


def check_start(method: str, device: torch.device) -> None:
    """Refuse to fork after CUDA was initialised, and to spawn from a script without a main guard.

    Lightning makes these checks in its launchers' ``launch``, which the package's launchers override. Lightning's own
    check for CUDA also raises its error only in the forked processes, and not in this process.

    Raises:
        ConfigurationError: Forked ranks could not use their GPUs.
        RuntimeError: The script has no ``if __name__ == "__main__"``.
    """
    if method == "fork" and device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigurationError(
            "start_method=fork: this process has used a GPU, so processes that are forked from it cannot use a GPU: "
            "restart the kernel or program and do not use a GPU before the run starts, or set start_method to spawn or "
            "popen in a script"
        )
    if method == "fork" and device.type == "cuda" and _forks_lose_cuda():
        raise ConfigurationError(
            "start_method=fork: this process, or a package while it was imported, has asked CUDA for the GPUs, so "
            "processes that are forked from it cannot use a GPU: set the environment variable "
            "PYTORCH_NVML_BASED_CUDA_CHECK=1 for the program, or set start_method to spawn or popen in a script"
        )
    if method == "spawn":
        _check_missing_main_guard()


def _forks_lose_cuda() -> bool:
    """Whether processes that are forked from this one cannot use CUDA, which torch knows only in a forked process."""
    process = os.fork()
    if process == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    return os.waitpid(process, 0)[1] != 0


@contextmanager
def forks_on_cpu(device: torch.device) -> Iterator[None]:
    """Return a context in which Lightning's launchers fork ranks for CPUs also from a process that cannot use CUDA.

    A process cannot use CUDA if it was itself forked, as those of ``verify``, from a process that has asked CUDA for
    the GPUs. Lightning refuses to fork ranks from it, although ranks on CPUs need no CUDA.

    Args:
        device: Device of the ranks. For other devices than CPUs, Lightning's check remains.
    """
    original = vars(launchers)["_check_bad_cuda_fork"]
    if device.type == "cpu":
        vars(launchers)["_check_bad_cuda_fork"] = lambda: None
    try:
        yield
    finally:
        vars(launchers)["_check_bad_cuda_fork"] = original


def own_values(trainer: Trainer) -> set[str]:
    """Return the names of the logged values that cover only this rank's batches, because they are not reduced.

    Only Lightning's private table of results shows which values are reduced. The result is meaningful only if several
    processes train, because a single process does not reduce any value.
    """
    names = set()
    for result in trainer.fit_loop._results.values():
        meta = result.meta
        # A torchmetrics metric is reduced at the end of an epoch, so only its values of single steps are not reduced.
        if not result.is_tensor:
            names |= {meta.forked_name(on_step=True)} if meta.on_step else set()
        elif not meta.sync.should:
            names |= {meta.name, meta.forked_name(on_step=True), meta.forked_name(on_step=False)}
    return names


def script_command() -> list[str]:
    """Return the command line with which this program was started, to start the other ranks with it."""
    return list(_basic_subprocess_cmd())


def set_batches_that_stepped(trainer: Trainer, count: int) -> None:
    """Set the number of optimizer steps that a trainer passes to its loggers as the current step.

    Without this private attribute, the number can be set only by loading a checkpoint.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = count


def train_loader(trainer: Trainer) -> Any:
    """Return a trainer's training loaders before the trainer itself has created them.

    If loaders were passed to ``fit``, return them. Otherwise call the hook ``train_dataloader`` and return its result.
    If the run has neither loaders nor this hook, return None.
    """
    source = trainer.fit_loop._data_source
    return None if source.instance is None or not source.is_defined() else source.dataloader()


def first_loader(trainer: Trainer) -> Any:
    """Return the first loader of the run's own loop, as :func:`train_loader` does for ``fit``."""
    loops: dict[str, Any] = {
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    loop = loops.get(trainer.state.fn.value if trainer.state.fn else "")
    if loop is None:
        return train_loader(trainer)
    source = loop._data_source
    loaders = None if source.instance is None or not source.is_defined() else source.dataloader()
    return next(iter(loaders), None) if isinstance(loaders, (list, tuple)) else loaders


def wrapped_sampler(wrapper: DistributedSamplerWrapper) -> Any:
    """Return the user's sampler that Lightning has wrapped in a DistributedSamplerWrapper."""
    return wrapper.dataset._sampler  # type: ignore[attr-defined]


def ranks_are_children(launcher: Any) -> bool:
    """Whether a launcher spawns or forks all ranks. The process of the command line itself is then not a rank.

    Such a launcher cannot be used on several machines: rank 0 could not listen at the main port, which its parent
    process has already used to find the other machines. Lightning's public property only tells whether processes are
    forked.
    """
    return isinstance(launcher, MultiProcessingLauncher)


def set_main_port(environment: ClusterEnvironment, port: int) -> None:
    """Make a cluster environment return a port as its ``main_port``, in this process and in its child processes.

    Most of Lightning's environments return the value of ``MASTER_PORT``. Some keep the port in a private attribute
    instead, and a user's own environment may compute it.
    """
    os.environ["MASTER_PORT"] = str(port)
    if "_main_port" in vars(environment):
        vars(environment)["_main_port"] = port
    if environment.main_port != port:
        kind = type(environment)
        environment.__class__ = type(kind.__name__, (kind,), {"main_port": port})


def end_observation(launcher: Any) -> list[subprocess.Popen[bytes]]:
    """Stop Lightning's observer thread, which kills this process when the program of another rank has failed.

    Without the observer, the other ranks have time to notice the lost connection and to end properly. Every 5 s the
    observer checks the processes in the launcher's list ``procs``, and ends if the list is empty. This function gives
    the launcher a copy of the list, because the launcher's method ``kill`` needs it, and empties the original list.

    Returns:
        The processes of the ranks; an empty list if Lightning's observer is not running.
    """
    observed = getattr(launcher, "procs", None) or []
    if not any(thread.name == "child-process-observer" for thread in threading.enumerate()):
        return []
    ranks = list(observed)
    if ranks:
        launcher.procs = ranks
        observed.clear()
    return ranks


def is_compiled_whole(module: LightningModule) -> bool:
    """Whether a whole LightningModule was passed to ``torch.compile``. Lightning then compiles the module's steps."""
    return vars(module).get("_compiler_ctx") is not None


def averages_models(kind: Any) -> bool:
    """Return whether a DDP strategy averages weights now and then, so that the ranks' weights differ in between.

    Lightning has no public name for the argument ``model_averaging_period``.
    """
    return getattr(kind, "_model_averaging_period", None) is not None


def keeps_graph(metric: Metric) -> bool:
    """Whether a metric is computing the value of a batch, from which a backward may start.

    torchmetrics has no public attribute that distinguishes a call of the metric from a call of the method ``update``.
    """
    return bool(metric._enable_grad)


def search_unused(strategy: DDPStrategy) -> None:
    """Make DDP search each loss for parameters that the loss does not use, unless ``static_graph`` is true.

    A false ``find_unused_parameters`` is not the user's choice: jsonargparse adds all defaults of DDP to the options of
    a strategy with a ``class_path``. Lightning passes `_ddp_kwargs` to DDP, and reads no public option when it wraps
    the module.
    """
    if not strategy._ddp_kwargs.get("static_graph"):
        strategy._ddp_kwargs["find_unused_parameters"] = True
