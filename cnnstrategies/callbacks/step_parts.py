"""The parts of a training step under each strategy, and the clock that splits a step's time among them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from cnnstrategies.pipeline.engine import Pipeline

TOTAL = "step"
# The part that an action stands for which Lightning announces to the profiler, by the end of the action's name.
# The closure of `optimizer_step` contains `training_step` and `backward`; each moment counts for the innermost.
ACTIONS = {
    "train_dataloader_next": "data",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
}


@dataclass(frozen=True)
class Parts:
    """The parts of a step: what each is, in their order, by which actions they are known, and which wait for others."""

    explained: Mapping[str, str]
    actions: Mapping[str, str]
    waiting: tuple[str, ...] = ()


BEFORE = {"data": "waiting for the loader", "transfer": "copy, batch hooks"}
NETWORK = {"forward": "network, loss, metrics", "backward": "gradients"}
AFTER = {"optimizer": "clipping, update", "other": "callbacks, logging", TOTAL: "end to end"}
WHOLE_NETWORK = Parts({**BEFORE, **NETWORK, "communication": "all-reduce in the open", **AFTER}, ACTIONS)
# The whole schedule runs within `training_step`; the engine tells it apart.
STAGES = Parts(
    {
        **BEFORE,
        "share": "the batch to all ranks",
        "receive": "waiting for other stages",
        "forward": "the stage, loss",
        "backward": "gradients",
        "send": "waiting until it is sent",
        "reduce": "all-reduce in the open",
        "gather": "outputs to all ranks",
        "metrics": "training_step, metrics",
        **AFTER,
    },
    {**ACTIONS, "share_batch": "share", "gather_outputs": "gather", "training_step": "metrics"},
    ("share", "receive", "send", "reduce", "gather"),
)
# A worker waits for parameters in the middle of its forward; its pushes are part of backward and update.
WORKER = Parts({**BEFORE, "wait": "waiting for the servers", **NETWORK, **AFTER}, ACTIONS)


def parts_under(strategy: Any) -> Parts:
    """The parts of a step under a strategy that has been set up."""
    if isinstance(getattr(strategy, "pipeline", None), Pipeline):
        return STAGES
    return WORKER if hasattr(strategy, "counters") else WHOLE_NETWORK


class PartClock(Profiler):
    """The Trainer's profiler for a while: splits the time among parts that may lie within each other.

    Each moment counts once: for the innermost part that is open, or for ``other`` where none is. What ``inner`` says
    that the strategy has measured so far (seconds, by names of its own) counts for these instead of the part in which
    it passed. Lightning's actions are passed on to the user's profiler, in whose place it is. On an accelerator every
    reading waits until the device's queue is empty, so that a kernel counts for the part that launched it.

    ``wanted`` has the next batch that is loaded start it; ``open_parts`` has the innermost last.
    """

    def __init__(
        self,
        user: Profiler,
        device: torch.device,
        actions: Mapping[str, str],
        inner: Callable[[], Mapping[str, float]],
    ) -> None:
        super().__init__()
        self.user = user
        self.seconds: dict[str, float] = {}
        self.running = self.wanted = False
        self.open_parts: list[str] = []
        self._device, self._actions, self._inner = device, actions, inner
        self._mark = 0.0
        self._inner_before: Mapping[str, float] = {}

    @override
    def start(self, action_name: str) -> None:
        self.user.start(action_name)
        if (part := self._actions.get(action_name.rpartition(".")[2])) is not None:
            if part == "data" and self.wanted and not self.running:
                self.run()
            self.begin(part)

    @override
    def stop(self, action_name: str) -> None:
        if action_name.rpartition(".")[2] in self._actions:
            self.end()
        self.user.stop(action_name)

    def run(self) -> None:
        """Count from now on. Call it outside all parts."""
        self.running = True
        self.open_parts.clear()
        self._mark = self._now()
        self._inner_before = dict(self._inner())

    def pause(self) -> None:
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
