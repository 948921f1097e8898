"""Measure short trainings with different numbers of devices, in rounds. In each round, each training makes some steps.

After the rounds, parts of a step are measured separately, for example the all-reduce of gradients. These measurements
only use the training with the most devices.
"""

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cnnstrategies.planning.scaling.figures import (
    COMPUTE,
    LARGER,
    EpochCosts,
    Facts,
    MeasuredRun,
    Measurements,
    Rank,
    Sample,
)
from cnnstrategies.planning.scaling.timeline import Round, Segment, joined
from cnnstrategies.planning.tune.trial import AS_IN_TRAINING, PATIENCE, Trial, TrialError

BLOCK_SECONDS = 1.0
FEWEST_STEPS, MOST_STEPS = 4, 100
FEWEST_ROUNDS, MOST_ROUNDS = 3, 12
COMPARED = 3  # Number of comparisons of a training with and without a change. Their median is used.
LOADING_SECONDS = 2.0
ENDING = 0.35  # Fraction of the measuring time that is reserved for the measurements after the rounds.

Report = Mapping[str, Any]  # A rank's report on the steps that it made after a command.


class Training:
    """A training with a certain number of devices, whose steps are measured.

    Args:
        folder: Folder for the training's files.
        name: Name of the training's files, without the suffix.
        words: Command-line arguments of the training.
        seconds: Time limit in seconds for the start and for each command.
    """

    def __init__(self, folder: Path, name: str, words: Sequence[str], seconds: float) -> None:
        self.trial = Trial(folder, name, words, seconds, AS_IN_TRAINING)
        self._rounds: list[Sequence[Report]] = []
        self._last: Sequence[Report] = []

    @property
    def hello(self) -> Mapping[str, Any]:
        """The report that rank 0 sent when it connected."""
        return self.trial.hellos[0]

    def begin(self) -> None:
        """Wait until the training runs, and make the first steps, which are not part of a round.

        Raises:
            TrialError: The training failed or took too long.
        """
        self.trial.wait_until_ready()
        self._last = self.trial.ask({"steps": FEWEST_STEPS})

    def measure(self) -> None:
        """Make the steps of one round, and store the ranks' reports."""
        self._last = self.trial.ask({"steps": self._count(1)})
        self._rounds.append(self._last)

    def run(self) -> MeasuredRun:
        """Combine the reports of all rounds, and return them as one measurement."""
        ranks = []
        for reports in zip(*self._rounds, strict=True):
            steps, parts = sum(report["steps"] for report in reports), Counter[str]()
            for report in reports:
                parts.update({name: value * report["steps"] / steps for name, value in report["parts"].items()})
            ranks.append(Rank(sum(report["samples"] for report in reports) / steps, parts))
        return MeasuredRun(ranks, [_rate(reports) for reports in self._rounds], [*map(_round, self._rounds)])

    def times(self, figure: Callable[[Sequence[Report]], float], larger: int = 1, **change: Any) -> float:
        """Measure a quantity with and without a change of the training.

        Return the quantity with the change divided by the quantity without the change, as the median of several
        comparisons.

        Args:
            figure: Function that computes the quantity from the ranks' reports.
            larger: Factor by which the change makes batches larger.
            change: Other changes, as keys and values of the command to the ranks.
        """
        ratios = []
        for _ in range(COMPARED):
            before = figure(self.trial.ask({"steps": self._count(1)}))
            command = {"steps": self._count(larger), "larger": larger, **change}
            ratios.append(figure(self.trial.ask(command)) / before)
        return statistics.median(ratios)

    def can_make_larger(self, larger: int) -> bool:
        """Return whether the ranks can make their batches larger by a factor.

        Batches that are objects of a user's class keep their size. A comparison of the training with and without larger
        batches would then only show noise.
        """
        return _samples_of_a_step(self.trial.ask({"steps": FEWEST_STEPS, "larger": larger})) > _samples_of_a_step(
            self._last
        )

    def _count(self, larger: int) -> int:
        step: float = max(report["seconds"] / report["steps"] for report in self._last)
        return min(MOST_STEPS, max(FEWEST_STEPS, math.ceil(BLOCK_SECONDS / (step * larger))))


def _round(reports: Sequence[Report]) -> Round:
    timelines = [[Segment(**segment) for segment in report["timeline"]] for report in reports]
    return joined(reports[0]["steps"], timelines, [report["parts"] for report in reports])


def _samples_of_a_step(reports: Sequence[Report]) -> float:
    return float(sum(report["samples"] / report["steps"] for report in reports))


def _rate(reports: Sequence[Report]) -> float:
    return float(sum(report["samples"] for report in reports) / max(report["seconds"] for report in reports))


def _compute_of_a_sample(reports: Sequence[Report]) -> float:
    """Return the seconds of computation per sample.

    The time per sample can be compared even if only some batches could be made larger. Batches that are objects of a
    user's class keep their size.
    """
    seconds = sum(report["parts"].get(name, 0.0) * report["steps"] for report in reports for name in COMPUTE)
    return float(seconds / sum(report["samples"] for report in reports))


