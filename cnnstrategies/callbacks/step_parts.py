"""Parts of a training step under each strategy, and measurement of the time that each part takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from cnnstrategies._torch_private import communication_seconds, measure_every_step, measure_rarely
from cnnstrategies.pipeline.timeline import Span
from cnnstrategies.recording.actions import LOADING
from cnnstrategies.recording.clock import DATA, PartClock, WaitParts
from cnnstrategies.runtime.waiting import only_starts, unwatch, watch
from cnnstrategies.strategies.protocol import StepKind, facts_of
from cnnstrategies.strategies.spatial.waits import ROWS, SHARE, SUMS, kind_of_wait

TOTAL = "step"
# Keys: suffixes of the names of the actions that Lightning reports to its profiler. Values: parts of a step. Lightning
# runs `training_step` and `backward` within `optimizer_step`; their time counts for forward and backward only.
ACTIONS = {
    LOADING: DATA,
    "batch_to_device": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
}


@dataclass(frozen=True)
class Parts:
    """Parts of a training step under one kind of strategy.

    Attributes:
        explained: Short description of each part; keys are the parts' names, in the order of the table's rows.
        actions: Names of the parts; keys are suffixes of the names of profiler actions, such as ``backward``.
        waiting: Names of the parts in which a rank waits for other ranks.
    """

    explained: Mapping[str, str]
    actions: Mapping[str, str]
    waiting: tuple[str, ...] = ("communication",)

    def of(self, action: str) -> str | None:
        """Return the part of a step that contains a profiler action, or None if no part contains the action."""
        return self.actions.get(action.rpartition(".")[2])


BEFORE = {"data": "waiting for the loader", "transfer": "copy, batch hooks"}
NETWORK = {"forward": "network, loss, metrics", "backward": "gradients"}
AFTER = {"optimizer": "clipping, update", "other": "callbacks, logging", TOTAL: "end to end"}
WHOLE_NETWORK = Parts({**BEFORE, **NETWORK, "communication": "all-reduce not hidden", **AFTER}, ACTIONS)
# A pipeline runs within `training_step` and `backward`. The pipeline itself reports the time of each task.
STAGES = Parts(
    {
        **BEFORE,
        "share": "waiting for the batch",
        "receive": "waiting for other stages",
        "forward": "the stage, loss",
        "backward": "gradients",
        "send": "waiting for sends to end",
        "reduce": "all-reduce not hidden",
        "gather": "outputs, values of other ranks",
        "metrics": "training_step, metrics",
        **AFTER,
    },
    {**ACTIONS, "share_batch": "share", "gather_outputs": "gather", "training_step": "metrics"},
    ("share", "receive", "send", "reduce", "gather"),
)
# A worker of a parameter server waits for parameters during its forward pass. The time of its pushes counts for
# backward and optimizer.
WORKER = Parts({**BEFORE, "wait": "waiting for the servers", **NETWORK, **AFTER}, ACTIONS, ("wait",))
# Devices with parts of the same images wait for each other within all parts of a step. These waits are nested parts.
IMAGE_PARTS = Parts(
    {
        **BEFORE,
        SHARE: "waiting for the batch",
        **NETWORK,
        ROWS: "waiting for rows of other devices",
        SUMS: "waiting for sums over the parts",
        "communication": "waiting for other groups, other messages",
        **AFTER,
    },
    ACTIONS,
    (SHARE, ROWS, SUMS, "communication"),
)

PARTS: Mapping[StepKind, Parts] = {
    "replica": WHOLE_NETWORK,
    "stages": STAGES,
    "worker": WORKER,
    "parts": IMAGE_PARTS,
}


class _WaitsOfImageParts(WaitParts):
    """Waits of ranks with parts of the same images."""

    @override
    def part_of(self, frame: FrameType, kind: str) -> str | None:
        return None if only_starts(frame) else kind_of_wait(frame) or "communication"


class StepMeter:
    """Meter of the time that each part of a trainer's steps takes.

    Args:
        trainer: The trainer, after the set-up of its strategy. ``clock`` replaces the trainer's profiler until
            :meth:`remove` is called.
        part_of: Function that maps the name of a profiler action to a part of the step, or to None for an action that
            belongs to no part. By default the parts of the trainer's strategy are used.
        counts_waits: Whether waits of ranks with parts of the same images become parts of a step. False if the caller
            counts waits.

    Attributes:
        parts: The parts of a step under the trainer's strategy.
        steps: Number of measured steps.
        pipeline: The strategy's pipeline; None if the strategy has no stages.
        clock: The clock that counts the time.
        all_reduces: For each all-reduce of DDP, the seconds that do not overlap with backward, and all of its seconds.
            Those of the last step are missing.
    """

    def __init__(
        self, trainer: Trainer, part_of: Callable[[str], str | None] | None = None, counts_waits: bool = True
    ) -> None:
        strategy: Any = trainer.strategy
        facts = facts_of(strategy)
        self.parts = PARTS[facts.step_kind]
        self.steps = 0
        self.pipeline = facts.pipeline
        self._ddp = strategy.model if isinstance(strategy.model, DistributedDataParallel) else None
        # Keys: kinds of tasks of the pipeline. Values: seconds that all tasks of this kind have taken so far.
        self._engine: dict[str, float] = {}
        self.all_reduces: list[tuple[float, float]] = []
        self._synchronised = 0  # Number of measured steps with an all-reduce.

        def inner() -> Mapping[str, float]:
            traffic = facts.traffic
            return self._engine if traffic is None else {"wait": traffic.seconds_waited}

        self.clock = PartClock(part_of or self.parts.of, strategy.root_device, inner)
        self.clock.install(trainer)
        self._waits = _WaitsOfImageParts(self.clock) if counts_waits and facts.step_kind == "parts" else None
        self._watches = False

    def prepare(self) -> None:
        """Make DDP measure each all-reduce from now on.

        Call this at the end of the last step before the first measured step.
        """
        if self._ddp is not None:
            measure_every_step(self._ddp)

    def run(self) -> None:
        """Start measuring. Call this when no part is open."""
        if self.pipeline is not None and self._note not in self.pipeline.watchers:
            self.pipeline.watchers.append(self._note)
        if self._waits is not None and not self._watches:
            watch(self._waits)
            self._watches = True
        self.clock.wanted = True
        self.clock.run()

    @property
    def sums_gradients(self) -> bool:
        """Whether DDP sums the gradients in the backward pass of this measured step."""
        return self.clock.running and self._ddp is not None and self._ddp.require_backward_grad_sync

    def before_backward(self) -> None:
        """Record the time of DDP's previous all-reduce. Call this after each forward pass.

        DDP makes the measured times of an all-reduce available during the next forward pass.
        """
        if self._ddp is not None and self.sums_gradients:
            if self._synchronised:
                total, hidden = communication_seconds(self._ddp)
                self.all_reduces.append((max(0.0, total - hidden), total))
            self._synchronised += 1

    def end_step(self) -> None:
        """Count a step. Call this at the end of each step."""
        if self.clock.running:
            self.clock.read()
            self.steps += 1

    def remove(self, trainer: Trainer) -> None:
        """Restore the trainer's profiler and DDP's own measurements. The measured times are kept."""
        self.clock.remove(trainer)
        if self.pipeline is not None and self._note in self.pipeline.watchers:
            self.pipeline.watchers.remove(self._note)
        if self._waits is not None:
            unwatch(self._waits)
            self._watches = False
        if self._ddp is not None:
            measure_rarely(self._ddp)

    def means(self) -> dict[str, float]:
        """Return the mean time of each part per step, in seconds. The keys are the parts' names.

        The key ``TOTAL`` has the time of the whole step. Under DDP the key ``communication_total`` has the time of the
        whole all-reduce, including the time in which the all-reduce overlaps with backward.
        """
        steps = max(1, self.steps)
        times = {part: seconds / steps for part, seconds in self.clock.seconds.items()}
        times[TOTAL] = sum(times.values())
        if self.all_reduces:
            fraction = self._synchronised / steps
            visible, total = (fraction * sum(each) / len(each) for each in zip(*self.all_reduces, strict=True))
            times |= {"communication": visible, "communication_total": total, "backward": times["backward"] - visible}
        return times

    def _note(self, span: Span) -> None:
        self._engine[span.kind] = self._engine.get(span.kind, 0.0) + span.end - span.start
