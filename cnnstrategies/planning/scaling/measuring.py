"""Short trainings on one device and on more, in turns, and what is asked of the largest one at its end."""

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cnnstrategies.planning.scaling.figures import COMPUTE, Epoch, Facts, Found, Rank, Run, Sample
from cnnstrategies.planning.tune.trial import PATIENCE, Trial, TrialError

COMMAND = "cnnstrategies.commands.scaling.run"
BLOCK_SECONDS = 1.0
FEWEST_STEPS, MOST_STEPS = 4, 100
FEWEST_ROUNDS, MOST_ROUNDS = 3, 12
COMPARED = 3  # rounds of a change within a training
LARGER = 4
LOADING_SECONDS = 2.0
ENDING = 0.35  # of the time, for what is asked at the end
ALL_REDUCE = "communication"  # The part of a step, as the ranks call it.

Report = Mapping[str, Any]  # Of a rank, on the steps that were ordered.


class Training:
    """A training that is measured.

    Args:
        seconds: How long it may take to start, and then for any order.
    """

    def __init__(self, folder: Path, name: str, words: Sequence[str], seconds: float) -> None:
        self.trial = Trial(folder, name, words, seconds, True, COMMAND)
        self.rates: list[float] = []
        self._parts: list[Counter[str]] = []
        self._samples: list[float] = []
        self._steps = 0
        self._step = 0.0

    @property
    def hello(self) -> Mapping[str, Any]:
        """What rank 0 has said of itself."""
        return self.trial.hellos[0]

    def begin(self) -> None:
        """Wait until it trains, and make some steps that do not count; TrialError if it fails."""
        self.trial.wait_until_ready()
        self._step = self._ask(FEWEST_STEPS)[1]

    def measure(self) -> None:
        """One round."""
        reports, self._step = self._ask(self._count(1))
        self.rates.append(_rate(reports))
        self._parts = self._parts or [Counter() for _ in reports]
        self._samples = self._samples or [0.0] * len(reports)
        steps = reports[0]["steps"]
        self._steps += steps
        for place, report in enumerate(reports):
            self._parts[place].update({name: value * steps for name, value in report["parts"].items()})
            self._samples[place] += report["samples"]

    def run(self) -> Run:
        """What was measured."""
        ranks = [
            Rank(samples / self._steps, {name: value / self._steps for name, value in parts.items()}, hello["waiting"])
            for samples, parts, hello in zip(self._samples, self._parts, self.trial.hellos, strict=True)
        ]
        return Run(ranks, list(self.rates))

    def times(self, of: Callable[[Sequence[Report]], float], larger: int = 1, **change: Any) -> float:
        """How many times as much something of the ranks' reports is with a change."""
        ratios = []
        for _ in range(COMPARED):
            before = of(self._ask(self._count(1))[0])
            ratios.append(of(self._ask(self._count(larger), larger=larger, **change)[0]) / before)
        return statistics.median(ratios)

    def _count(self, larger: int) -> int:
        return min(MOST_STEPS, max(FEWEST_STEPS, math.ceil(BLOCK_SECONDS / (self._step * larger))))

    def _ask(self, steps: int, **more: Any) -> tuple[list[dict[str, Any]], float]:
        reports = self.trial.ask({"steps": steps, **more})
        return reports, max(report["seconds"] for report in reports) / steps


def _rate(reports: Sequence[Report]) -> float:
    return float(sum(report["samples"] for report in reports) / max(report["seconds"] for report in reports))


def _compute_of_a_sample(reports: Sequence[Report]) -> float:
    """Whatever a batch is made of: one of a class of the user's own does not grow."""
    seconds = sum(report["parts"].get(name, 0.0) * report["steps"] for report in reports for name in COMPUTE)
    return float(seconds / sum(report["samples"] for report in reports))


