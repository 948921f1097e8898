"""Measure how long the stages of a pipeline take and wait, and warn if other cuts would be faster."""

from collections.abc import Sequence
from math import inf
from statistics import mean
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from cnnstrategies.models.samples import count_samples
from cnnstrategies.pipeline.task_times import TaskTimes
from cnnstrategies.pipeline.timetable import KINDS
from cnnstrategies.placed import Places
from cnnstrategies.runtime.groups import GatherRows
from cnnstrategies.runtime.stopwatch import Stopwatch
from cnnstrategies.strategies.hybrid_pipeline.layout import Recutter
from cnnstrategies.strategies.hybrid_pipeline.loader_messages import SUBJECT

WARM_UP = 4  # Number of batches that are not measured, because caches and connections are new.
BATCHES = 20  # Number of the last batch that is measured.


class StageTimes(Callback):
    """Callback that measures batches 5 to 20 of a training on each rank. Then the ranks exchange the times once.

    Args:
        pipeline: The pipeline whose tasks are measured.
        recut: On rank 0, the function that searches for better cuts.
        gather: Function that returns the numbers of all ranks.
    """

    def __init__(self, pipeline: TaskTimes, recut: Recutter | None, gather: GatherRows) -> None:
        self._pipeline = pipeline
        self._recut = recut
        self._gather = gather
        self._clocks = {kind: Stopwatch(pipeline.device) for kind in (*KINDS, "loss")}
        self._batches = 0
        # Keys are numbers of samples of a batch. Values have a list for each batch of this size, with the mean time of
        # each kind of span; 0 if there was no span of the kind.
        self._times: dict[int, list[list[float]]] = {}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if WARM_UP < self._batches <= BATCHES:
            times = [clock.take_mean() for clock in self._clocks.values()]
            self._times.setdefault(count_samples(batch), []).append(times)
        if self._batches == WARM_UP:
            for kind, clock in self._clocks.items():
                self._pipeline.clocks.setdefault(kind, []).append(clock)
        if self._batches == BATCHES:
            for kind, clock in self._clocks.items():
                self._pipeline.clocks[kind].remove(clock)
            self._tell(type(trainer.strategy))

    def _tell(self, strategy: type[Any]) -> None:
        # The last batch of an epoch may be smaller.
        samples = max(self._times, key=lambda size: len(self._times[size]))
        kinds = zip(*self._times[samples], strict=True)
        rows = self._gather([_usual([time for time in of_kind if time]) for of_kind in kinds])
        recut, placement = self._recut, self._pipeline.placement
        if recut is None or not all(forward and backward for forward, backward, _ in rows):
            return
        stages = [[rows[rank] for rank in placement.ranks(stage)] for stage in range(placement.stages)]
        took = [mean(forward + backward for forward, backward, _ in ranks) for ranks in stages]
        loss = mean(of_rank for *_, of_rank in stages[-1])
        better = recut(samples, took, loss)
        if better is not None:
            took[-1] += loss
            # A class path is accepted even if the configuration names the strategy by its registered name.
            module = "" if strategy.__module__.startswith("cnnstrategies.") else f"{strategy.__module__}."
            line = {"class_path": module + strategy.__qualname__, "init_args": {"cuts": better.cuts}}
            rank_zero_warn(
                f"in batches {WARM_UP + 1} to {BATCHES} the stages took {_milliseconds(took)} ms for a microbatch, "
                f"planned were {_milliseconds(better.planned)} ms; with other cuts a step shall be {better.gain:.0%} "
                "quicker:\n"
                f"  trainer.strategy: {yaml.safe_dump(line, default_flow_style=True, width=inf).strip()}"
            )


def _usual(times: Sequence[float]) -> float:
    """Return the first quartile of times, because other work on the machine can only make times longer."""
    return sorted(times)[len(times) // 4] if times else 0.0


def _milliseconds(times: Sequence[float]) -> str:
    return " and ".join(f"{1e3 * time:.1f}" for time in times)


def measure_waits(places: Places, times: TaskTimes) -> None:
    """Report this rank's waits for messages of other ranks as spans.

    The kind of a wait for a batch is ``share``. The kind of all other waits is ``gather``.

    Args:
        places: The rules of this rank.
        times: Measures the spans of this rank's stage.
    """

    def note_wait(subject: str, start: float, end: float) -> None:
        times.note_wait("share" if subject == SUBJECT else "gather", start, end)

    places.messages.note_wait = note_wait
