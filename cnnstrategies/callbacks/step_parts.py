"""The parts of a training step, and what a strategy's engine measures within them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

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


class PartClock:
    """Splits the time while it runs among parts that may lie within each other.

    Each moment counts once: for the innermost part that is open, or for ``rest`` where none is.

    Args:
        device: Where the work runs. On an accelerator every reading waits until its queue is empty, so that a kernel
            counts for the part that launched it.
        rest: Name for the time outside all parts.
        inner: Time that others have measured within the parts: for each of their names the seconds so far. It counts
            for that name instead of the part in which it passed.

    Attributes:
        seconds: Time of each part so far.
        running: Whether time is being counted.
        open_parts: Those that have begun and not ended, the innermost last.
    """

    def __init__(
        self, device: torch.device, rest: str = "other", inner: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        self.seconds: dict[str, float] = {}
        self.running = False
        self._device = device
        self._rest = rest
        self._inner = inner
        self._inner_before: Mapping[str, float] = {}
        self.open_parts: list[str] = []
        self._mark = 0.0

    def start(self) -> None:
        """Count from now on. Call it outside all parts."""
        self.running = True
        self.open_parts.clear()
        self._mark = self._now()
        self._inner_before = dict(self._inner())

    def stop(self) -> None:
        """Count no longer; the time since the last reading counts for no part."""
        self.running = False

    def read(self) -> None:
        """Count what has passed since the last reading."""
        if self.running:
            now = self._now()
            passed = now - self._mark
            self._mark = now
            inner = dict(self._inner())
            for name, seconds in inner.items():
                since = seconds - self._inner_before.get(name, 0.0)
                self._count(name, since)
                passed -= since
            self._inner_before = inner
            self._count(self.open_parts[-1] if self.open_parts else self._rest, passed)

    def begin(self, part: str) -> None:
        """Open a part."""
        self.read()
        self.open_parts.append(part)

    def end(self) -> None:
        """Close the part that was opened last."""
        self.read()
        if self.open_parts:
            self.open_parts.pop()

    def _count(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


class ActionTap(Profiler):
    """Passes Lightning's actions on to the user's profiler and reports some of them.

    Lightning announces what it does to ``trainer.profiler`` by names such as ``[Strategy]DDPStrategy.backward``.

    Args:
        inner: The profiler that had this place.
        parts: The part that each action stands for, by the end of its name after the last dot.
        on_start: Called with the part when one of these actions starts.
        on_stop: Called with the part when it has ended.
    """

    def __init__(
        self,
        inner: Profiler,
        parts: Mapping[str, str],
        on_start: Callable[[str], None],
        on_stop: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.inner = inner
        self._parts = parts
        self._on_start = on_start
        self._on_stop = on_stop

    @override
    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        part = self._parts.get(action_name.rpartition(".")[2])
        if part is not None:
            self._on_start(part)

    @override
    def stop(self, action_name: str) -> None:
        part = self._parts.get(action_name.rpartition(".")[2])
        if part is not None:
            self._on_stop(part)
        self.inner.stop(action_name)
