"""A callback that makes all samples of a step count equally, although batches may have different sizes."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples
from cnnstrategies.shares.rebalancing import Balance
from cnnstrategies.shares.samplers import DealtBatches, dealt
from cnnstrategies.strategies.differences import has_mean_loss
from cnnstrategies.strategies.loss_comparison import KINDS, LossComparison, LossKind, compare_with_parts
from cnnstrategies.strategies.mean_terms import MeanTerm, joined, mean_terms
from cnnstrategies.strategies.protocol import facts_of

# Largest number of means in a loss that are weighted by their own divisors. Ranks always exchange this many divisors,
# because a rank may have fewer means in a step than the other ranks.
MOST_MEANS = 31


class SampleWeights(Callback):
    """Callback that weights the gradient of each batch by the number of samples in the batch.

    Without this callback all batches of a step count equally, although their sizes may differ: three ranks cannot
    divide a global batch of 64 samples into equal parts, for example. If no samples of a global batch are left for a
    rank, the rank repeats a sample of another rank, and its batch has weight 0. Logged losses do not change.

    A module's loss may be a mean with a divisor other than the number of samples, such as a sum of class weights or the
    number of valid pixels. If the module has a method ``loss_weight(targets)`` that returns this divisor, each batch is
    weighted by its divisor. Without this method, the callback finds the divisors of torch's ``cross_entropy`` and
    ``nll_loss``, of ``values[mask].mean()`` and of ``values.sum() / n`` itself; each mean in a sum of means has its own
    divisor. The loss of a global batch is then the loss that one device computes. With gradient accumulation, the
    batches of a step count as on one device: each batch has its own divisor.

    Before the first step, the loss of a batch is compared with the losses of two parts of the batch. Under a strategy
    that may divide batches unequally, a loss that is a sum over the samples counts as a sum, and a loss that is neither
    a mean nor a sum is refused unless the shares are equal.

    The callback works for batches that are divided by shares: the batches of this package's data modules, and all
    batches under ``ddp_balanced``. Divisors also count for all batches under the other data-parallel strategies of this
    package, and under ``parameter_server`` with mode ``sync``. The strategy ``hybrid_pipeline`` weights its batches
    itself.
    """

    weighs_samples = True

    def __init__(self) -> None:
        self._targets: Any = None
        self._kind: LossKind | None = None  # None before the first batch.

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._kind = None

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._kind is None:
            self._kind = _kind_of(trainer, pl_module, batch, batch_idx)
        pair = isinstance(batch, list | tuple) and len(batch) > 1
        self._targets = batch[1] if pair and has_mean_loss(pl_module) else None
        self._samples = count_samples(batch)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        sampler, weighting = dealt(trainer), facts_of(trainer.strategy).gradient_weighting
        if weighting == "by_sample":
            return
        batch = trainer.fit_loop.batch_idx
        factor: float | Tensor = 1.0
        if sampler is not None:
            factor = sampler.weight(batch, trainer.num_training_batches, weighting)
            if self._kind == "sum":
                # The weights of the ranks add up to the whole sum, and not to a mean.
                counts = sampler.counts(batch)
                factor = factor * sum(counts) / counts[sampler.rank] if counts[sampler.rank] else 0.0
        if self._kind == "terms" or (self._kind == "sum" and sampler is None):
            factor = factor * self._weigh_means(trainer, pl_module, loss, sampler)
        if isinstance(factor, Tensor) or factor != 1:
            # A hook scales the gradient, and the loss itself stays unchanged: in manual optimization the loss is the
            # user's own tensor, and backward may need its value.
            loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    def _weigh_means(
        self, trainer: Trainer, module: LightningModule, loss: Tensor, sampler: DealtBatches | None
    ) -> float | Tensor:
        """Weight the means in a loss by their divisors. Return a factor for the gradient of the whole loss.

        All ranks must call this.

        Args:
            trainer: The trainer.
            module: The module.
            loss: The loss of this rank's batch.
            sampler: The sampler that divides the batches among the ranks; None if all ranks' batches count equally, or
                by their numbers of samples.
        """
        facts = facts_of(trainer.strategy)
        samples = float(self._samples if facts.gradient_weighting == "by_rank" else 1)
        if sampler is not None:
            samples = float(sampler.counts(trainer.fit_loop.batch_idx)[sampler.rank])
        targets, self._targets = self._targets, None
        terms: list[MeanTerm] = [] if targets is not None else mean_terms(loss)
        if targets is not None:
            numbers = joined([module.loss_weight(targets)], loss)  # type: ignore[operator]
        else:
            numbers = joined([term.divisor for term in terms], loss)
        if len(numbers) > MOST_MEANS:
            terms, numbers = [], numbers[:0]
        # A loss that divides by a number of boxes, for example, divides by 1 if there are none.
        least = getattr(module, "least_loss_weight", 0)
        row = numbers.new_zeros(1 + MOST_MEANS)
        if samples:
            row[0] = samples
            row[1 : 1 + len(numbers)] = numbers
        total = row.clone()  # The sum overwrites its argument.
        if facts.connects_hosts or facts.ranks_per_batch > 1:
            total = trainer.strategy.reduce(total, reduce_op="sum")
        else:
            dist.all_reduce(total)  # Lightning's `reduce` would also wait at a barrier.
        if self._kind == "sum":
            return total[0] / row[0]  # A batch is weighted by its fraction of the samples, which is undone.
        # A batch is weighted by its fraction of the samples. Each mean needs its own fraction instead. If there is no
        # valid target on any rank, the gradient of the mean is zero, whatever its factor is.
        if samples and least:
            row[1:], total[1:] = row[1:].clamp(min=least), total[1:].clamp(min=least)
        factors = torch.nan_to_num((row / total)[1:] / (row / total)[0])
        for term, factor in zip(terms, factors, strict=False):
            term.scale(factor)
        return factors[0].to(loss.dtype) if targets is not None else 1.0


def weigh_samples(trainer: Trainer) -> None:
    """Add the callback :class:`SampleWeights` to a trainer that will train, unless the trainer has this callback."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.state.fn == TrainerFn.FITTING and not any(isinstance(entry, SampleWeights) for entry in callbacks):
        callbacks.append(SampleWeights())


