"""Keep the processes of all candidates alive at once, and time one candidate after another in many rounds.

The rounds end when it is known which candidates are faster than the default.
"""

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
from cnnstrategies.planning.configuration_file import write_commented
from cnnstrategies.planning.tune.race import Analysis, Race, RaceVerdict, combined
from cnnstrategies.planning.tune.settings import Setting, nested
from cnnstrategies.planning.tune.trial import COMPARED_STEPS, ONE_BATCH, PATIENCE, Trial, TrialError

WARM_UP_STEPS = 3
BLOCK_SECONDS = 0.5
# Largest relative difference between two losses that rounding can explain. A candidate that may only change rounding is
# rejected if its losses differ more than this from the default's losses.
LARGEST_DIFFERENCE = 1e-3
# The new rounds that confirm a candidate have a single analysis, which takes place after 7 rounds.
FRESH = Analysis(7, 0.05)
# Of two processes with equal settings, one can be 10 % faster than the other in all rounds (Mytkowicz et al., 2009,
# explain why). A candidate whose gain may be below `CERTAIN_GAIN` must therefore be faster again in each of `PAIRS`
# pairs of new processes. A pair runs the default and the candidate; see benchmarks/planning/tune_equal.md.
CERTAIN_GAIN = 1.25
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
        verdict: Verdict after the candidate's rounds; None if the candidate was not measured.
        trouble: Reason why the candidate failed or was rejected; otherwise empty.
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
        """Run a block of steps that takes about `BLOCK_SECONDS`, and return the seconds per step."""
        steps = max(1, math.ceil(BLOCK_SECONDS / self.step))
        return float(self.trial.steps(steps)["seconds"]) / steps


