"""A run that goes on from a checkpoint has what was learned from there, and rates and schedules as it is configured."""

import copy
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from cnnstrategies._torch_private import PARTS_OF_A_SCHEDULE as PARTS
from cnnstrategies.checkpoints.check import remedy
from cnnstrategies.errors import ConfigurationError

Plain = Any  # Numbers, texts, None, and lists and dictionaries of them.

# What schedules set in a group as they go; an optimizer that finds its own rate keeps it under other names.
SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "base_momentum", "max_momentum", "betas")
LEARNED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # By a schedule that watches a metric.
COUNTS = (*(2**power for power in range(20)), *(3 * 2**power for power in range(18)))
NOT_OPTIONS = ("params", "param_names")


class FromConfiguration(Callback):
    """Lets the configuration decide, when a run is resumed, about all that belongs to it.

    A checkpoint has the optimizers' options and the whole schedules beside what was learned, and Lightning loads both:
    another learning rate, or more epochs for a cosine, would have no effect. With this callback a checkpoint says what
    was configured, too. Where a resumed run is configured otherwise, options take their new values, and schedules
    begin anew and are taken to the step where the run is; one line says what is different. Where nothing is, the run
    goes on exactly as saved.

    Raises:
        ConfigurationError: The checkpoint is another optimizer's, or a schedule ends before the step where the run is.
    """

    def __init__(self) -> None:
        self._configured: Plain = None
        self._before: Plain = None  # The same of the run that has saved the checkpoint.
        self._checkpoint: dict[str, Any] = {}
        self._fresh: list[Any] = []
        self._idle = True

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._configured is None else {"configured": self._configured}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = state_dict["configured"]

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Optimizers and schedules are there now; what the checkpoint has of them is loaded next.
        self._idle = True
        self._configured = _configured(trainer)
        if trainer.ckpt_path is None:
            return
        _check_same(trainer, self._checkpoint.get("optimizer_states", []))
        states = [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        self._fresh = [[[dict(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers], states]
        if self._before is not None:
            # A schedule cannot load the state of another kind.
            pairs = zip(self._before["schedules"], self._configured["schedules"], strict=False)
            for index, (old, new) in enumerate(pairs):
                if old["schedule"] != new["schedule"]:
                    self._checkpoint["lr_schedulers"][index] = copy.deepcopy(states[index])
        else:
            rank_zero_info(
                f"{trainer.ckpt_path} does not say how its run was configured, as it is not this command line's: "
                "learning rates and schedules go on as they are in it"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._idle = False
        if self._fresh and self._before is not None and repr(self._before) != repr(self._configured):
            _follow(trainer, self._before, self._configured, *self._fresh)
            changed = ", ".join(dict.fromkeys(_differences(self._before, self._configured)))
            rank_zero_info(f"As configured, and not as in the checkpoint: {changed}")
        self._before, self._checkpoint, self._fresh = None, {}, []

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._idle and trainer.ckpt_path is not None:
            end = "max_epochs" if trainer.max_steps == -1 else "max_steps"
            rank_zero_info(
                f"Nothing was trained: {trainer.ckpt_path} is at epoch {trainer.current_epoch} and step "
                f"{trainer.global_step}, and trainer.{end} is {getattr(trainer, end)}; give more to go on"
            )


def _configured(trainer: Trainer) -> Plain:
    """What is configured of the optimizers and schedules, before they have made a step."""
    return {
        "optimizers": [
            [
                {key: _plain(value) for key, value in group.items() if key not in NOT_OPTIONS}
                for group in optimizer.param_groups
            ]
            for optimizer in trainer.optimizers
        ],
        "schedules": [
            {
                "schedule": type(config.scheduler).__name__,
                "interval": config.interval,
                "frequency": config.frequency,
                "optimizer": _owner(config, trainer.optimizers),
                "options": [_options(config.scheduler.state_dict())],
                "function": _factors(config.scheduler),
            }
            for config in trainer.lr_scheduler_configs
        ],
    }


def _plain(value: Any) -> Plain:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Counter):  # torch's MultiStepLR
        return list(value.elements())
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def _options(state: Mapping[str, Any]) -> Plain:
    """What is configured of a schedule, out of its state, and of those that it is made of."""
    found = {
        key: _plain(value)
        for key, value in state.items()
        if not key.startswith("_") and key not in ("base_lrs", "last_epoch")  # Counters, and what the groups have.
    }
    return {**found, "options": [_options(one) for one in state.get(PARTS, ())]}


def _factors(scheduler: Any) -> list[float]:
    """Some values of functions that a schedule was given, which its state has not."""
    found = []
    for one in (scheduler, *getattr(scheduler, PARTS, ())):
        for function in getattr(one, "lr_lambdas", ()):
            for count in COUNTS:
                try:
                    found.append(float(function(count)))
                except Exception:  # Beyond its end.
                    found.append(-1.0)
    return found


def _owner(config: LRSchedulerConfig, optimizers: Sequence[Optimizer]) -> int:
    """Which of the optimizers a schedule is of; -1 for one that does not say."""
    mine = getattr(config.scheduler, "optimizer", None)
    return next((number for number, optimizer in enumerate(optimizers) if optimizer is mine), -1)


def _differences(before: Plain, now: Plain) -> Iterator[str]:
    """In words, what is configured in another way."""
    for old, new in zip(before["optimizers"], now["optimizers"], strict=False):
        for one, other in zip(old, new, strict=False):
            yield from _changed(_shown(one), _shown(other))
    none: dict[str, Any] = {}
    for old, new in zip_longest(before["schedules"], now["schedules"], fillvalue=none):
        if old.get("schedule") != new.get("schedule"):
            yield f"schedule {new.get('schedule', 'none')} (was {old.get('schedule', 'none')})"
        else:
            yield from _changed(old, new)


def _shown(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a user has given of a group, without what schedules make of it."""
    given = {key: value for key, value in group.items() if key not in SCHEDULED or key in ("momentum", "betas")}
    return {"lr": group.get("initial_lr", group.get("lr")), **given}


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys((*new, *old)):
        before, now = old.get(key), new.get(key)
        if key == "options":
            for one, other in zip(before or (), now or (), strict=False):
                yield from _changed(one, other)
        elif repr(before) != repr(now):
            yield "its function" if key == "function" else f"{key} {now} (was {before})"


def _check_same(trainer: Trainer, states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a checkpoint of another optimizer, whose state would be taken for this one's."""
    groups = [(optimizer, group) for optimizer in trainer.optimizers for group in optimizer.param_groups]
    saved_groups = [group for state in states for group in state.get("param_groups", [])]
    for (optimizer, group), saved in zip(groups, saved_groups, strict=False):
        ours, theirs = set(optimizer.defaults) - set(saved), set(saved) - set(group) - {"initial_lr", "param_names"}
        # One alone could be another version of the same one.
        if ours and theirs:
            path = str(trainer.ckpt_path)
            raise ConfigurationError(
                f"ckpt_path: {path} was saved with another optimizer than {type(optimizer).__name__}: it has "
                f"{', '.join(sorted(theirs)[:3])} and no {', '.join(sorted(ours)[:3])}; {remedy(Path(path))}"
            )


def _follow(
    trainer: Trainer, before: Plain, now: Plain, groups: Sequence[Sequence[Mapping[str, Any]]], states: Sequence[Any]
) -> None:
    """Set what is configured in another way than it was; ``groups`` and ``states`` are from before the checkpoint's."""
    for number, optimizer in enumerate(trainer.optimizers):
        mine = [index for index, one in enumerate(now["schedules"]) if one["optimizer"] == number]
        theirs = [one for one in before["schedules"] if one["optimizer"] == number]
        old_groups = before["optimizers"][number] if number < len(before["optimizers"]) else []
        new_groups = now["optimizers"][number]
        rates = [[{key: group.get(key) for key in SCHEDULED} for group in one] for one in (old_groups, new_groups)]
        schedules = [theirs, [now["schedules"][index] for index in mine]]
        anew = any(schedules) and any(repr(old) != repr(new) for old, new in (rates, schedules))
        watching = any(isinstance(trainer.lr_scheduler_configs[index].scheduler, ReduceLROnPlateau) for index in mine)
        for group, fresh, old, new in zip(optimizer.param_groups, groups[number], old_groups, new_groups, strict=False):
            reduced = float(group["lr"]) / old["lr"] if watching and old.get("lr") else 1.0
            for key in new:
                if repr(old.get(key)) != repr(new[key]) or (anew and key in SCHEDULED):
                    _set(group, key, fresh[key])
            if watching:
                _set(group, "lr", fresh["lr"] * reduced)
        if anew:
            for index in mine:
                past = before["schedules"][index] if index < len(before["schedules"]) else {}
                _take_there(trainer, trainer.lr_scheduler_configs[index], states[index], past)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _take_there(trainer: Trainer, config: LRSchedulerConfig, fresh: Any, past: Mapping[str, Any]) -> None:
    """Begin a schedule anew and take it to where the run is; its optimizer has the groups that it begins with."""
    scheduler = config.scheduler
    if isinstance(scheduler, ReduceLROnPlateau):
        learned = {key: vars(scheduler)[key] for key in LEARNED}
        scheduler.load_state_dict({**fresh, **learned})
        return
    if not isinstance(scheduler, LRScheduler):
        rank_zero_info(f"{type(scheduler).__name__} is no schedule of torch's, and goes on as it is in the checkpoint")
        return
    same = past.get("schedule") == type(scheduler).__name__
    if same and (past["interval"], past["frequency"]) == (config.interval, config.frequency):
        steps = scheduler.last_epoch
    else:
        steps = (trainer.global_step if config.interval == "step" else trainer.current_epoch) // config.frequency
    scheduler.load_state_dict(fresh)
    try:
        with warnings.catch_warnings(action="ignore"):  # That no optimizer has stepped between.
            for _ in range(steps):
                scheduler.step()
    except ValueError as error:  # torch's OneCycleLR
        raise ConfigurationError(
            f"the run goes on from step {steps} of its schedule, beyond the end of {type(scheduler).__name__} as it is "
            f"configured: {error}"
        ) from error
