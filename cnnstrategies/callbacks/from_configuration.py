"""Callback for resumed runs: learning rates and schedules are taken from the configuration, not the checkpoint."""

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves_with_path
from typing_extensions import override

from cnnstrategies._torch_private import PARTS_OF_A_SCHEDULE as PARTS
from cnnstrategies.checkpoints.check import remedy
from cnnstrategies.errors import ConfigurationError

# Options of a parameter group that schedules change. If a run has schedules, these options are reset to their
# configured values before the schedules are restarted. An optimizer that adapts its own learning rate does not lose the
# adapted rate, because it stores this rate under other names.
SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "base_momentum", "max_momentum", "betas")
# Attributes of ReduceLROnPlateau that a resumed run takes from the checkpoint.
LEARNED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
# Steps at which `_factors` samples a schedule's function.
COUNTS = (*(2**power for power in range(20)), *(3 * 2**power for power in range(18)))
NOT_OPTIONS = ("params", "param_names")

State = dict[str, Any]


class FromConfiguration(Callback):
    """Callback that makes a changed configuration of optimizers and schedules take effect when a run is resumed.

    Lightning loads the optimizers' options and the schedules' state from the checkpoint. A new learning rate in the
    configuration, or more epochs for a cosine schedule, would therefore have no effect. This callback saves the
    configured options and schedules in each checkpoint, and compares them when a run is resumed. If they have changed,
    the callback sets the options to their new values, restarts the schedules, advances the schedules to the run's
    current step, and logs the changes in one line. Otherwise the run continues exactly as it was saved.

    Raises:
        ConfigurationError: The checkpoint was saved with a different optimizer, or a configured schedule is shorter
            than the number of steps that the run has already made.
    """

    def __init__(self) -> None:
        self._fresh: State = {}  # Options and schedules as they are configured, before the first step of the run.
        self._configured: State = {}  # `_fresh` converted to plain values that can be saved and compared.
        self._before: State | None = None  # `_configured` of the run that saved the checkpoint; None if unknown.
        self._checkpoint: State = {}
        self._idle = True  # True until the training of the current fit starts.

    @override
    def state_dict(self) -> State:
        return {"configured": self._configured} if self._configured else {}

    @override
    def load_state_dict(self, state_dict: State) -> None:
        self._before = state_dict["configured"]

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        self._checkpoint = checkpoint

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning has created the optimizers and schedules, but has not yet loaded their state from the checkpoint.
        # The options of the optimizers and schedules are therefore the configured options.
        self._idle = True
        self._fresh = _fresh(trainer)
        self._configured = _plain(self._fresh)
        if trainer.ckpt_path is None:
            return
        _check_same(trainer, self._checkpoint.get("optimizer_states", []))
        if self._before is None:
            rank_zero_info(
                f"{trainer.ckpt_path} does not contain the configuration of its run, because it was not saved by "
                "cnnstrategies fit: learning rates and schedules continue as they are in the checkpoint"
            )
            return
        for index, (old, new) in enumerate(zip(self._before["schedules"], self._fresh["schedules"], strict=False)):
            if old["schedule"] != new["schedule"]:  # The new schedule cannot load the old state.
                self._checkpoint["lr_schedulers"][index] = copy.deepcopy(new["state"])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._idle = False
        if self._before is not None and repr(self._before) != repr(self._configured):
            _apply_configuration(trainer, self._before, self._configured, self._fresh)
            changed = ", ".join(dict.fromkeys(_differences(self._before, self._configured)))
            rank_zero_info(f"Changed by the configuration since the checkpoint was saved: {changed}")
        self._before, self._checkpoint, self._fresh = None, {}, {}

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._idle and trainer.ckpt_path is not None:
            end = "max_epochs" if trainer.max_steps == -1 else "max_steps"
            rank_zero_info(
                f"Nothing was trained: {trainer.ckpt_path} is at epoch {trainer.current_epoch} and step "
                f"{trainer.global_step}, and trainer.{end} is {getattr(trainer, end)}; raise trainer.{end} to train "
                "further"
            )


