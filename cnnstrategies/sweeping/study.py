"""The trials of a sweep in Optuna's journal, which several programs on several machines share."""

import contextlib
import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.sweeping.plan import Choice, Plan, Range

JOURNAL = "journal.log"
CAUSE = "cause"  # Attribute of a trial: why it has failed.
INTERRUPTED = "interrupted"  # Attribute of the study: trials that are done again, and do not count.
SAME = ("parameters", "metric", "direction")  # Of a plan: trials with others could not be compared.


class Study:
    """The trials in a folder.

    Args:
        folder: The sweep's; made if need be.
        plan: The sweep.

    Raises:
        ConfigurationError: The folder is another sweep's.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = {key: _distribution(one) for key, one in plan.parameters.items()}
        told = {name: value for name, value in asdict(plan).items() if name in SAME}
        with self._alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(folder / JOURNAL))),
                study_name="sweep",
                direction=plan.direction,
                pruner=pruner_of(plan),
                load_if_exists=True,
            )
            identity = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
            if self._study.user_attrs.setdefault("identity", identity) != identity:
                raise ConfigurationError(
                    f"sweep: {folder} holds trials with other parameters, or another metric or direction: name another "
                    "--folder, or give the sweep that was begun there"
                )
            self._study.set_user_attr("identity", identity)

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials that have begun, but those that were interrupted."""
        interrupted = self._study.user_attrs.get(INTERRUPTED, [])
        return [one for one in self._study.trials if one.state != TrialState.WAITING and one.number not in interrupted]

    @property
    def best(self) -> FrozenTrial | None:
        """The best of those that were not pruned."""
        done = [one for one in self.trials if one.state == TrialState.COMPLETE and one.values]
        return (max if self.plan.most else min)(done, key=lambda one: one.values[0], default=None)

    @contextlib.contextmanager
    def next(self) -> Iterator[Trial | None]:
        """The next trial, of which others know that it is under way; None if there are enough.

        A trial whose program has ended without an end of its own is done again first.
        """
        with self._alone():
            self._give_back()
            trial = None if len(self.trials) >= self.plan.trials else self._study.ask(self._space)
            held = None if trial is None else _lock(self.place(trial.number))
        try:
            yield trial
        finally:
            if held is not None:
                os.close(held)

    def place(self, number: int) -> Path:
        """A trial's folder; it is made."""
        folder = self.folder / "trials" / f"{number:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def tell(self, trial: Trial, value: float | None, pruned: bool, cause: str = "") -> None:
        """How a trial has ended.

        Args:
            trial: It.
            value: Its best; None if it has none.
            pruned: Whether it was ended for being bad.
            cause: Why there is no value.
        """
        if value is None:
            trial.set_user_attr(CAUSE, cause)
            self._study.tell(trial, state=TrialState.FAIL)
        elif pruned:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, value)

    def _give_back(self) -> None:
        for one in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            held = _lock(self.place(one.number))
            if held is None:
                continue  # Its program is alive.
            os.close(held)
            interrupted = self._study.user_attrs.get(INTERRUPTED, [])
            self._study.set_user_attr(INTERRUPTED, [*interrupted, one.number])
            self._study.tell(one.number, state=TrialState.FAIL)
            self._study.enqueue_trial(one.params)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One program at a time, of those that share the folder."""
        file = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _lock(folder: Path) -> int | None:
    """The lock of a trial, which ends with the process that has it; None if another one has it."""
    file = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _distribution(space: Range | Choice) -> BaseDistribution:
    if isinstance(space, Choice):
        return CategoricalDistribution(space.values)
    arguments: Any = {"low": space.low, "high": space.high, "log": space.log}
    if space.whole:
        return IntDistribution(**arguments, step=int(space.step or 1))
    return FloatDistribution(**arguments, step=space.step)


def pruner_of(plan: Plan) -> BasePruner:
    """Who ends trials that do not do well."""
    if plan.pruner == "median":
        return MedianPruner(n_warmup_steps=plan.warmup)
    if plan.pruner == "halving":
        return SuccessiveHalvingPruner(min_resource=max(1, plan.warmup))
    if plan.pruner == "hyperband":
        return HyperbandPruner(min_resource=max(1, plan.warmup))
    return NopPruner()
