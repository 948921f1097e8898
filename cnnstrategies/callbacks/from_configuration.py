"""A run that goes on from a checkpoint has what was learned from there, and rates and schedules as it is configured."""

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

# What schedules set in a group as they go; an optimizer that finds its own rate keeps it under other names.
SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "base_momentum", "max_momentum", "betas")
LEARNED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # By a schedule that watches a metric.
COUNTS = (*(2**power for power in range(20)), *(3 * 2**power for power in range(18)))
NOT_OPTIONS = ("params", "param_names")

State = dict[str, Any]


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
        self._fresh: State = {}  # Groups and schedules as configured, before they have made a step.
        self._configured: State = {}  # The same as plain values, which can be saved and compared.
        self._before: State | None = None  # Those of the run that has saved the checkpoint.
        self._checkpoint: State = {}
        self._idle = True

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
        # Optimizers and schedules are there now; what the checkpoint has of them is loaded next.
        self._idle = True
        self._fresh = _fresh(trainer)
        self._configured = _plain(self._fresh)
        if trainer.ckpt_path is None:
            return
        _check_same(trainer, self._checkpoint.get("optimizer_states", []))
        if self._before is None:
            rank_zero_info(
                f"{trainer.ckpt_path} does not say how its run was configured, as it is not this command line's: "
                "learning rates and schedules go on as they are in it"
            )
            return
        for index, (old, new) in enumerate(zip(self._before["schedules"], self._fresh["schedules"], strict=False)):
            if old["schedule"] != new["schedule"]:  # It cannot load the state of another kind.
                self._checkpoint["lr_schedulers"][index] = copy.deepcopy(new["state"])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._idle = False
        if self._before is not None and repr(self._before) != repr(self._configured):
            _follow(trainer, self._before, self._configured, self._fresh)
            changed = ", ".join(dict.fromkeys(_differences(self._before, self._configured)))
            rank_zero_info(f"As configured, and not as in the checkpoint: {changed}")
        self._before, self._checkpoint, self._fresh = None, {}, {}

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._idle and trainer.ckpt_path is not None:
            end = "max_epochs" if trainer.max_steps == -1 else "max_steps"
            rank_zero_info(
                f"Nothing was trained: {trainer.ckpt_path} is at epoch {trainer.current_epoch} and step "
                f"{trainer.global_step}, and trainer.{end} is {getattr(trainer, end)}; give more to go on"
            )


def _fresh(trainer: Trainer) -> State:
    """Optimizers' groups and schedules as they are configured, before they have made a step."""
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
    """Numbers, texts, None, and lists and dictionaries of them."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Counter):  # torch's MultiStepLR
        return list(value.elements())
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


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


def _differences(before: State, now: State) -> Iterator[str]:
    """In words, what is configured in another way."""

    def is_leaf(value: Any) -> bool:  # A plain list, too.
        return isinstance(value, list) and not any(isinstance(one, dict | list) for one in value)

    old, new = (dict(tree_leaves_with_path(state, is_leaf)) for state in (before, now))
    for place in {**new, **old}:
        one, other, name = old.get(place), new.get(place), str(getattr(place[-1], "key", ""))
        counts = name.startswith("_") or name == "base_lrs"  # Or follows from the groups.
        if counts or repr(one) == repr(other) or (name != "schedule" and (place not in old or place not in new)):
            continue
        yield "its function" if name == "function" else f"{name} {other} (was {one})"


def _check_same(trainer: Trainer, states: Sequence[State]) -> None:
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


def _follow(trainer: Trainer, before: State, now: State, fresh: State) -> None:
    """Set what is configured in another way than it was, and begin all schedules anew."""
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
        _take_there(trainer, config, fresh["schedules"][index]["state"], past)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _take_there(trainer: Trainer, config: LRSchedulerConfig, fresh: State, past: State) -> None:
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
