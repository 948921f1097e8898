"""The private Lightning names that this package needs, each with the reason.

A test fails when one of them changes; `tests/test_lightning_private.py` has those that no other test would notice.
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

__all__ = ["GlobalState", "MultiProcessingLauncher", "ScriptLauncher"]  # Beside the functions.


def acts_within_epochs(callback: Callback) -> str | None:
    """By which argument a callback of Lightning has all ranks do something together between two batches of an epoch."""
    if isinstance(callback, ModelCheckpoint):
        if callback._every_n_train_steps:
            return f"every_n_train_steps={callback._every_n_train_steps}"
        return None if callback._train_time_interval is None else f"train_time_interval={callback._train_time_interval}"
    if isinstance(callback, Timer) and callback.time_remaining() is not None and callback._interval == "step":
        return "interval='step' (max_time)"
    return None


def saves_in_epoch(callback: ModelCheckpoint, trainer: Trainer) -> float:
    """How often it does, on average; by the clock, and within epochs without an end, as if never."""
    batches, every = trainer.num_training_batches, callback._every_n_train_steps * trainer.accumulate_grad_batches
    if every:
        return batches / every if batches < float("inf") else 0.0
    return 1 / callback.every_n_epochs if callback.every_n_epochs else 0.0


class BatchesKept(_DataConnector):
    """Distributes a batch sampler's own sampler, and leaves its batches their size.

    Lightning takes the loader's sampler, which torch has made beside that one, and its batch size: of torch's own
    `BatchSampler` it makes batches of one sample, or no batches at all.
    """

    @override
    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        batches = getattr(dataloader, "batch_sampler", None)
        if isinstance(dataloader, DataLoader) and isinstance(batches, BatchSampler) and dataloader.batch_size is None:
            if isinstance(batches.sampler, Sampler):
                vars(dataloader)["sampler"] = batches.sampler
            if type(batches) is BatchSampler and self._requires_distributed_sampler(dataloader):
                given = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
                vars(dataloader).update(given)
                getattr(dataloader, "__pl_saved_kwargs", {}).update(given)
        return super()._prepare_dataloader(dataloader, shuffle, mode)


def keep_batches(trainer: Trainer) -> None:
    """Have a trainer distribute loaders with a batch sampler by :class:`BatchesKept`; its connector is no argument."""
    trainer._data_connector.__class__ = BatchesKept


def leave_samplers(trainer: Trainer) -> None:
    """Have the trainer put no DistributedSampler in the place of a loader's own, as with `use_distributed_sampler`.

    That is an argument of the Trainer; whether its sampler is needed is known to the strategy.
    """
    trainer._accelerator_connector.use_distributed_sampler = False


def ask_of_sigterm(trainer: Trainer, ask: bool) -> None:
    """Whether all ranks are to learn before each batch that rank 0 has received a SIGTERM.

    Lightning does it by a tensor on the device that it then reads: the host waits for each step. It is in vain where
    Lightning's own handler of the signal has been replaced.
    """
    loop = trainer.fit_loop.epoch_loop
    if ask:
        loop.__dict__.pop("_broadcast_sigterm_tensor", None)
    else:
        loop._broadcast_sigterm_tensor = bool  # type: ignore[method-assign, assignment]  # does nothing


def asks_of_sigterm(trainer: Trainer) -> bool:
    """Whether they do, by a broadcast."""
    return "_broadcast_sigterm_tensor" not in trainer.fit_loop.epoch_loop.__dict__


def built_by_cli() -> bool:
    """Whether a LightningModule is being built from a configuration by LightningCLI.

    Then `save_hyperparameters` records the configuration (plain data); otherwise it would record and deep-copy
    the live objects. Lightning has no public way to tell the two apart.
    """
    return _given_hyperparameters.get() is not None


def check_start(method: str, device: torch.device) -> None:
    """Refuse what Lightning's own launcher is to refuse: forking after CUDA was used, spawning without a main guard.

    The launcher that watches its processes replaces Lightning's `launch`, where these checks are made; and Lightning's
    of CUDA answers in the forked processes alone.

    Raises:
        ConfigurationError: The ranks could not use their GPUs.
    """
    if method == "fork" and device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigurationError(
            "start_method=fork: this process has used a GPU, and what is forked from it cannot: use start_method "
            "spawn or popen, or use no GPU before"
        )
    if method == "spawn":
        _check_missing_main_guard()


def own_values(trainer: Trainer) -> set[str]:
    """The names of logged values that are of this rank's batches alone; only Lightning's table knows what is reduced.

    To be asked while it trains on several processes: on one nothing is reduced.
    """
    names = set()
    for result in trainer.fit_loop._results.values():
        meta = result.meta
        if not result.is_tensor:  # A metric reduces itself, but for a step's value.
            names |= {meta.forked_name(on_step=True)} if meta.on_step else set()
        elif not meta.sync.should:
            names |= {meta.name, meta.forked_name(on_step=True), meta.forked_name(on_step=False)}
    return names


def script_command() -> list[str]:
    """The command that started this program, to start further ranks with."""
    return list(_basic_subprocess_cmd())


def set_batches_that_stepped(trainer: Trainer, count: int) -> None:
    """Have a trainer log as if it had made that many optimizer steps; only loading a checkpoint does it in public."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = count


def train_loader(trainer: Trainer) -> Any:
    """What a trainer will fit on, before it has made its loaders: given to ``fit``, or by a hook, which is called."""
    source = trainer.fit_loop._data_source
    return None if source.instance is None or not source.is_defined() else source.dataloader()


def wrapped_sampler(wrapper: DistributedSamplerWrapper) -> Any:
    """The user's own sampler in the one that Lightning has put in its place."""
    return wrapper.dataset._sampler  # type: ignore[attr-defined]


def ranks_are_children(launcher: Any) -> bool:
    """Whether a launcher spawns or forks all ranks, so that none of them is the process that runs the command line.

    On several hosts rank 0 could then not serve the port that its parent has used to find the other hosts.
    Lightning's public property tells only fork from the others.
    """
    return isinstance(launcher, MultiProcessingLauncher)


def end_observation(launcher: Any) -> list[subprocess.Popen[bytes]]:
    """Have Lightning no longer kill this process when one of the ranks that it has started as programs has ended.

    Its observer looks every 5 s at the list that the launcher had when it started them, and ends when that is empty;
    the others need a moment to lose their connection and to end in order. The launcher keeps a list for its `kill`.

    Returns:
        The ranks; none where Lightning does not observe them.
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
    """Whether ``torch.compile`` was given a LightningModule: Lightning puts it back, with compiled steps."""
    return vars(module).get("_compiler_ctx") is not None
