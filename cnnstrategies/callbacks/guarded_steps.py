"""Checks of `Guard` for errors that all ranks make alike: in gradients, rates, statistics, loaders, resumed states."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies.callbacks.guarded_run import scheduled_rates
from cnnstrategies.data.division import shuffles, yields_each_once
from cnnstrategies.guarding.calls import FEWEST, ScheduleHistory, ScheduleState, StepCalls
from cnnstrategies.guarding.constant_batches import ConstantBatches
from cnnstrategies.guarding.findings import Finding, and_others
from cnnstrategies.guarding.losses import wrong_input
from cnnstrategies.guarding.modes import SWITCHED
from cnnstrategies.guarding.rates import RateHistory, ScheduledRate
from cnnstrategies.guarding.watch import WatchedRun
from cnnstrategies.recording.steps import StepReader

ENOUGH = 20  # Smallest number of steps in which weights with gradients must change.
STILL = 0.01  # Fraction of a weight's elements that must change.
ELEMENTS = 1 << 14  # Number of elements of a weight that are compared.
SOME = 8  # Number of weights that are compared.
RECORDED = 5  # Number of recorded steps from one check to the next.


class GuardedSteps(StepReader):
    """Checks of one rank.

    Args:
        trainer: The trainer.
        module: The module that is trained.
        run: This rank's place in the run.
        every: Number of steps from one check to the next.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, run: WatchedRun, every: int) -> None:
        self._trainer, self._module, self._is_held = trainer, module, run.holds
        sees_gradients = run.sees_gradients and run.reads_weights
        self._schedules, self._rates = ScheduleHistory(), RateHistory()
        self._scheduled: list[ScheduledRate] = []
        self._every = every
        self._statistics: dict[str, list[Tensor]] = {}  # Of batch normalisation, at the last check.
        self._weights: dict[int, Tensor] = {}  # Some of the weights at the last comparison.
        self._weights_at = -ENOUGH  # Number of steps before that comparison.
        self._had_states = [len(optimizer.state) for optimizer in trainer.optimizers]
        self._is_resumed = trainer.global_step > 0 and sees_gradients
        self._begins_anew = self._is_resumed and any(state.due > state.made == 0 for state in self._progress())
        self._calls: StepCalls | None = None
        self.constant = ConstantBatches()
        self._has_looked = False  # Whether a loss has been looked at.
        self._wrong_input: tuple[str, str] | None = None
        if sees_gradients and module.automatic_optimization:
            by_norm = trainer.gradient_clip_algorithm in (None, "norm")
            limit = trainer.gradient_clip_val if by_norm and trainer.gradient_clip_val else None
            interval = max(1, every // RECORDED)
            self._calls = StepCalls(trainer.optimizers, run.holds, interval, None if limit is None else float(limit))

    @property
    def readers(self) -> list[StepReader]:
        """Readers of the run's steps, apart from those of batches."""
        return [self, *([] if self._calls is None else [self._calls])]

    @override
    def before_backward(self, loss: Any) -> None:
        """Look at the first loss."""
        if not self._has_looked:
            self._has_looked, self._wrong_input = True, wrong_input(loss)

    @override
    def before_step(self, optimizer: Optimizer) -> None:
        """Record learning rates if a check follows the step, after which schedules may have computed other ones."""
        if self.step == 1 or self.step % self._every == 0:
            self._scheduled = scheduled_rates(self._trainer)

    def in_epoch(self, repeated: int, repeats_order: bool) -> Iterator[Finding]:
        """Yield a finding if a loader has not kept its promise in an epoch.

        Args:
            repeated: Number of batches that have come before in the epoch.
            repeats_order: Whether the epoch has begun as the epoch before.
        """
        epoch = self._trainer.current_epoch
        loader = getattr(self._trainer.train_dataloader, "loader", self._trainer.train_dataloader)
        if repeated and yields_each_once(loader):
            fault = f"has loaded {repeated} batches of epoch {epoch} again"
            cause = "a sampler or a batch sampler that repeats indices, or a data set that ignores the index"
            remedy = "look at the indices that the sampler yields"
            yield self.finding("batches", "the loader", fault, cause, remedy)
        elif repeats_order and shuffles(loader):
            fault = f"has loaded epoch {epoch} in the order of the epoch before"
            cause = "a sampler with a fixed seed, whose set_epoch is not called"
            remedy = "call the sampler's set_epoch in on_train_epoch_start"
            yield self.finding("samples", "the loader", fault, cause, remedy)

    def in_validation(self) -> Iterator[Finding]:
        """Yield a finding if the module or its batch normalisation is in training mode in a batch of a validation.

        Dropout alone may be in training mode by design, to draw several predictions.
        """
        layers = {name: part for name, part in self._module.named_modules() if isinstance(part, SWITCHED)}
        wrong = [
            name
            for name, layer in layers.items()
            if layer.training and (self._module.training or isinstance(layer, _BatchNorm))
        ]
        if wrong:
            yield self.finding(
                "modes",
                and_others(wrong),
                "is in training mode in the validation",
                "train() in a validation, or on_validation_model_eval without eval()",
                "call eval() before the validation",
                is_note=not self._module.training,
            )

    def check(self) -> Iterator[Finding]:
        """Yield the findings since the last check."""
        if self._wrong_input is not None:
            (fault, remedy), self._wrong_input = self._wrong_input, None
            yield self.finding("losses", "the loss", fault, "the network ends with it", remedy, is_note=True)
        yield from self._of_batches()
        of_steps = list(self._of_steps())
        yield from of_steps
        yield from self._of_statistics()
        if not of_steps:  # A learning rate of 0 explains weights that do not change.
            yield from self._of_weights()
        if wrong := self._schedules.wrong(list(self._progress())):
            made, due = wrong
            yield self.finding(
                "rates",
                "the learning rate's schedule",
                f"has made {made} steps, and {due} were due",
                "lr_scheduler_step does nothing" if made == 0 else "code steps the schedule, as Lightning does",
                "step it once in each step, or return it from configure_optimizers only",
                is_note=made == 0,
            )
        for rate in self._rates.wrong(self._scheduled):
            fault = f"is {rate.rate:.3g}, and its schedule says {rate.scheduled:.3g}"
            cause = "other code sets it, or the optimizer's groups were replaced"
            remedy = "let one schedule set it, and create schedules after the optimizer"
            yield self.finding("rates", f"the learning rate of {rate.group}", fault, cause, remedy)
        if self._is_resumed and self._trainer.global_step > 0:
            self._is_resumed = False
            states = [len(optimizer.state) for optimizer in self._trainer.optimizers]
            if any(now and not before for now, before in zip(states, self._had_states, strict=False)):
                yield self.finding(
                    "checkpoint",
                    "the optimizer's state",
                    "was empty when the run was resumed",
                    "the checkpoint does not contain it",
                    "resume from a checkpoint with optimizer_states",
                )
            if self._begins_anew:
                yield self.finding(
                    "checkpoint",
                    "the learning rate's schedule",
                    "has begun anew when the run was resumed",
                    "the checkpoint does not contain the schedule's state",
                    "resume from a checkpoint with lr_schedulers",
                    is_note=True,
                )

    def in_checkpoint(self, checkpoint: Mapping[str, Any], path: str) -> Iterator[Finding]:
        """Yield a finding if a checkpoint with optimizer states does not contain those of all optimizers."""
        count = len(checkpoint.get("optimizer_states", self._trainer.optimizers))
        if count < len(self._trainer.optimizers):
            yield self.finding(
                "checkpoint",
                path,
                f"has states of {count} of {len(self._trainer.optimizers)} optimizers",
                "on_save_checkpoint removes them",
                "keep them, or set save_weights_only of ModelCheckpoint",
            )

    def _of_batches(self) -> Iterator[Finding]:
        """Yield notes about batches of equal images and about equal targets. Both can be meant."""
        are_equal, targets = self.constant.take()
        remedy = "look at some samples of the data set"
        if are_equal:
            cause = "files that cannot be read, or an index that is ignored"
            yield self.finding("samples", "each batch", "has equal images only", cause, remedy, is_note=True)
        if targets:
            fault, cause = f"are equal: {targets} of {targets}", "labels that are lost or of one class"
            yield self.finding("samples", "all targets so far", fault, cause, remedy, is_note=True)

    def _of_steps(self) -> Iterator[Finding]:
        if self._calls is None:
            return
        has_kept, excess, stands = self._calls.take()
        if has_kept:
            yield self.finding(
                "calls",
                "gradients",
                "are not zero when a step begins",
                "optimizer_zero_grad does nothing, so each step repeats the steps before",
                "set gradients to zero in each step, or use trainer.accumulate_grad_batches",
            )
        if excess:
            yield self.finding(
                "calls",
                "the norm of gradients",
                f"is {excess:.1e} or more in the optimizer, and gradient_clip_val is {self._trainer.gradient_clip_val}",
                "configure_gradient_clipping does nothing, or clips too late",
                "call self.clip_gradients in configure_gradient_clipping",
            )
        if stands:
            yield self.finding(
                "rates",
                "the learning rate",
                "has been 0 since the last check",
                "the schedule has ended, or rounds to 0",
                "look at the schedule's formula and length",
            )

    def _of_statistics(self) -> Iterator[Finding]:
        """Yield a finding if running statistics do not change although their layer counts batches."""
        names: list[str] = []
        flags: list[Tensor] = []
        for name, layer in self._module.named_modules():
            if not isinstance(layer, _BatchNorm) or layer.num_batches_tracked is None:
                continue
            values = [layer.num_batches_tracked, layer.running_mean, layer.running_var]
            if not all(type(value) is Tensor and self._is_held(value) for value in values):
                continue
            before = self._statistics.get(name)
            self._statistics[name] = now = [value.detach().clone() for value in values if value is not None]
            if before is not None:
                names.append(name)
                equal = [(values == old).all() for values, old in zip(now[1:], before[1:], strict=True)]
                flags.append(torch.stack([now[0] - before[0] >= FEWEST, *equal]).all())
        are_stuck = torch.stack(flags).tolist() if flags else []  # One read from the device.
        stuck = [name for name, is_stuck in zip(names, are_stuck, strict=True) if is_stuck]
        if stuck:
            yield self.finding(
                "moves",
                and_others(stuck),
                "counts batches, but its running statistics do not change",
                "its momentum is 0, or code restores them",
                "set its momentum, for example to 0.1",
            )

    def _of_weights(self) -> Iterator[Finding]:
        """Yield a finding if weights have gradients, and hardly any of their elements has changed in many steps."""
        if self._calls is None or self._trainer.global_step - self._weights_at < ENOUGH:
            return
        groups = [group["params"] for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        held = [value for group in groups for value in group if value.grad is not None and self._is_held(value)]
        dense = [value for value in held if value.dim() > 1 and value.layout is value.grad.layout is torch.strided]
        some = dense[:: max(1, len(dense) // SOME)][:SOME]
        before, self._weights = self._weights, {id(value): _part(value).clone() for value in some}
        self._weights_at = self._trainer.global_step
        if not some or self._weights.keys() != before.keys():
            return
        changed = torch.stack([(before[id(value)] != _part(value)).double().mean() for value in some])
        pushed = torch.stack([(_part(value.grad) != 0).double().mean() for value in some])
        largest, least = torch.stack([changed.max(), pushed.min()]).tolist()  # One read from the device.
        if largest < STILL and least > 0.5:
            kinds = sorted({str(value.dtype).removeprefix("torch.") for value in some})
            yield self.finding(
                "moves",
                "weights",
                f"do not change in {1 - largest:.1%} of their elements or more, although their gradients are not zero",
                f"updates are smaller than the precision of the weights ({', '.join(kinds)}), or steps are undone",
                "keep the weights in float32, and look at the learning rate",
            )

    def _progress(self) -> Iterator[ScheduleState]:
        if not self._module.automatic_optimization:
            return
        for config in self._trainer.lr_scheduler_configs:
            made = getattr(config.scheduler, "last_epoch", None)
            if isinstance(made, int) and not config.reduce_on_plateau and config.frequency == 1:
                due = self._trainer.global_step if config.interval == "step" else self._trainer.current_epoch
                yield ScheduleState(id(config.scheduler), made, due)

    def finding(self, check: str, tensor: str, fault: str, cause: str, remedy: str, is_note: bool = False) -> Finding:
        """Return a finding of this rank after the current step."""
        rank, step = self._trainer.global_rank, self._trainer.global_step
        return Finding(check, rank, step, tensor, fault, cause, remedy, is_note)


def _part(value: Tensor) -> Tensor:
    """Return the first rows of a tensor, with about ``ELEMENTS`` elements."""
    return value.detach()[: max(1, ELEMENTS * len(value) // max(1, value.numel()))]
