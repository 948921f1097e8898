"""Where a training step's time goes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from cnnstrategies._torch_private import communication_seconds, measure_every_step, measure_rarely
from cnnstrategies.callbacks.step_parts import TOTAL, ActionTap, PartClock, StepParts, parts_under
from cnnstrategies.errors import ConfigurationError


class StepProfile(Callback):
    """Times the parts of some training steps and prints a table when fit ends.

    For each part: the mean over the profiled steps and the ranks, the least and the greatest mean of a rank, and the
    share of the step. The means are logged as ``profile/<part>_ms`` too. A step is one batch, from the end of the
    batch before to its own end; with gradient accumulation several batches share one optimizer update. Validation,
    checkpoints and what else happens between epochs are left out.

    Under a pipeline each stage has a column, and ``profile/stage_<s>/<part>_ms`` in the log; the schedule, which runs
    within ``training_step``, is told apart into what the engine does: receive, forward, backward, send, reduce. Under
    a parameter server the wait for parameters is told from the forward in which it falls.

    Under DDP, communication is the part of the gradients' all-reduce that backward does not hide, measured by DDP
    itself under any communication hook; it contains the wait for slower ranks, so the rank with the *least*
    communication is the slowest one. How much was hidden stands below the table. DDP's broadcast of buffers, such as
    those of batch normalisation, is part of forward, and Lightning's broadcast of the signal to stop part of other.
    Under FSDP all communication is part of forward and backward. Time that ``training_step`` spends on gradients or
    updates itself counts for the parts that Lightning announces within it.

    On an accelerator the profiled steps are synchronised at each boundary, so that kernels are counted where they
    run; steps are slower for it, because the CPU no longer queues work ahead. Outside the profiled steps nothing is
    timed.

    Args:
        skip_first: Steps that are not profiled: caches, connections and workers warm up.
        steps: Steps that are profiled; all that follow when left out.

    Attributes:
        milliseconds: After fit: mean over the ranks of each part's time per step, and ``communication_total``,
            hidden or not, where it is measured. Empty when fit ended before ``skip_first``.
        stages: After fit under a pipeline: the same for each stage.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    def __init__(self, skip_first: int = 10, steps: int | None = 50) -> None:
        if skip_first < 1:
            raise ConfigurationError(f"skip_first={skip_first}: at least 1 step starts the clock; 10 is usual")
        if steps is not None and steps < 1:
            raise ConfigurationError(f"steps={steps}: profile at least 1 step; 50 is usual")
        self.skip_first = skip_first
        self.steps = steps
        self._tap: ActionTap | None = None
        self._forget()

    def _forget(self) -> None:
        """Be as before the first fit."""
        self.milliseconds: dict[str, float] = {}
        self.stages: list[Mapping[str, float]] = []
        self._seen = 0
        self._measured = 0
        self._parts = StepParts()
        self._clock: PartClock | None = None
        self._ddp: DistributedDataParallel | None = None
        self._all_reduces: list[tuple[float, float]] = []  # Seconds in the open, and in total.
        self._synchronised = 0  # Profiled steps that end with an all-reduce.
        self._opening = False  # Between the start of an epoch and its first batch.

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        self._parts = parts_under(trainer.strategy)
        self._clock = PartClock(trainer.strategy.root_device, inner=self._parts.seconds)
        inner = trainer.profiler  # type: ignore[attr-defined]  # set outside the class
        self._tap = ActionTap(inner, self._parts.actions, self._action_starts, self._action_ends)
        trainer.profiler = self._tap  # type: ignore[attr-defined]
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            self._ddp = trainer.strategy.model

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None and self._profiling():
            # Before an epoch's first batch the loader starts its workers.
            self._start()
            self._clock.begin("data")
            self._opening = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._clock is not None and self._opening:
            self._clock.end()
            self._opening = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._clock is None:
            return
        if self._clock.running:
            self._clock.read()
            self._measured += 1
        self._seen += 1
        if self._seen == self.skip_first and self._ddp is not None:
            measure_every_step(self._ddp)
        if not self._profiling():
            self._clock.stop()
            if self._seen > self.skip_first:
                self._remove_tap(trainer)
        elif not self._clock.running:
            self._start()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The clock starts again when the next training batch is asked for.
        if self._clock is not None:
            self._clock.stop()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None:
            self._clock.stop()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_tap(trainer)
        names, times = self._everyone(trainer)
        if self._measured == 0:
            if trainer.is_global_zero:
                print(f"StepProfile: fit ended after {self._seen} steps; skip_first={self.skip_first} left none")
            return
        self.milliseconds = dict(zip(names, times.mean(0).tolist(), strict=True))
        self.stages = stage_means(self._parts, names, times)
        if trainer.is_global_zero:
            title = f"Where {self._measured} training steps spent"
            Console(soft_wrap=True).print(profile_table(self._parts, names, times, title))
        figures = {f"profile/{part}_ms": value for part, value in self.milliseconds.items()}
        for stage, means in enumerate(self.stages):
            figures |= {f"profile/stage_{stage}/{part}_ms": value for part, value in means.items()}
        for logger in trainer.loggers:
            logger.log_metrics(figures, trainer.global_step)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_tap(trainer)

    def _everyone(self, trainer: Trainer) -> tuple[list[str], Tensor]:
        """The parts that were measured, and each rank's milliseconds (ranks, parts); a collective."""
        assert self._clock is not None
        steps = max(1, self._measured)
        times = {part: seconds / steps for part, seconds in self._clock.seconds.items()}
        times[TOTAL] = sum(times.values())
        times["communication"], times["communication_total"] = self._communication(steps)
        times["backward"] = times.get("backward", 0.0) - times["communication"]
        names = [*self._parts.explained, "communication_total"]
        mine = torch.tensor([1000 * times.get(name, 0.0) for name in names], device=trainer.strategy.root_device)
        gathered = trainer.strategy.all_gather(mine).reshape(-1, len(names)).cpu()
        if not self._all_reduces:
            names = [name for name in names if not name.startswith("communication")]
            gathered = gathered[:, [list(self._parts.explained).index(name) for name in names]]
        return names, gathered

    def _communication(self, steps: int) -> tuple[float, float]:
        """Seconds of all-reduce per step: in the open, and in total."""
        if not self._all_reduces:
            return 0.0, 0.0
        in_the_open, total = (sum(seconds) / len(seconds) for seconds in zip(*self._all_reduces, strict=True))
        share = self._synchronised / steps
        return share * in_the_open, share * total

    def _profiling(self) -> bool:
        return self._seen >= self.skip_first and (self.steps is None or self._seen < self.skip_first + self.steps)

    def _start(self) -> None:
        assert self._clock is not None
        self._parts.begin()
        self._clock.start()

    def _action_starts(self, part: str) -> None:
        assert self._clock is not None
        if part == "data" and self._profiling() and not self._clock.running:
            self._start()
        self._clock.begin(part)

    def _action_ends(self, part: str) -> None:
        assert self._clock is not None
        self._clock.end()
        if (
            part == "forward"
            and self._clock.running
            and self._ddp is not None
            and self._ddp.require_backward_grad_sync  # Not while gradients accumulate.
        ):
            # DDP publishes an all-reduce's times in the forward before the next one.
            if self._synchronised:
                total, hidden = communication_seconds(self._ddp)
                self._all_reduces.append((max(0.0, total - hidden), total))
            self._synchronised += 1

    def _remove_tap(self, trainer: Trainer) -> None:
        if self._tap is not None:
            trainer.profiler = self._tap.inner  # type: ignore[attr-defined]
            self._tap = None
            self._parts.end()
            if self._ddp is not None:
                measure_rarely(self._ddp)


