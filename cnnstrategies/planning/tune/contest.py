"""Candidates' runs side by side, compared with the default and timed in turn until it is clear; and what was found."""

import math
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from rich import box
from rich.table import Table

from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.tune.race import Look, Race, RaceVerdict, combined
from cnnstrategies.planning.tune.settings import Setting, nested, write_commented
from cnnstrategies.planning.tune.trial import COMPARED_STEPS, ONE_BATCH, PATIENCE, Trial, TrialError

WARM_UP_STEPS = 3
BLOCK_SECONDS = 0.5
LARGEST_DIFFERENCE = 1e-3  # of a loss, relative, of what is said to change the rounding alone
FRESH = Look(7, 0.05)
# Of two processes that do the same, one can be a tenth quicker in all of its rounds (Mytkowicz et al., 2009, say why),
# so a smaller gain must show again in each of some pairs that are started for it: benchmarks/planning/tune_equal.md.
LUCK = 1.25
PAIRS = 3
DEFAULT = "default"
T = TypeVar("T")
Made = TypeVar("Made")
PLAIN = Setting(DEFAULT, {}, Effect.NONE)
EFFECTS = {Effect.NONE: "", Effect.ROUNDING: "", Effect.LEARNING: "changes learning"}


@dataclass(frozen=True)
class CandidateResult:
    """What became of a candidate.

    Attributes:
        verdict: What its rounds have shown; None if it did not come to that.
        trouble: Why not.
    """

    setting: Setting
    verdict: RaceVerdict | None = None
    trouble: str = ""


@dataclass
class _Runner:
    trial: Trial
    losses: Sequence[float]
    step: float

    def block(self) -> float:
        """Seconds per step."""
        steps = max(1, math.ceil(BLOCK_SECONDS / self.step))
        return float(self.trial.steps(steps)["seconds"]) / steps


