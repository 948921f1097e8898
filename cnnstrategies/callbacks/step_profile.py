"""Where a training step's time goes."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from cnnstrategies._torch_private import communication_seconds, measure_every_step
from cnnstrategies.errors import ConfigurationError

PARTS = ("data", "forward", "backward", "communication", "optimizer", "step")
EXPLAINED = {
    "data": "loader, copy to device",
    "forward": "network, loss",
    "backward": "gradients",
    "communication": "all-reduce in the open",
    "optimizer": "clipping, update",
    "step": "end to end",
}


class StepProfile(Callback):
    """Times the parts of some training steps and prints a table when fit ends.

    For each part: the mean over the profiled steps of the mean over the ranks, the least and the greatest rank's
    mean, and the share of the step. The means are logged as ``profile/<part>_ms`` too. Communication is measured
    under DDP and its variants; under other strategies it is part of backward. With gradient accumulation a step is
    one batch. On a GPU the profiled steps are synchronised at each boundary, so that kernels are counted where
    they run; they are slower for it.

    Args:
        skip_first: Steps that are not profiled: caches, connections and workers warm up.
        steps: Steps that are profiled.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    def __init__(self, skip_first: int = 10, steps: int = 50) -> None:
        if skip_first < 1:
            raise ConfigurationError(f"skip_first={skip_first}: at least 1 step starts the clock; 10 is usual")
        if steps < 1:
            raise ConfigurationError(f"steps={steps}: profile at least 1 step; 50 is usual")
        self.skip_first = skip_first
        self.steps = steps
        self.totals = dict.fromkeys(PARTS, 0.0)
        self.measured = 0
        self._seen = 0
        self._mark = 0.0
        self._began = 0.0
        self._ddp: DistributedDataParallel | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            self._ddp = trainer.strategy.model
            measure_every_step(self._ddp)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._end_of("data", trainer)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._end_of("forward", trainer)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_of("backward", trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._end_of("optimizer", trainer)
        if self._profiling():
            self.totals["step"] += self._mark - self._began
            self.measured += 1
            if self._ddp is not None:
                # The reducer publishes a step's times when the next one begins, so these are the last step's.
                total, hidden = communication_seconds(self._ddp)
                self.totals["communication"] += max(0.0, total - hidden)
        self._seen += 1
        self._mark = self._began = self._now(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Validation is not part of the next step.
        self._mark = self._began = self._now(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.measured == 0:
            return
        mine = torch.tensor([1000 * self.totals[part] / self.measured for part in PARTS])
        mine[PARTS.index("backward")] -= mine[PARTS.index("communication")]
        gathered = trainer.strategy.all_gather(mine.to(trainer.strategy.root_device)).reshape(-1, len(PARTS)).cpu()
        if not trainer.is_global_zero:
            return
        mean, least, most = gathered.mean(0).tolist(), gathered.amin(0).tolist(), gathered.amax(0).tolist()
        table = Table("part", "ms", "min", "max", "share", "what", title=f"Where {self.measured} training steps spent")
        for column in table.columns[1:5]:
            column.justify = "right"
        for index, part in enumerate(PARTS):
            if part == "communication" and self._ddp is None:
                continue
            figures = (f"{values[index]:.2f}" for values in (mean, least, most))
            table.add_row(part, *figures, f"{mean[index] / mean[-1]:.0%}", EXPLAINED[part])
        Console(soft_wrap=True).print(table)
        for logger in trainer.loggers:
            logger.log_metrics({f"profile/{part}_ms": mean[i] for i, part in enumerate(PARTS)}, trainer.global_step)

    def _profiling(self) -> bool:
        return self.skip_first <= self._seen < self.skip_first + self.steps

    def _end_of(self, part: str, trainer: Trainer) -> None:
        if self._profiling():
            now = self._now(trainer)
            self.totals[part] += now - self._mark
            self._mark = now

    def _now(self, trainer: Trainer) -> float:
        if self._profiling() and trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
