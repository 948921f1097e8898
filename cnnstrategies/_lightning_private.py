"""The private Lightning names that this package needs, each with the reason.

A test fails when one of the names changes; `tests/test_lightning_private.py` has tests for names that no other test
would notice.
"""

import subprocess
import threading
from typing import Any

import torch
from lightning.fabric.strategies.launchers.multiprocessing import _check_missing_main_guard
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, Timer
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot as GlobalState
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as ScriptLauncher
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader, Sampler
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError

__all__ = ["GlobalState", "MultiProcessingLauncher", "ScriptLauncher"]  # classes, in addition to the functions below


def acts_within_epochs(callback: Callback) -> str | None:
    """Return the argument by which a callback of Lightning makes ranks act together between batches; None without one.

    Such a callback saves a checkpoint or stops the run within an epoch.
    """
    if isinstance(callback, ModelCheckpoint):
        if callback._every_n_train_steps:
            return f"every_n_train_steps={callback._every_n_train_steps}"
        return None if callback._train_time_interval is None else f"train_time_interval={callback._train_time_interval}"
    if isinstance(callback, Timer) and callback.time_remaining() is not None and callback._interval == "step":
        return "interval='step' (max_time)"
    return None


def saves_in_epoch(callback: ModelCheckpoint, trainer: Trainer) -> float:
    """Return how many checkpoints a callback saves in an epoch, on average.

    Checkpoints at times of the clock, and within epochs of unknown length, are not counted.
    """
    batches, every = trainer.num_training_batches, callback._every_n_train_steps * trainer.accumulate_grad_batches
    if every:
        return batches / every if batches < float("inf") else 0.0
    return 1 / callback.every_n_epochs if callback.every_n_epochs else 0.0


class BatchesKept(_DataConnector):
    """Distributes the sampler inside a batch sampler, and keeps the size of the batches.

    Lightning itself distributes the loader's sampler, which torch has made in addition, and uses the loader's batch
    size. With torch's own `BatchSampler` the result is batches of one sample, or no batches.
    """

    @override
    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        batches = getattr(dataloader, "batch_sampler", None)
        if isinstance(dataloader, DataLoader) and isinstance(batches, BatchSampler) and dataloader.batch_size is None:
            if isinstance(batches.sampler, Sampler):
                vars(dataloader)["sampler"] = batches.sampler
            if type(batches) is BatchSampler and self._requires_distributed_sampler(dataloader):
                arguments = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
                vars(dataloader).update(arguments)
                getattr(dataloader, "__pl_saved_kwargs", {}).update(arguments)
        return super()._prepare_dataloader(dataloader, shuffle, mode)


def keep_batches(trainer: Trainer) -> None:
    """Make a trainer distribute loaders with a batch sampler by :class:`BatchesKept`.

    A trainer has no argument for its connector.
    """
    trainer._data_connector.__class__ = BatchesKept


def leave_samplers(trainer: Trainer) -> None:
    """Make the trainer keep the loaders' own samplers, as with ``use_distributed_sampler=False``.

    Only the strategy knows whether a DistributedSampler is needed, and the Trainer's argument is set before.
    """
    trainer._accelerator_connector.use_distributed_sampler = False


def ask_of_sigterm(trainer: Trainer, ask: bool) -> None:
    """Choose whether all ranks learn before each batch that rank 0 has received a SIGTERM.

    Lightning broadcasts a tensor on the device and reads it, so the host waits for each step. The broadcast is useless
    if Lightning's own handler of the signal has been replaced.
    """
    loop = trainer.fit_loop.epoch_loop
    if ask:
        loop.__dict__.pop("_broadcast_sigterm_tensor", None)
    else:
        loop._broadcast_sigterm_tensor = bool  # type: ignore[method-assign, assignment]  # does nothing


def asks_of_sigterm(trainer: Trainer) -> bool:
    """Whether all ranks learn of a SIGTERM by a broadcast before each batch; see :func:`ask_of_sigterm`."""
    return "_broadcast_sigterm_tensor" not in trainer.fit_loop.epoch_loop.__dict__


def built_by_cli() -> bool:
    """Whether a LightningModule is being built from a configuration by LightningCLI.

    In that case `save_hyperparameters` records the configuration, which is plain data. Otherwise it records and
    deep-copies the live objects. Lightning has no public way to distinguish the two cases.
    """
    return _given_hyperparameters.get() is not None


def check_start(method: str, device: torch.device) -> None:
    """Refuse forking after CUDA was used, and spawning without a main guard.

    Lightning makes these checks in its `launch`, which the package's launchers replace. Lightning's check of CUDA also
    sees a problem only in the forked processes.

    Raises:
        ConfigurationError: Forked ranks could not use their GPUs.
    """
    if method == "fork" and device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigurationError(
            "start_method=fork: this process has used a GPU, and processes forked from it cannot use one: set "
            "start_method to spawn or popen, or use no GPU before"
        )
    if method == "spawn":
        _check_missing_main_guard()


def own_values(trainer: Trainer) -> set[str]:
    """Return the names of logged values that come from this rank's batches only, because they are not reduced.

    Only Lightning's table of results knows which values are reduced. The answer has a meaning only while several
    processes train: one process reduces nothing.
    """
    names = set()
    for result in trainer.fit_loop._results.values():
        meta = result.meta
        if not result.is_tensor:  # A metric reduces itself, except for the value of a step.
            names |= {meta.forked_name(on_step=True)} if meta.on_step else set()
        elif not meta.sync.should:
            names |= {meta.name, meta.forked_name(on_step=True), meta.forked_name(on_step=False)}
    return names


def script_command() -> list[str]:
    """Return the command that started this program, for starting further ranks."""
    return list(_basic_subprocess_cmd())


def set_batches_that_stepped(trainer: Trainer, count: int) -> None:
    """Make a trainer log as if it had made `count` optimizer steps; in public only loading a checkpoint does so."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = count


def train_loader(trainer: Trainer) -> Any:
    """Return a trainer's training loaders before the trainer has made them; None if it has no data.

    They are the loaders given to ``fit``, or those of a hook, which is called.
    """
    source = trainer.fit_loop._data_source
    return None if source.instance is None or not source.is_defined() else source.dataloader()


def wrapped_sampler(wrapper: DistributedSamplerWrapper) -> Any:
    """Return the user's sampler from inside Lightning's wrapper."""
    return wrapper.dataset._sampler  # type: ignore[attr-defined]


def ranks_are_children(launcher: Any) -> bool:
    """Whether a launcher spawns or forks all ranks, so that the process of the command line is not a rank.

    On several hosts rank 0 could then not serve the port that its parent has used to find the other hosts.
    Lightning's public property distinguishes only fork from the other methods.
    """
    return isinstance(launcher, MultiProcessingLauncher)


def end_observation(launcher: Any) -> list[subprocess.Popen[bytes]]:
    """Stop Lightning from killing this process when a rank that it has started as a program has ended.

    The other ranks need a moment to lose their connection and to end in order. Lightning's observer looks every 5 s at
    the launcher's first list of ranks, and ends when that list is empty. The launcher keeps another list for `kill`.

    Returns:
        The ranks; an empty list if Lightning does not observe any.
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
    """Whether a LightningModule was passed to ``torch.compile``: Lightning then uses the module with compiled steps."""
    return vars(module).get("_compiler_ctx") is not None