def _fresh(trainer: Trainer) -> State:
    """Return the options of the optimizers' parameter groups, and the schedules, as they are before the first step."""
    return {
        "optimizers": [
            [{key: value for key, value in group.items() if key not in NOT_OPTIONS} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ],
        "schedules": [
            {
                "schedule": type(config.scheduler).__name__,
                "interval": config.interval,
                "frequency": config.frequency,
                "state": copy.deepcopy(config.scheduler.state_dict()),
                "function": _factors(config.scheduler),
            }
            for config in trainer.lr_scheduler_configs
        ],
    }


def _plain(value: Any) -> Any:
    """Convert a value to numbers, strings, None, lists and dictionaries; replace any other object by its class name."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Counter):  # torch's MultiStepLR keeps its milestones in a Counter.
        return list(value.elements())
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def _factors(scheduler: Any) -> list[float]:
    """Return values of a schedule's functions (``lr_lambdas``) at the steps ``COUNTS``.

    The ``state_dict`` of a schedule does not contain functions, so their values are compared instead.
    """
    factors = []
    for schedule in (scheduler, *getattr(scheduler, PARTS, ())):
        for function in getattr(schedule, "lr_lambdas", ()):
            for count in COUNTS:
                try:
                    factors.append(float(function(count)))
                except Exception:  # The function may not accept steps beyond the end of the schedule.
                    factors.append(-1.0)
    return factors


def _differences(before: State, now: State) -> Iterator[str]:
    """Yield a short description of each setting that differs between two configurations."""

    def is_leaf(value: Any) -> bool:  # A list of plain values is compared as a whole.
        return isinstance(value, list) and not any(isinstance(item, dict | list) for item in value)

    old, new = (dict(tree_leaves_with_path(state, is_leaf)) for state in (before, now))
    for path in {**new, **old}:
        old_value, new_value, name = old.get(path), new.get(path), str(getattr(path[-1], "key", ""))
        # Names that begin with an underscore are counters, and `base_lrs` repeats the groups' learning rates. Changes
        # of these values are not reported.
        derived = name.startswith("_") or name == "base_lrs"
        added = name != "schedule" and (path not in old or path not in new)
        if derived or added or repr(old_value) == repr(new_value):
            continue
        yield "the schedule's function" if name == "function" else f"{name} {new_value} (was {old_value})"


def _check_same(trainer: Trainer, states: Sequence[State]) -> None:
    """Refuse a checkpoint that was saved with a different optimizer. Torch would load its state without an error."""
    groups = [(optimizer, group) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    saved_groups = [group for state in states for group in state.get("param_groups", [])]
    for (optimizer, group), saved in zip(groups, saved_groups, strict=False):
        ours, theirs = set(optimizer.defaults) - set(saved), set(saved) - set(group) - {"initial_lr", "param_names"}
        # If only the optimizer or only the checkpoint has additional options, the checkpoint may come from another
        # version of the same optimizer, so it is not refused.
        if ours and theirs:
            path = str(trainer.ckpt_path)
            raise ConfigurationError(
                f"ckpt_path: {path} was not saved with {type(optimizer).__name__} but with a different optimizer, "
                f"whose options include {', '.join(sorted(theirs)[:3])}, but not {', '.join(sorted(ours)[:3])}; "
                f"{remedy(Path(path))}"
            )


def _apply_configuration(trainer: Trainer, before: State, now: State, fresh: State) -> None:
    """Set the options that have changed in the configuration, and restart the schedules at the run's current step."""
    scheduled = SCHEDULED if before["schedules"] or now["schedules"] else ()
    schedules = trainer.lr_scheduler_configs
    for number, optimizer in enumerate(trainer.optimizers):
        old_groups = before["optimizers"][number] if number < len(before["optimizers"]) else []
        watching = any(
            isinstance(config.scheduler, ReduceLROnPlateau) and config.scheduler.optimizer is optimizer
            for config in schedules
        )
        configured = zip(fresh["optimizers"][number], now["optimizers"][number], strict=True)
        for group, (values, new), old in zip(optimizer.param_groups, configured, old_groups, strict=False):
            reduced = float(group["lr"]) / old["lr"] if watching and old.get("lr") else 1.0
            for key, value in values.items():
                if key in scheduled or repr(old.get(key)) != repr(new[key]):
                    _set(group, key, value)
            if watching:
                _set(group, "lr", values["lr"] * reduced)
    for index, config in enumerate(schedules):
        past = before["schedules"][index] if index < len(before["schedules"]) else {}
        _advance(trainer, config, fresh["schedules"][index]["state"], past)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _advance(trainer: Trainer, config: LRSchedulerConfig, fresh: State, past: State) -> None:
    """Restart a schedule and advance it to the run's step.

    Call this after the optimizer's options have been set to their configured values.
    """
    scheduler = config.scheduler
    if isinstance(scheduler, ReduceLROnPlateau):
        learned = {key: vars(scheduler)[key] for key in LEARNED}
        scheduler.load_state_dict({**fresh, **learned})
        return
    if not isinstance(scheduler, LRScheduler):
        rank_zero_info(
            f"{type(scheduler).__name__} continues as it is in the checkpoint, and ignores changes of the "
            "configuration, because it is not a torch.optim.lr_scheduler.LRScheduler"
        )
        return
    same_class = past.get("schedule") == type(scheduler).__name__
    if same_class and (past["interval"], past["frequency"]) == (config.interval, config.frequency):
        steps = scheduler.last_epoch
    else:
        steps = (trainer.global_step if config.interval == "step" else trainer.current_epoch) // config.frequency
    scheduler.load_state_dict(fresh)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns because the optimizer makes no steps here.
            for _ in range(steps):
                scheduler.step()
    except ValueError as error:  # torch's OneCycleLR raises this error after the schedule's last step.
        raise ConfigurationError(
            f"the run has made {steps} steps of its schedule, and the configured {type(scheduler).__name__} is shorter "
            f"({error}): configure a schedule with more steps"
        ) from error