def _kind_of(trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> LossKind:
    """Return how the gradients of the ranks' losses are weighted: "mean", "terms" or "sum". All ranks must call this.

    Raises:
        ConfigurationError: The ranks have unequal shares, but the loss is neither a mean nor a sum over the samples.
    """
    strategy: Any = trainer.strategy
    facts = facts_of(strategy)
    weighted = dealt(trainer) is not None or facts is strategy  # A strategy of this package describes itself.
    local = facts.server_options is not None and facts.server_options.mode == "local"
    if trainer.world_size == 1 or facts.shards_parameters or not weighted:
        return "mean"
    if local or not facts.steps_in_lockstep or facts.gradient_weighting == "by_sample":
        return "mean"
    if (divisor := getattr(module, "loss_divisor", "unknown")) != "unknown":
        return "terms" if divisor == "own" else "mean"
    if has_mean_loss(module):
        owner = next(kind for kind in type(module).__mro__ if "loss_weight" in vars(kind))
        # The losses of this package's own modules are means over samples, so their divisors need not be exchanged.
        return "mean" if owner.__module__.startswith("cnnstrategies.") else "terms"
    if module.automatic_optimization:
        comparison = compare_with_parts(module, batch, batch_idx)
    else:
        comparison = LossComparison("unknown", "the module uses manual optimization")
    if comparison.terms > MOST_MEANS:
        comparison = LossComparison("unknown", f"it contains {comparison.terms} means, more than {MOST_MEANS}")
    # A worker that joins a run later does not vote, because the other workers have voted before.
    kind = comparison.kind if facts.joined_late else _vote(trainer, comparison.kind)
    if facts.divides_by_shares and dealt(trainer) is not None:
        _check_shares(trainer, module, kind, comparison.reason)
    if kind == "unknown":
        return "terms" if module.automatic_optimization else "mean"
    return "mean" if kind == "neither" else kind


def _vote(trainer: Trainer, kind: LossKind) -> LossKind:
    """Return the kind of loss on which all ranks agree, "neither" if they differ. All ranks must call this."""
    votes = torch.zeros(len(KINDS), device=trainer.strategy.root_device)
    votes[KINDS.index(kind)] = 1
    total = trainer.strategy.reduce(votes, reduce_op="sum").tolist()
    kinds = {name for name, number in zip(KINDS, total, strict=True) if number and name != "unknown"}
    # A rank whose loss has no means with divisors of their own, for example because its batch has no valid target,
    # votes for a mean.
    if kinds == {"mean", "terms"}:
        return "terms"
    return kinds.pop() if len(kinds) == 1 else "neither" if kinds else "unknown"


def _check_shares(trainer: Trainer, module: LightningModule, kind: LossKind, reason: str) -> None:
    """Check whether batches may be divided unequally among the ranks.

    Raises:
        ConfigurationError: The ranks have unequal shares, but the loss is neither a mean nor a sum over the samples.
    """
    name = f"the loss of {type(module).__name__}.training_step"
    if kind == "sum":
        rank_zero_info(f"{name} is a sum over the samples of a batch, and counts as a sum over the global batch")
    if kind == "unknown" and reason:
        rank_zero_warn(
            f"{name} is taken for a mean over samples, because a batch could not be compared with its parts: {reason}; "
            "if this is wrong, set shares: equal, or define loss(outputs, targets) and loss_weight(targets)"
        )
    if kind != "neither":
        return
    shares = facts_of(trainer.strategy).batch_shares
    why = f"{name} is neither a mean nor a sum over the samples of a batch"
    if shares is not None and len(set(shares.shares)) > 1:
        raise ConfigurationError(
            f"{why}, so unequal shares ({', '.join(f'{share:g}' for share in shares.shares)}) would change what is "
            "trained: set shares: equal"
        )
    balances = [callback for callback in trainer.callbacks if isinstance(callback, Balance)]  # type: ignore[attr-defined]
    for balance in balances:
        balance.stay()
        rank_zero_info(f"Shares stay equal: {why}")