@dataclass
class Bench:
    """Measures trainings of a configuration on several numbers of devices.

    Args:
        words: Of ``fit``, for each number of devices.
        strategy: As the configuration names it.
        keys: Its numbers that remedies change.
        together: Whether the trainings may be there at the same time.
        ends: When to stop, by ``time.monotonic``.

    Attributes:
        trouble: Why a number of devices was not measured.
    """

    words: Mapping[int, Sequence[str]]
    folder: Path
    strategy: str
    keys: Mapping[str, int]
    together: bool
    ends: float
    progress: Callable[[str], None] = lambda text: None
    trouble: dict[int, str] = field(default_factory=dict)

    def measure(self) -> Found:
        """Measure.

        Raises:
            TrialError: No number of devices could be trained on.
        """
        runs: dict[int, Run] = {}
        facts = Facts(self.strategy)
        groups = [list(self.words)] if self.together else [[count] for count in self.words]
        for number, group in enumerate(groups):
            with ExitStack() as stack:
                trainings = self._start(group, stack)
                share = (self.ends - time.monotonic()) / (len(groups) - number)
                self._rounds(trainings, time.monotonic() + share * (1 - ENDING))
                runs |= {count: training.run() for count, training in trainings.items()}
                if trainings and max(trainings) == max(set(self.words) - set(self.trouble)):
                    self.progress("what the parts can do alone")
                    facts = self._facts(trainings[max(trainings)], runs[max(trainings)])
        if not runs:
            raise TrialError("; ".join(dict.fromkeys(self.trouble.values())))
        return Found([runs[count] for count in sorted(runs)], facts)

    def _start(self, counts: Sequence[int], stack: ExitStack) -> dict[int, Training]:
        launched = {}
        for count in counts:
            seconds = max(PATIENCE, self.ends - time.monotonic())
            launched[count] = training = Training(self.folder, str(count), self.words[count], seconds)
            stack.callback(training.trial.close)
        found = {}
        for count, training in launched.items():
            self.progress(f"starting on {count}")
            try:
                training.begin()
                found[count] = training
            except TrialError as failure:
                self.trouble[count] = str(failure)
                training.trial.close()
        return found

    def _rounds(self, trainings: Mapping[int, Training], ends: float) -> None:
        for number in range(MOST_ROUNDS):
            if number >= FEWEST_ROUNDS and time.monotonic() > ends:
                return
            self.progress(f"round {number + 1}")
            for count in random.sample(list(trainings), len(trainings)):
                trainings[count].measure()

    def _facts(self, training: Training, run: Run) -> Facts:
        trial, hello = training.trial, training.hello
        known: dict[str, Any] = {
            "strategy": self.strategy,
            "accelerator": hello["accelerator"],
            "cores": hello["cores"],
            "threads": hello["threads"],
            "workers": hello["workers"],
            "log_every": hello["log_every"],
            "keys": self.keys,
            "times_larger": LARGER,
        }
        steps = hello["steps"]
        known["epoch"] = Epoch(steps, hello["validation"])
        alike = ALL_REDUCE in hello["waiting"]  # Each rank has the whole network, and none asks a server.
        try:
            if hello["accelerator"]:
                read = trial.ask({"steps": FEWEST_STEPS, "reads": True})[0]
                known |= {"reads": read["reads"], "read_seconds": read["read_seconds"]}
            if alike:
                summed = trial.ask({"probe": "sum"})[0]
                known |= {"link": summed["seconds"], "gradient_bytes": summed["bytes"]}
            if sample := trial.ask({"probe": "sample"}, first=True)[0]:
                known["load"] = Sample(**sample)
            saved = trial.ask({"probe": "save", "path": str(self.folder / "saved.ckpt")})[0]["seconds"]
            known["epoch"] = Epoch(steps, hello["validation"], saved * hello["saving"])
            each = max(1, hello["cores"] // run.devices)
            if not hello["accelerator"] and hello["threads"] > each:
                known["with_fewer"] = run.rate * training.times(_rate, threads=each)
            if alike:
                known["larger"] = run.slowest.compute * LARGER * training.times(_compute_of_a_sample, larger=LARGER)
            rates = [one["rate"] for one in trial.ask({"probe": "load", "seconds": LOADING_SECONDS})]
            known["loader"] = sum(rates) if all(rates) else None
        except TrialError as failure:
            # As where larger batches do not fit: what is known until then is told.
            self.progress(str(failure))
        return Facts(**known)
