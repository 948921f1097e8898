"""Runs of candidates side by side, timed in turns and compared with the default until the fastest is known."""

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
LARGEST_DIFFERENCE = 1e-3  # Largest relative difference of a loss under a setting that only changes the rounding.
FRESH = Look(7, 0.05)
# One of two equal processes can be a tenth faster in all its rounds (Mytkowicz et al., 2009, explain why). A gain below
# `LUCK` must therefore appear again in each of `PAIRS` pairs of new processes; see benchmarks/planning/tune_equal.md.
LUCK = 1.25
PAIRS = 3
DEFAULT = "default"
T = TypeVar("T")
Made = TypeVar("Made")
PLAIN = Setting(DEFAULT, {}, Effect.NONE)
EFFECTS = {Effect.NONE: "", Effect.ROUNDING: "", Effect.LEARNING: "changes learning"}


@dataclass(frozen=True)
class CandidateResult:
    """The result of a candidate.

    Attributes:
        setting: The candidate.
        verdict: Verdict of its rounds; None if the candidate was not measured.
        trouble: Reason why the candidate was not measured.
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
        """Time some steps, and return the seconds per step."""
        steps = max(1, math.ceil(BLOCK_SECONDS / self.step))
        return float(self.trial.steps(steps)["seconds"]) / steps


@dataclass
class Contest:
    """Finds the settings that are faster than the default.

    Args:
        words: Arguments of the command line that trains, without a setting.
        folder: Folder for the trials' files.
        ends: Time at which to stop, on the clock of ``time.monotonic``.
        together: Largest number of candidates whose processes may exist at once, in addition to the default's.
        deterministic: Whether two equal runs have equal losses. Otherwise only the first loss is compared.
        progress: Called with a short text when a new part begins.
        command: Module that the ranks run.

    Attributes:
        rows: Result of each candidate, by name.
        default_times: Seconds per step of the default in each round.
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
        """Measure all settings.

        Returns:
            The fastest setting that is faster than the default, also in fresh rounds; None if no setting is.

        Raises:
            TrialError: The default itself does not run.
        """
        groups = [settings[first : first + self.together] for first in range(0, len(settings), self.together)]
        default: dict[str, _Runner] = {}
        with ExitStack() as stack:
            for group in groups:
                self.rows |= {setting.name: CandidateResult(setting) for setting in group}
                with ExitStack() as group_stack:
                    runners = default | self._start_all(group if default else [PLAIN, *group], group_stack, stack)
                    default = {DEFAULT: runners[DEFAULT]}
                    self._race(runners)
                    if group is groups[-1] or time.monotonic() > self.ends:
                        return self._confirmed(runners)
        return None

    def _start_all(
        self, settings: Sequence[Setting], candidate_stack: ExitStack, stack: ExitStack
    ) -> dict[str, _Runner]:
        """Start the trials of some settings at once; then each trial makes its first steps alone.

        If more threads than cores make steps, threads with a core spin while they wait for a thread without a core.
        First steps of four runs at the same time took twenty times as long in one case.

        Args:
            settings: Candidates, and the default if it does not run yet.
            candidate_stack: Closes the candidates' trials.
            stack: Closes the default's trial, which outlives the candidates' trials.
        """
        trials = {
            setting.name: self._launch(setting, stack if setting.name == DEFAULT else candidate_stack)
            for setting in settings
        }
        ready = self._each("starting", trials, Trial.wait_until_ready)
        return self._each("first steps", {name: trials[name] for name in ready}, _warmed)

    def _each(self, work: str, all_of_them: Mapping[str, T], do: Callable[[T], Made]) -> dict[str, Made]:
        """Call a function for each item, and return the results of those that do not fail.

        If a candidate fails, its row gets the reason. If the default fails, its error is raised.
        """
        made = {}
        for name, item in all_of_them.items():
            self.progress(f"{work}: {name}")
            try:
                made[name] = do(item)
            except TrialError as failure:
                if name == DEFAULT:
                    raise
                self._give_up(name, str(failure))
        return made

    def _give_up(self, name: str, trouble: str) -> None:
        self.rows[name] = CandidateResult(self.rows[name].setting, trouble=trouble)

    def _race(self, runners: dict[str, _Runner]) -> None:
        """Measure a group of candidates; only the trials of candidates that may be the fastest stay open."""
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
        """Return the fastest candidate that is also faster in fresh rounds.

        Fresh rounds are needed because a slow process of the default makes all candidates look faster.
        """
        known = [(row.verdict, row) for row in self.rows.values() if row.verdict is not None]
        faster = sorted((entry for entry in known if entry[0].outcome == "faster"), key=lambda entry: -entry[0].speed)
        for number, (verdict, row) in enumerate(faster):
            name = row.setting.name
            try:
                if number and time.monotonic() > self.ends:
                    verdicts = [replace(verdict, outcome="undecided")]
                elif name in alive and verdict.low >= LUCK:
                    alone = len(self.rows) == 1  # A single candidate was not selected, so its rounds count as fresh.
                    verdicts = [verdict if alone else self.fresh_verdict(name, alive)]
                else:
                    for runner in alive.values():
                        runner.trial.close()
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
        """Return the verdicts of pairs of new processes, up to the first verdict other than "faster".

        The process that starts last was faster in measurements. Therefore the order alternates, and in the first pair
        the default starts last, because in the contest the candidates did.
        """
        verdicts: list[RaceVerdict] = []
        for turn in range(PAIRS):
            if verdicts and time.monotonic() > self.ends:
                return [*verdicts, replace(verdicts[-1], outcome="undecided")]
            with ExitStack() as pair_stack:
                order = [setting, PLAIN] if turn % 2 == 0 else [PLAIN, setting]
                verdicts.append(self.fresh_verdict(setting.name, self._start_all(order, pair_stack, pair_stack)))
            if verdicts[-1].outcome != "faster":
                break
        return verdicts

    def fresh_verdict(self, name: str, runners: Mapping[str, _Runner]) -> RaceVerdict:
        """Return the verdict of new rounds, which did not influence the selection of the candidate.

        Raises:
            TrialError: The candidate failed.
        """
        race = Race([runner_name for runner_name in runners if runner_name == name], looks=(FRESH,))
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
        """Return a text that says how a setting's losses differ from the default's; empty if they agree.

        Only settings that change the rounding are checked. A setting without any effect on the computation may change
        the losses in another way: another number of loading workers draws other augmentations.
        """
        if setting.effect is Effect.ROUNDING:
            count = COMPARED_STEPS if self.deterministic else 1
            for ours, theirs in zip(runner.losses[:count], default.losses[:count], strict=True):
                if not abs(ours - theirs) <= LARGEST_DIFFERENCE * max(abs(theirs), 1e-6):
                    return f"changes the loss: {ours:.6g} instead of {theirs:.6g}"
        return ""


