"""The parts of a training step under each strategy, and the clock that splits a step's time among them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from cnnstrategies._torch_private import communication_seconds, measure_every_step, measure_rarely
from cnnstrategies.pipeline.timeline import Span
from cnnstrategies.strategies.protocol import StepKind, facts_of

TOTAL = "step"
# Part of the step for each action that Lightning announces to the profiler, by the end of the action's name. The
# closure of `optimizer_step` contains `training_step` and `backward`: each moment counts for the innermost action.
ACTIONS = {
    "train_dataloader_next": "data",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
}


@dataclass(frozen=True)
class Parts:
    """The parts of a step under one kind of strategy.

    Attributes:
        explained: Short description of each part, in the order of the table.
        actions: Part for each of the profiler's actions, by the end of the action's name.
        waiting: Parts in which a rank waits for other ranks.
    """

    explained: Mapping[str, str]
    actions: Mapping[str, str]
    waiting: tuple[str, ...] = ("communication",)

    def of(self, action: str) -> str | None:
        """Return the part for one of the profiler's actions, or None if the action is not a part."""
        return self.actions.get(action.rpartition(".")[2])


BEFORE = {"data": "waiting for the loader", "transfer": "copy, batch hooks"}
NETWORK = {"forward": "network, loss, metrics", "backward": "gradients"}
AFTER = {"optimizer": "clipping, update", "other": "callbacks, logging", TOTAL: "end to end"}
WHOLE_NETWORK = Parts({**BEFORE, **NETWORK, "communication": "all-reduce not hidden", **AFTER}, ACTIONS)
# The whole schedule of a pipeline runs within `training_step`; the engine reports the time of its tasks.
STAGES = Parts(
    {
        **BEFORE,
        "share": "sending the batch to all ranks",
        "receive": "waiting for other stages",
        "forward": "the stage, loss",
        "backward": "gradients",
        "send": "waiting for sends to end",
        "reduce": "all-reduce not hidden",
        "gather": "sending outputs to all ranks",
        "metrics": "training_step, metrics",
        **AFTER,
    },
    {**ACTIONS, "share_batch": "share", "gather_outputs": "gather", "training_step": "metrics"},
    ("share", "receive", "send", "reduce", "gather"),
)
# A worker of a parameter server waits for parameters within its forward; its pushes are part of backward and update.
WORKER = Parts({**BEFORE, "wait": "waiting for the servers", **NETWORK, **AFTER}, ACTIONS, ("wait",))


PARTS: Mapping[StepKind, Parts] = {"replica": WHOLE_NETWORK, "stages": STAGES, "worker": WORKER}


class PartClock(Profiler):
    """A profiler that divides the time of steps among parts, which may be nested.

    The clock temporarily replaces the trainer's profiler, and passes Lightning's actions on to it. Each moment counts
    once: for the innermost open part, or for ``other`` if no part is open. Time that the strategy measures by itself
    counts for the strategy's own parts and not for the part in which it passed. On an accelerator every reading waits
    until the device's queue is empty, so that a kernel counts for the part that launched it.

    Args:
        user: The trainer's profiler.
        device: The rank's device.
        part_of: Gives the part for an action's name, or None.
        inner: Gives the seconds that the strategy has measured so far for each of its own parts.

    Attributes:
        seconds: Time of each part so far.
        running: Whether time counts at present.
        wanted: Whether the clock starts when the next batch is loaded.
        open_parts: The open parts, innermost last.
    """

    def __init__(
        self,
        user: Profiler,
        device: torch.device,
        part_of: Callable[[str], str | None],
        inner: Callable[[], Mapping[str, float]],
    ) -> None:
        super().__init__()
        self.user = user
        self.seconds: dict[str, float] = {}
        self.running = self.wanted = False
        self.open_parts: list[str] = []
        self._device, self._part_of, self._inner = device, part_of, inner
        self._mark = 0.0
        self._inner_before: Mapping[str, float] = {}

    @override
    def start(self, action_name: str) -> None:
        self.user.start(action_name)
        if (part := self._part_of(action_name)) is not None:
            if part == "data" and self.wanted and not self.running:
                self.run()
            self.begin(part)

    @override
    def stop(self, action_name: str) -> None:
        if self._part_of(action_name) is not None:
            self.end()
        self.user.stop(action_name)

    def run(self) -> None:
        """Start to count; must be called outside all parts."""
        self.running = True
        self.open_parts.clear()
        self._mark = self._now()
        self._inner_before = dict(self._inner())

    def pause(self) -> None:
        """Stop counting; the time since the last reading does not count for any part."""
        self.running = False

    def read(self) -> None:
        """Count the time that has passed since the last reading."""
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
            self._count(self.open_parts[-1] if self.open_parts else "other", passed)

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