@dataclass
class Bench:
    """A measurement of one configuration with several numbers of devices.

    Args:
        words: Command-line arguments of ``fit``. Keys are the numbers of devices.
        folder: Folder for the trainings' files.
        facts: Facts that are known from the configuration.
        together: Whether the processes of all trainings may exist at the same time.
        ends: Time at which to stop, on the clock of ``time.monotonic``.
        progress: Function that is called with a short text that says what is measured next.

    Attributes:
        trouble: Reasons why trainings failed. Keys are the numbers of devices of the failed trainings.
    """

    words: Mapping[int, Sequence[str]]
    folder: Path
    facts: Facts
    together: bool
    ends: float
    progress: Callable[[str], None] = lambda text: None
    trouble: dict[int, str] = field(default_factory=dict)

    def measure(self) -> Measurements:
        """Measure the training with each number of devices.

        Raises:
            TrialError: The training failed with every number of devices.
        """
        runs: dict[int, MeasuredRun] = {}
        facts = self.facts
        groups = [list(self.words)] if self.together else [[count] for count in self.words]
        for number, group in enumerate(groups):
            with ExitStack() as stack:
                trainings = self._start(group, stack)
                share = (self.ends - time.monotonic()) / (len(groups) - number)
                self._rounds(trainings, time.monotonic() + share * (1 - ENDING))
                runs |= {count: training.run() for count, training in trainings.items()}
                if trainings and max(trainings) == max(set(self.words) - set(self.trouble)):
                    self.progress("measuring single parts of a step, each by itself")
                    facts = self._facts(trainings[max(trainings)], runs[max(trainings)])
        if not runs:
            raise TrialError("; ".join(dict.fromkeys(self.trouble.values())))
        return Measurements([runs[count] for count in sorted(runs)], facts)

    def _start(self, counts: Sequence[int], stack: ExitStack) -> dict[int, Training]:
        launched = {}
        for count in counts:
            seconds = max(PATIENCE, self.ends - time.monotonic())
            launched[count] = training = Training(self.folder, str(count), self.words[count], seconds)
            stack.callback(training.trial.close)
        started = {}
        for count, training in launched.items():
            self.progress(f"starting with {count} device{'s' * (count > 1)}")
            try:
                training.begin()
                started[count] = training
            except TrialError as failure:
                self.trouble[count] = str(failure)
                training.trial.close()
        return started

    def _rounds(self, trainings: Mapping[int, Training], ends: float) -> None:
        for number in range(MOST_ROUNDS):
            if number >= FEWEST_ROUNDS and time.monotonic() > ends:
                return
            self.progress(f"round {number + 1}")
            for count in random.sample(list(trainings), len(trainings)):
                trainings[count].measure()

    def _facts(self, training: Training, run: MeasuredRun) -> Facts:
        trial, hello = training.trial, training.hello
        facts = replace(self.facts, epoch=EpochCosts(hello["steps"], hello["validation"]), **hello["facts"])
        known: dict[str, Any] = {}
        # Larger batches are measured only if each rank has the whole network, and the sum of all gradients only if the
        # ranks sum them at once.
        alike = hello["alike"]
        try:
            if facts.accelerator:
                read = trial.ask({"steps": FEWEST_STEPS, "reads": True})[0]
                known |= {"reads": read["reads"], "read_seconds": read["read_seconds"]}
            if hello["link"]:
                summed = trial.ask({"probe": "sum"})[0]
                known |= {"link": summed["seconds"], "gradient_bytes": summed["bytes"]}
            waits = [rank.parts.get("data", 0.0) for rank in run.ranks]
            if sample := trial.ask({"probe": "sample"}, only=waits.index(max(waits)))[0]:
                known["load"] = Sample(**sample)
            if hello["saving"]:
                saved = trial.ask({"probe": "save", "name": f".{self.folder.name}.ckpt"})[0]["seconds"]
                known["epoch"] = replace(facts.epoch, checkpoints=saved * hello["saving"])
            each = max(1, facts.cores // run.devices)
            if not facts.accelerator and facts.threads > each:
                known["with_fewer"] = run.rate * training.times(_rate, threads=each)
            if alike and training.can_make_larger(LARGER):
                known["larger"] = run.slowest.compute * LARGER * training.times(_compute_of_a_sample, larger=LARGER)
            loads = trial.ask({"probe": "load", "seconds": LOADING_SECONDS})
            rates = [report["rate"] for report in loads if "rate" in report]
            # All ranks make the same number of steps, so the ranks with faster loaders wait.
            known["loader"] = len(rates) * min(rates) if all(rates) else None
        except TrialError as failure:
            # A measurement may fail, for example because larger batches do not fit into memory. The results of the
            # earlier measurements are still reported.
            self.progress(str(failure))
        return replace(facts, **known)
