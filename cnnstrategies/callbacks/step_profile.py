"""Callback that measures the parts of training steps, and prints their times in a table."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from typing_extensions import override

from cnnstrategies.callbacks.step_parts import TOTAL, StepMeter
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.protocol import facts_of


class StepProfile(Callback):
    """Callback that measures the time of each part of some training steps and prints a table at the end of fit.

    For each part the table has the mean time over the profiled steps and all ranks, the means of the fastest and of the
    slowest rank in this part, and the fraction of the step. The means are also logged as ``profile/<part>_ms``. A step
    processes one batch and lasts from the end of the previous batch to the end of this batch. With gradient
    accumulation several steps precede each optimizer update. Validation, checkpoints and other work between epochs do
    not count.

    Under a pipeline the table has a column for each stage, and ``profile/stage_<s>/<part>_ms`` is logged for stage
    ``<s>``. The pipeline runs within ``training_step`` and ``backward``, so their time is divided among the pipeline's
    tasks: ``receive``, ``forward``, ``backward``, ``send`` and ``reduce``. Under a parameter server the
    worker waits for parameters during the forward pass. This wait is a separate part of the step and does not count as
    ``forward``.

    Under ``spatial`` the waits for other ranks are parts of their own: ``share`` for the batch, ``rows``, ``sums`` over
    the parts, and ``communication`` for messages of other groups and all other messages. The parts ``data``,
    ``forward``, ``backward`` and ``other`` do not include them.

    Under DDP, ``communication`` is the time of the gradients' all-reduce that does not overlap with the backward pass.
    DDP measures this time, also with a communication hook. The time includes the wait for slower ranks, so the rank
    with the *least* communication is the slowest rank. The line below the table gives the fraction of the all-reduce
    that overlaps with the backward pass. DDP's broadcast of buffers, such as those of batch normalisation, counts as
    ``forward``. Lightning's broadcast of the stop signal counts as ``other``. Under FSDP all communication counts as
    ``forward`` or ``backward``. If ``training_step`` itself runs the backward or the optimizer's update, that time
    counts as ``forward``, unless Lightning reports it to the profiler as backward or as an optimizer step.

    On an accelerator the device is synchronised between the parts of the profiled steps, so that the time of a kernel
    counts for the part that launched the kernel. Profiled steps are therefore slower than other steps, in which the CPU
    queues kernels ahead. Steps that are not profiled are not slowed down.

    Args:
        skip_first: Number of steps before the first profiled step. In these steps caches are filled, and connections
            and loader processes are started.
        steps: Number of profiled steps. By default all steps after the first ``skip_first`` steps are profiled.

    Attributes:
        milliseconds: Result of fit: mean time of each part per step over all ranks; keys are the parts' names. The key
            ``communication_total`` has the time of the whole all-reduce under DDP. The mapping is empty if no step was
            profiled.
        stages: Result of fit under a pipeline: for each stage a mapping like ``milliseconds``, with means over the
            ranks of the stage.

    Raises:
        ConfigurationError: A number is out of range.
    """

    def __init__(self, skip_first: int = 10, steps: int | None = 50) -> None:
        if skip_first < 1:
            raise ConfigurationError(
                f"skip_first={skip_first}: the measurement starts after a skipped step; use at least 1, for example 10"
            )
        if steps is not None and steps < 1:
            raise ConfigurationError(f"steps={steps}: profile at least 1 step, for example 50")
        self.skip_first = skip_first
        self.steps = steps
        self._meter: StepMeter | None = None
        self._reset()

    def _reset(self) -> None:
        """Discard the results of an earlier fit."""
        self.milliseconds: dict[str, float] = {}
        self.stages: list[Mapping[str, float]] = []
        self._seen = 0
        self._opening = False  # Whether an epoch has started, and its first batch has not been loaded yet.

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset()
        self._meter = StepMeter(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None and self._profiling():
            # The loader starts its worker processes before an epoch's first batch. Their start counts for the part
            # `data`, so the measurement begins here.
            self._meter.run()
            self._meter.clock.begin("data")
            self._opening = True

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._meter is not None and self._opening:
            self._meter.clock.end()
            self._opening = False

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._meter is not None:
            self._meter.before_backward()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is None:
            return
        self._meter.end_step()
        self._seen += 1
        if self._seen == self.skip_first:
            self._meter.prepare()
        if not self._profiling():
            self._meter.clock.pause()
            if self._seen > self.skip_first:
                self._meter.remove(trainer)
        elif not self._meter.clock.running:
            self._meter.run()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None:
            self._meter.clock.pause()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is not None:
            self._meter.clock.pause()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter is None:
            return
        self._meter.remove(trainer)
        names, times = self._gather_times(trainer, self._meter)
        if self._meter.steps == 0:
            if trainer.is_global_zero:
                print(
                    f"StepProfile: fit ended after {self._seen} steps, and skip_first={self.skip_first} left no step "
                    "to profile; use a smaller skip_first"
                )
            return
        self.milliseconds = dict(zip(names, times.mean(0).tolist(), strict=True))
        pipeline = self._meter.pipeline
        ranks = (
            [] if pipeline is None else [pipeline.placement.ranks(stage) for stage in range(pipeline.placement.stages)]
        )
        self.stages = [dict(zip(names, times[list(members)].mean(0).tolist(), strict=True)) for members in ranks]
        if trainer.is_global_zero:
            Console(soft_wrap=True).print(self._table(self._meter, names, times))
        figures = {f"profile/{part}_ms": value for part, value in self.milliseconds.items()}
        for stage, means in enumerate(self.stages):
            figures |= {f"profile/stage_{stage}/{part}_ms": value for part, value in means.items()}
        for logger in trainer.loggers:
            logger.log_metrics(figures, trainer.global_step)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._meter is not None:
            self._meter.remove(trainer)

    def _profiling(self) -> bool:
        return self._seen >= self.skip_first and (self.steps is None or self._seen < self.skip_first + self.steps)

    def _gather_times(self, trainer: Trainer, meter: StepMeter) -> tuple[list[str], Tensor]:
        """Return the names of the measured parts, and their times on each rank. All ranks must call this.

        Returns:
            Names of the parts, and milliseconds per step (ranks, parts).
        """
        times = meter.means()
        names = [name for name in meter.parts.explained if name in times or name != "communication"]
        names += [name for name in ("communication_total",) if name in times]
        mine = torch.tensor([1000 * times.get(name, 0.0) for name in names], device=trainer.strategy.root_device)
        return names, facts_of(trainer.strategy).gather_from_ranks(mine).cpu()

    def _table(self, meter: StepMeter, names: Sequence[str], times: Tensor) -> Table:
        """Return the table to print, with a row for each part.

        Columns: the part's name; the mean over the ranks; the mean of each stage under a pipeline, otherwise the
        smallest and the largest mean of a rank; the fraction of the step; and a description.
        """
        stages, means, explained = self.stages, self.milliseconds, meter.parts.explained
        spreads = [f"stage {stage}" for stage in range(len(stages))] or ["min", "max"]
        title = f"Time of {meter.steps} training steps by part"
        table = Table("part", "ms", *spreads, "share", "what", title=title)
        for column in table.columns[1:-1]:
            column.justify = "right"
        for index, name in enumerate(names):
            if name in explained:
                least, most = float(times[:, index].min()), float(times[:, index].max())
                spread = [stage[name] for stage in stages] or [least, most]
                share = f"{means[name] / means[TOTAL]:.0%}"
                table.add_row(name, *(f"{figure:.2f}" for figure in (means[name], *spread)), share, explained[name])
        if total := means.get("communication_total"):
            hidden = 1 - means["communication"] / total
            table.caption = f"All-reduce took {total:.2f} ms; {hidden:.0%} of it overlapped with backward."
        if stages:
            waits = [sum(stage.get(name, 0.0) for name in meter.parts.waiting) / stage[TOTAL] for stage in stages]
            each = ", ".join(f"stage {stage} {share:.0%}" for stage, share in enumerate(waits))
            table.caption = f"Waiting for other ranks: {each}. The stage that waits least is the slowest."
        return table