class StepMeter:
    """Measures how a trainer's steps spend their time, under a strategy that has been set up.

    Args:
        trainer: The trainer; ``clock`` replaces its profiler until :meth:`remove`.
        part_of: Gives the part for an action's name; by default the part under the trainer's strategy.

    Attributes:
        parts: The parts of a step under the trainer's strategy.
        steps: Number of measured steps.
        pipeline: The strategy's pipeline, or None.
        clock: The clock that counts the time.
    """

    def __init__(self, trainer: Trainer, part_of: Callable[[str], str | None] | None = None) -> None:
        strategy: Any = trainer.strategy
        facts = facts_of(strategy)
        self.parts = PARTS[facts.step_kind]
        self.steps = 0
        self.pipeline = facts.pipeline
        self._ddp = strategy.model if isinstance(strategy.model, DistributedDataParallel) else None
        self._engine: dict[str, float] = {}  # seconds of each kind of the pipeline's tasks so far
        self._all_reduces: list[tuple[float, float]] = []  # seconds that backward does not hide, and seconds in total
        self._synchronised = 0  # number of measured steps that end with an all-reduce

        def inner() -> Mapping[str, float]:
            traffic = facts.traffic
            return self._engine if traffic is None else {"wait": traffic.seconds_waited}

        user = trainer.profiler  # type: ignore[attr-defined]  # set outside the class
        self.clock = PartClock(user, strategy.root_device, part_of or self.parts.of, inner)
        trainer.profiler = self.clock  # type: ignore[attr-defined]

    def prepare(self) -> None:
        """Prepare to measure one of the next steps; called at the end of a step."""
        if self._ddp is not None:
            measure_every_step(self._ddp)

    def run(self) -> None:
        """Start to measure; must be called outside all parts."""
        if self.pipeline is not None and self._note not in self.pipeline.watchers:
            self.pipeline.watchers.append(self._note)
        self.clock.wanted = True
        self.clock.run()

    def before_backward(self) -> None:
        """Note the time of DDP's last all-reduce, which DDP publishes in the forward before the next all-reduce."""
        if self.clock.running and self._ddp is not None and self._ddp.require_backward_grad_sync:
            if self._synchronised:
                total, hidden = communication_seconds(self._ddp)
                self._all_reduces.append((max(0.0, total - hidden), total))
            self._synchronised += 1

    def end_step(self) -> None:
        """Note the end of a step."""
        if self.clock.running:
            self.clock.read()
            self.steps += 1

    def remove(self, trainer: Trainer) -> None:
        """Restore the trainer; the measurements are kept."""
        if trainer.profiler is self.clock:  # type: ignore[attr-defined]
            self.clock.pause()
            self.clock.wanted = False
            trainer.profiler = self.clock.user  # type: ignore[attr-defined]
            if self.pipeline is not None and self._note in self.pipeline.watchers:
                self.pipeline.watchers.remove(self._note)
            if self._ddp is not None:
                measure_rarely(self._ddp)

    def means(self) -> dict[str, float]:
        """Return the seconds per step of each part and, as ``TOTAL``, of the whole step.

        Under DDP the result also has ``communication_total``, the time of the whole all-reduce, hidden or not.
        """
        steps = max(1, self.steps)
        times = {part: seconds / steps for part, seconds in self.clock.seconds.items()}
        times[TOTAL] = sum(times.values())
        if self._all_reduces:
            share = self._synchronised / steps
            visible, total = (share * sum(each) / len(each) for each in zip(*self._all_reduces, strict=True))
            times |= {"communication": visible, "communication_total": total, "backward": times["backward"] - visible}
        return times

    def _note(self, span: Span) -> None:
        self._engine[span.kind] = self._engine.get(span.kind, 0.0) + span.end - span.start