@dataclass
class Contest:
    """Finds out which settings are faster than none.

    Args:
        ends: When to stop, by ``time.monotonic``.
        together: Most candidates whose processes may be there at once, beside the default's.
        deterministic: Whether two runs of the same give the same losses; else only the first loss is compared.
        command: The module that their ranks run.

    Attributes:
        default_times: Seconds per step of the default, by rounds.
    """

    words: Sequence[str]
    folder: Path
    ends: float
    together: int
    deterministic: bool = True
    progress: Callable[[str], None] = lambda text: None
    command: str = ONE_BATCH
    rows: dict[str, CandidateResult] = field(default_factory=dict)
    default_times: list[float] = field(default_factory=list)

    def run(self, settings: Sequence[Setting]) -> Setting | None:
        """Try them.

        Returns:
            The fastest that is faster than the default, in fresh rounds too; None if there is none.

        Raises:
            TrialError: The default itself does not run.
        """
        groups = [settings[first : first + self.together] for first in range(0, len(settings), self.together)]
        default: dict[str, _Runner] = {}
        with ExitStack() as stack:
            for group in groups:
                self.rows |= {one.name: CandidateResult(one) for one in group}
                with ExitStack() as own:
                    runners = default | self._start_all(group if default else [PLAIN, *group], own, stack)
                    default = {DEFAULT: runners[DEFAULT]}
                    self._race(runners)
                    if group is groups[-1] or time.monotonic() > self.ends:
                        return self._confirmed(runners)
        return None

    def _start_all(self, settings: Sequence[Setting], own: ExitStack, stack: ExitStack) -> dict[str, _Runner]:
        """Start some at once, the default's to outlive the others'; then each makes its first steps, alone.

        Where more threads than cores make steps, those that have a core spin while they wait for one that has none: the
        first steps of four runs together have been seen to take twenty times as long.
        """
        trials = {one.name: self._launch(one, stack if one.name == DEFAULT else own) for one in settings}
        ready = self._each("starting", trials, Trial.wait_until_ready)
        return self._each("first steps", {name: trials[name] for name in ready}, _warmed)

    def _each(self, work: str, all_of_them: Mapping[str, T], do: Callable[[T], Made]) -> dict[str, Made]:
        """What is made of those that do not fail: a candidate's row says why it does; the default's ends all."""
        made = {}
        for name, one in all_of_them.items():
            self.progress(f"{work}: {name}")
            try:
                made[name] = do(one)
            except TrialError as failure:
                if name == DEFAULT:
                    raise
                self._give_up(name, str(failure))
        return made

    def _give_up(self, name: str, trouble: str) -> None:
        self.rows[name] = CandidateResult(self.rows[name].setting, trouble=trouble)

    def _race(self, runners: dict[str, _Runner]) -> None:
        """Race a group, of which those stay that are not behind."""
        default = runners[DEFAULT]
        for name in [*runners]:
            if name != DEFAULT and (trouble := self._difference(self.rows[name].setting, default, runners[name])):
                self._give_up(name, trouble)
                runners.pop(name).trial.close()
        race = Race([name for name in runners if name != DEFAULT])
        while not race.over and time.monotonic() < self.ends:
            self._round(race, runners)
            for name, verdict in race.verdicts.items():
                self.rows[name] = CandidateResult(self.rows[name].setting, verdict)
                if name not in race.running and name in runners:
                    runners.pop(name).trial.close()

    def _round(self, race: Race, runners: dict[str, _Runner]) -> None:
        order = [DEFAULT, *race.running]
        random.shuffle(order)
        number = len(self.default_times) + 1
        seconds = self._each(f"round {number}", {name: runners[name] for name in order}, _Runner.block)
        for name in {*order} - {*seconds}:
            race.drop(name)
            runners.pop(name)
        base = seconds.pop(DEFAULT)
        self.default_times.append(base)
        race.add(base, seconds)

    def _confirmed(self, alive: Mapping[str, _Runner]) -> Setting | None:
        """The fastest that holds what it has promised: a slow process of the default makes all look faster."""
        known = [(row.verdict, row) for row in self.rows.values() if row.verdict is not None]
        faster = sorted((one for one in known if one[0].outcome == "faster"), key=lambda one: -one[0].speed)
        for number, (verdict, row) in enumerate(faster):
            name = row.setting.name
            try:
                if number and time.monotonic() > self.ends:
                    verdicts = [replace(verdict, outcome="undecided")]
                elif name in alive and verdict.low >= LUCK:
                    alone = len(self.rows) == 1  # Not chosen for its luck: its rounds are as good as new.
                    verdicts = [verdict if alone else self.fresh_verdict(name, alive)]
                else:
                    for one in alive.values():
                        one.trial.close()
                    alive = {}
                    verdicts = self.fresh_verdicts(row.setting)
            except TrialError as failure:
                self._give_up(name, str(failure))
                continue
            self.rows[name] = CandidateResult(row.setting, combined(verdicts))
            if verdicts[-1].outcome == "faster":
                return row.setting
        return None

    def fresh_verdicts(self, setting: Setting) -> list[RaceVerdict]:
        """The verdicts of pairs of new processes, up to the first that does not say faster.

        Who is started last has been seen to be quicker: that is the default first, as it was the candidate before.
        """
        verdicts: list[RaceVerdict] = []
        for turn in range(PAIRS):
            if verdicts and time.monotonic() > self.ends:
                return [*verdicts, replace(verdicts[-1], outcome="undecided")]
            with ExitStack() as own:
                order = [setting, PLAIN] if turn % 2 == 0 else [PLAIN, setting]
                verdicts.append(self.fresh_verdict(setting.name, self._start_all(order, own, own)))
            if verdicts[-1].outcome != "faster":
                break
        return verdicts

    def fresh_verdict(self, name: str, runners: Mapping[str, _Runner]) -> RaceVerdict:
        """The verdict of rounds that nothing was chosen by."""
        race = Race([one for one in runners if one == name], looks=(FRESH,))
        while not race.over:
            self._round(race, dict(runners))
        if name not in race.verdicts:
            raise TrialError(self.rows[name].trouble)
        return race.verdicts[name]

    def _launch(self, setting: Setting, stack: ExitStack) -> Trial:
        number = len(list(self.folder.glob("*.log")))
        overlay = self.folder / f"{number}.yaml"
        write_commented(overlay, nested(setting.values))
        words = [*self.words, *(["--config", str(overlay)] if setting.values else [])]
        trial = Trial(self.folder, str(number), words, max(PATIENCE, self.ends - time.monotonic()), self.command)
        stack.callback(trial.close)
        return trial

    def _difference(self, setting: Setting, default: _Runner, runner: _Runner) -> str:
        """What is wrong with its losses, if anything is."""
        if setting.effect is Effect.ROUNDING:  # Another number of workers draws other augmentations, and no more.
            count = COMPARED_STEPS if self.deterministic else 1
            for ours, theirs in zip(runner.losses[:count], default.losses[:count], strict=True):
                if not abs(ours - theirs) <= LARGEST_DIFFERENCE * max(abs(theirs), 1e-6):
                    return f"changes the loss: {ours:.6g} for {theirs:.6g}"
        return ""


def _warmed(trial: Trial) -> _Runner:
    first = trial.steps(COMPARED_STEPS)
    trial.steps(WARM_UP_STEPS)
    return _Runner(trial, first["losses"], trial.steps(WARM_UP_STEPS)["seconds"] / WARM_UP_STEPS)


def repeats(strategy: object) -> bool:
    """Whether two runs of the same give the same losses, by the strategy's part of a configuration."""
    return not re.search(r"async|mode='ssp'|_ssp", str(strategy))


def table(rows: Sequence[CandidateResult], rate: float, title: str = "") -> Table:
    """The candidates, fastest first.

    Args:
        rate: Steps per second of the default.
        title: What was tried, where that is not all.
    """
    shown = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left")
    for name in ("settings", "steps/s", "speed [interval]", "", ""):
        shown.add_column(name, justify="left" if name in ("settings", "") else "right")
    shown.add_row(DEFAULT, f"{rate:.3g}", "1", "", "")
    for row in sorted(rows, key=lambda row: -row.verdict.speed if row.verdict is not None else 0.0):
        if row.verdict is None:
            shown.add_row(row.setting.name, "", "", row.trouble or "not tried: no time left", "")
            continue
        one = row.verdict
        speed = f"{one.speed:.2f} [{one.low:.2f}, {one.high:.2f}]"
        shown.add_row(row.setting.name, f"{rate * one.speed:.3g}", speed, one.outcome, EFFECTS[row.setting.effect])
    return shown