def _warmed(trial: Trial) -> _Runner:
    first = trial.steps(COMPARED_STEPS)
    trial.steps(WARM_UP_STEPS)
    return _Runner(trial, first["losses"], trial.steps(WARM_UP_STEPS)["seconds"] / WARM_UP_STEPS)


def repeats(strategy: object) -> bool:
    """Whether two equal runs have equal losses, according to the strategy in the configuration."""
    return not re.search(r"async|mode='ssp'|_ssp", str(strategy))


def table(rows: Sequence[CandidateResult], rate: float, title: str = "") -> Table:
    """Return a table of the candidates, fastest first.

    Args:
        rows: Results of the candidates.
        rate: Steps per second of the default.
        title: Title of the table; empty for none.
    """
    shown = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left")
    for name in ("settings", "steps/s", "speed [interval]", "", ""):
        shown.add_column(name, justify="left" if name in ("settings", "") else "right")
    shown.add_row(DEFAULT, f"{rate:.3g}", "1", "", "")
    for row in sorted(rows, key=lambda row: -row.verdict.speed if row.verdict is not None else 0.0):
        if row.verdict is None:
            shown.add_row(row.setting.name, "", "", row.trouble or "not tried: no time left", "")
            continue
        verdict = row.verdict
        speed = f"{verdict.speed:.2f} [{verdict.low:.2f}, {verdict.high:.2f}]"
        shown.add_row(
            row.setting.name, f"{rate * verdict.speed:.3g}", speed, verdict.outcome, EFFECTS[row.setting.effect]
        )
    return shown