def profile_table(parts: StepParts, names: Sequence[str], times: Tensor, title: str) -> Table:
    """A row for each part: its mean, those of the stages or else the least and greatest of a rank, and its share."""
    stages = stage_means(parts, names, times)
    columns = ["part", "ms", *([f"stage {stage}" for stage in range(len(stages))] or ["min", "max"]), "share", "what"]
    table = Table(*columns, title=title)
    for column in table.columns[1:-1]:
        column.justify = "right"
    means = dict(zip(names, times.mean(0).tolist(), strict=True))
    for index, name in enumerate(names):
        if name not in parts.explained:
            continue
        spread = [stage[name] for stage in stages] or [float(times[:, index].min()), float(times[:, index].max())]
        share = f"{means[name] / means[TOTAL]:.0%}"
        table.add_row(name, *(f"{figure:.2f}" for figure in (means[name], *spread)), share, parts.explained[name])
    if total := means.get("communication_total"):
        hidden = 1 - means["communication"] / total
        table.caption = f"All-reduce took {total:.2f} ms; backward hid {hidden:.0%} of it."
    if stages:
        waits = [sum(stage.get(name, 0.0) for name in parts.waiting) / stage[TOTAL] for stage in stages]
        each = ", ".join(f"stage {stage} {share:.0%}" for stage, share in enumerate(waits))
        table.caption = f"Waiting for other ranks: {each}. The others wait for the stage that waits least."
    return table


def stage_means(parts: StepParts, names: Sequence[str], times: Tensor) -> list[Mapping[str, float]]:
    """For each stage the mean of each part over its replicas."""
    return [dict(zip(names, times[list(ranks)].mean(0).tolist(), strict=True)) for ranks in parts.stages]