@dataclass
class Contest:
    """A search for the fastest setting. Each candidate is a setting that is compared with the default.

    Args:
        words: Command-line arguments of the training, without the arguments that select a candidate's setting.
        folder: Folder for the trials' files.
        ends: Time at which to stop, on the clock of ``time.monotonic``.
        together: Largest number of candidates whose processes may exist at once. The default runs in addition to them.
        deterministic: Whether two runs with the same settings have equal losses. If not, only the first loss is
            compared.
        progress: Function that is called with a short text that says what is measured next.
        module: Name of the module whose function ``main`` the ranks run: `ONE_BATCH` or `AS_IN_TRAINING`.

    Attributes:
        rows: Results of the candidates. Keys are the candidates' names.
        default_times: Seconds per step of the default in each round.
    """

    words: Sequence[str]
    folder: Path
    ends: float
    together: int
    deterministic: bool = True
    progress: Callable[[str], None] = lambda text: None
    module: str = ONE_BATCH
    rows: dict[str, CandidateResult] = field(default_factory=dict)
    default_times: list[float] = field(default_factory=list)

    def run(self, settings: Sequence[Setting]) -> Setting | None:
        """Measure all settings, and confirm the fastest setting with new rounds.

        Returns:
            The fastest setting that was confirmed to be faster than the default; None if no setting was confirmed.

        Raises:
            TrialError: The default failed.
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
                        return self._confirm(runners)
        return None

    def _start_all(
        self, settings: Sequence[Setting], candidate_stack: ExitStack, stack: ExitStack
    ) -> dict[str, _Runner]:
        """Start the trials of some settings all at once, then let one trial after another make its first steps.

        The first steps are not made at the same time, because more threads than cores would run. Running threads then
        spin while they wait for threads that have no core. In one case, the first steps of four runs took twenty times
        as long when they were made at the same time.

        Args:
            settings: Candidates, and the default if it has not been started yet.
            candidate_stack: Stack that closes the candidates' trials on exit.
            stack: Stack that closes the default's trial on exit. The default's trial is closed later than the
                candidates' trials.

        Returns:
            The trials that made their first steps. Keys are the settings' names.
        """
        trials = {
            setting.name: self._launch(setting, stack if setting.name == DEFAULT else candidate_stack)
            for setting in settings
        }
        ready = self._call_for_each("starting", trials, Trial.wait_until_ready)
        return self._call_for_each("first steps", {name: trials[name] for name in ready}, _make_first_steps)

    def _call_for_each(self, work: str, items: Mapping[str, T], do: Callable[[T], Made]) -> dict[str, Made]:
        """Call a function for each candidate and for the default, and return the results by name.

        A candidate whose call fails is left out. The reason is written into the candidate's row of the results.

        Args:
            work: Name of the work, for the progress display.
            items: Argument of each call. Keys are the names of the settings.
            do: Function to call. Its argument is an item of `items`.

        Raises:
            TrialError: The call for the default failed.
        """
        made = {}
        for name, item in items.items():
            self.progress(f"{work}: {name}")
            try:
                made[name] = do(item)
            except TrialError as failure:
                if name == DEFAULT:
                    raise
                self._reject(name, str(failure))
        return made

    def _reject(self, name: str, trouble: str) -> None:
        self.rows[name] = CandidateResult(self.rows[name].setting, trouble=trouble)

    def _race(self, runners: dict[str, _Runner]) -> None:
        """Measure a group of candidates in rounds. Close a candidate's trial as soon as it cannot become the fastest.

        Args:
            runners: The trials of the default and of the candidates. Closed trials are removed.
        """
        default = runners[DEFAULT]
        for name in [*runners]:
            if name != DEFAULT and (trouble := self._difference(self.rows[name].setting, default, runners[name])):
                self._reject(name, trouble)
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
        seconds = self._call_for_each(f"round {number}", {name: runners[name] for name in order}, _Runner.block)
        for name in {*order} - {*seconds}:
            race.drop(name)
            runners.pop(name)
        base = seconds.pop(DEFAULT)
        self.default_times.append(base)
        race.add(base, seconds)

    def _confirm(self, alive: Mapping[str, _Runner]) -> Setting | None:
        """Return the fastest candidate that is also faster than the default in new rounds.

        Return None if no candidate is faster in new rounds. New rounds are needed because all candidates appear faster
        if the process of the default happens to be slow.

        Args:
            alive: The default and the candidates whose trials are still open.
        """
        known = [(row.verdict, row) for row in self.rows.values() if row.verdict is not None]
        faster = sorted((entry for entry in known if entry[0].outcome == "faster"), key=lambda entry: -entry[0].speed)
        for number, (verdict, row) in enumerate(faster):
            name = row.setting.name
            try:
                if number and time.monotonic() > self.ends:
                    verdicts = [replace(verdict, outcome="undecided")]
                elif name in alive and verdict.low >= CERTAIN_GAIN:
                    # Selecting the fastest of several candidates makes its verdict biased. The verdict on the only
                    # candidate is unbiased, so no new rounds are needed.
                    alone = len(self.rows) == 1
                    verdicts = [verdict if alone else self.fresh_verdict(name, alive)]
                else:
                    for runner in alive.values():
                        runner.trial.close()
                    alive = {}
                    verdicts = self.fresh_verdicts(row.setting)
            except TrialError as failure:
                self._reject(name, str(failure))
                continue
            self.rows[name] = CandidateResult(row.setting, combined(verdicts))
            if verdicts[-1].outcome == "faster":
                return row.setting
        return None

    def fresh_verdicts(self, setting: Setting) -> list[RaceVerdict]:
        """Return the verdicts on a setting from up to `PAIRS` pairs of new processes.

        A pair runs the default and the setting. The next pair runs only if the verdict is "faster".

        In measurements, a process that started last was faster than a process that started first. In the contest, the
        candidates started after the default. Therefore the first pair starts the default last, and the order alternates
        from pair to pair.
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
        """Run new rounds of a candidate and the default, and return the verdict on the candidate.

        The verdict is unbiased, because the candidate was not selected by these rounds.

        Raises:
            TrialError: The candidate failed.
        """
        race = Race([runner_name for runner_name in runners if runner_name == name], analyses=(FRESH,))
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
        trial = Trial(self.folder, str(number), words, max(PATIENCE, self.ends - time.monotonic()), self.module)
        stack.callback(trial.close)
        return trial

    def _difference(self, setting: Setting, default: _Runner, runner: _Runner) -> str:
        """Return a text that says how a setting's losses differ from the default's losses.

        The text is empty if the losses agree, or if they are not checked. Losses are only checked for settings that
        change the rounding. With other settings, different losses are not necessarily an error: for example, a
        different number of data loader workers draws different random augmentations.
        """
        if setting.effect is Effect.ROUNDING:
            count = COMPARED_STEPS if self.deterministic else 1
            for ours, theirs in zip(runner.losses[:count], default.losses[:count], strict=True):
                if not abs(ours - theirs) <= LARGEST_DIFFERENCE * max(abs(theirs), 1e-6):
                    return f"changes the loss: {ours:.6g} instead of {theirs:.6g}"
        return ""


def _make_first_steps(trial: Trial) -> _Runner:
    first = trial.steps(COMPARED_STEPS)
    trial.steps(WARM_UP_STEPS)
    return _Runner(trial, first["losses"], trial.steps(WARM_UP_STEPS)["seconds"] / WARM_UP_STEPS)


def repeats(strategy: object) -> bool:
    """Whether two runs with the same settings have equal losses under a strategy.

    Args:
        strategy: The value of ``trainer.strategy`` in the configuration.
    """
    return not re.search(r"async|mode='ssp'|_ssp", str(strategy))


def table(rows: Sequence[CandidateResult], rate: float, title: str = "") -> Table:
    """Return a table of the candidates, fastest first.

    Args:
        rows: Results of the candidates.
        rate: Steps per second of the default.
        title: Title of the table; empty for a table without a title.
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
