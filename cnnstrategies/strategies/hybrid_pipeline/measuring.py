"""Measurements of a run: the waits of a rank for other ranks, and whether other cuts would be faster."""

from lightning.pytorch import Callback

from cnnstrategies.pipeline.task_times import TaskTimes
from cnnstrategies.placed import Places
from cnnstrategies.strategies.gathering import GatherRows
from cnnstrategies.strategies.hybrid_pipeline.layout import ChosenLayout
from cnnstrategies.strategies.hybrid_pipeline.loader_messages import SUBJECT
from cnnstrategies.strategies.hybrid_pipeline.stage_times import StageTimes


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


def callbacks_for_cuts(times: TaskTimes, layout: ChosenLayout, gather: GatherRows) -> list[Callback]:
    """Return the callback that compares measured times of stages with the profile, if a profile has chosen the cuts.

    Args:
        times: Measures the spans of this rank's stage.
        layout: The layout of the run.
        gather: Function that returns the rows of numbers that all ranks pass. All ranks must call this function.
    """
    return [StageTimes(times, layout.recut, gather)] if layout.planned else []
