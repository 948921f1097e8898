"""The parts of a training step, and what a strategy's engine measures within them."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from cnnstrategies.paramserver.worker.connections import Counters
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.timeline import Span

TOTAL = "step"


class StepParts:
    """The parts of a step under a strategy in which each rank runs the whole network.

    Attributes:
        actions: The part that an action stands for which is announced to the Trainer's profiler, by the end of the
            action's name. The closure of ``optimizer_step`` contains ``training_step`` and ``backward``; each moment
            counts for the innermost.
        explained: What each part is, in the order of a step.
        waiting: Parts in which a rank waits for others.
        stages: The ranks of each stage; none where there are no stages.
    """

    actions: ClassVar[Mapping[str, str]] = {
        "train_dataloader_next": "data",
        "batch_to_device": "transfer",
        "training_step": "forward",
        "backward": "backward",
        "optimizer_step": "optimizer",
    }
    explained: ClassVar[Mapping[str, str]] = {
        "data": "waiting for the loader",
        "transfer": "copy, batch hooks",
        "forward": "network, loss, metrics",
        "backward": "gradients",
        "communication": "all-reduce in the open",
        "optimizer": "clipping, update",
        "other": "callbacks, logging",
        TOTAL: "end to end",
    }
    waiting: tuple[str, ...] = ()
    stages: tuple[Sequence[int], ...] = ()

    def begin(self) -> None:
        """Start to measure."""

    def end(self) -> None:
        """Measure no longer."""

    def seconds(self) -> Mapping[str, float]:
        """For each part that the engine measures itself its seconds so far."""
        return {}


class PipelineParts(StepParts):
    """The parts of a step of a pipeline, whose whole schedule runs within ``training_step``."""

    actions: ClassVar[Mapping[str, str]] = {
        **StepParts.actions,
        "share_batch": "share",
        "gather_outputs": "gather",
        "training_step": "metrics",
    }
    explained: ClassVar[Mapping[str, str]] = {
        "data": "waiting for the loader",
        "transfer": "copy, batch hooks",
        "share": "the batch to all ranks",
        "receive": "waiting for other stages",
        "forward": "the stage, loss",
        "backward": "gradients",
        "send": "waiting until it is sent",
        "reduce": "all-reduce in the open",
        "gather": "outputs to all ranks",
        "metrics": "training_step, metrics",
        "optimizer": "clipping, update",
        "other": "callbacks, logging",
        TOTAL: "end to end",
    }
    waiting = ("share", "receive", "send", "reduce", "gather")

    def __init__(self, pipeline: Pipeline) -> None:
        self._watchers = pipeline.watchers
        self._seconds: dict[str, float] = {}
        self.stages = tuple(pipeline.placement.ranks(stage) for stage in range(pipeline.placement.stages))

    def begin(self) -> None:
        """Have the engine time its tasks."""
        if self._add not in self._watchers:
            self._watchers.append(self._add)

    def end(self) -> None:
        """Have the engine time nothing for this."""
        if self._add in self._watchers:
            self._watchers.remove(self._add)

    def seconds(self) -> Mapping[str, float]:
        """Seconds of each kind of task so far."""
        return self._seconds

    def _add(self, span: Span) -> None:
        self._seconds[span.kind] = self._seconds.get(span.kind, 0.0) + span.end - span.start


class ServerParts(StepParts):
    """The parts of a step of a worker, which waits for parameters in the middle of its forward."""

    explained: ClassVar[Mapping[str, str]] = {
        "data": "waiting for the loader",
        "transfer": "copy, batch hooks",
        "wait": "waiting for the servers",
        "forward": "network, loss, metrics",
        "backward": "gradients, pushes",
        "optimizer": "clipping, update, pushes",
        "other": "callbacks, logging",
        TOTAL: "end to end",
    }

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def seconds(self) -> Mapping[str, float]:
        """Seconds that the worker has waited so far."""
        counters = self._strategy.counters
        return {"wait": counters.seconds_waited} if isinstance(counters, Counters) else {}


def parts_under(strategy: Any) -> StepParts:
    """The parts of a step under a strategy that has been set up."""
    pipeline = getattr(strategy, "pipeline", None)
    if isinstance(pipeline, Pipeline):
        return PipelineParts(pipeline)
    return ServerParts(strategy) if hasattr(strategy, "counters") else StepParts()
