"""What a microbatch adds to the loss of the whole batch."""

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.pipeline.probes import (
    ROUNDING,
    Gradients,
    Probes,
    Rows,
    at_rows,
    compare,
    copied,
    device_of,
    differentiable,
    joined,
    rows_of,
    strong_ones,
    varied,
    wide,
)

Loss = Callable[[Any, Any], Tensor]
NAN = float("nan")
SAME = 1e-3  # How far two factors may be apart, in parts of one.
ADVICE = "Strategy hybrid_pipeline computes the loss of each microbatch: use a loss of single samples, or strategy ddp"


class MeanLoss:
    """A mean over samples, or over what else the targets hold so much of.

    Args:
        loss: Mean loss from outputs and targets (n, ...).
        weight: How much a batch of such targets counts, such as the number of pixels that are not ignored; by default
            the number of samples.
    """

    def __init__(self, loss: Loss, weight: Callable[[Any], Any] | None = None) -> None:
        self.loss = loss
        self.weight = weight

    def begin(self, batch: Batch) -> None:
        """Start on another batch."""
        self._batch = batch
        self._whole = None if self.weight is None else self.weight(_targets(batch.rest))

    def part(self, outputs: Any, microbatch: int) -> Tensor:
        """The microbatch's mean, times its share of the batch."""
        targets = _targets(self._batch.rest_of(microbatch))
        mean = self.loss(outputs, targets)
        if self.weight is None:
            return mean * (self._batch.split.sizes[microbatch] / self._batch.split.samples)
        # If nothing in the whole batch counts, no microbatch has a gradient, as on one device.
        nothing = not isinstance(self._whole, Tensor) and not self._whole
        share = 0 if nothing else self.weight(targets) / self._whole
        # A microbatch that counts for nothing may have no mean.
        if isinstance(share, Tensor):
            share = share.nan_to_num()
            return torch.where(share > 0, mean, _nothing(outputs)) * share.to(mean.dtype)
        return mean * share if share else _nothing(outputs)


class WeighedLoss:
    """Any loss whose gradients in a microbatch are, but for a factor, those that it has in the whole batch.

    Such as a mean over samples (where the factor is the microbatch's share of them), a sum (1), one with class weights
    or ignored targets (the share of what divides it), or a sum of such of several outputs. In each step the loss of the
    whole batch is computed once, with the first microbatch's outputs and others that are made of them. Some of these
    samples, whose gradients are known by that, join each later microbatch, and so tell its factor for each output.

    Args:
        loss: The loss from outputs and the rows of the batch that they are of, on the host and on the outputs' device;
            None stands for all of them. It draws the same random numbers each time, and leaves no trace.
        weights: The stage's parameters, on which the loss must not depend but by the outputs.

    Attributes:
        thorough: Whether to check in each step that the factors do not depend on the outputs, and to tell the loss.
        at_once: Whether to wait for a device, to refuse what a later microbatch shows, too, before the step ends.
    """

    def __init__(self, loss: Callable[[Any, Rows | None], Tensor], weights: Sequence[nn.Parameter] = ()) -> None:
        self.loss = loss
        self.weights = weights
        self.thorough = self.at_once = True
        self._doubts: list[Tensor] = []

    def begin(self, batch: Batch) -> None:
        """Start on another batch."""
        self._batch = batch
        self._probes: dict[float, Probes | None] = {}

    def part(self, outputs: Any, microbatch: int) -> Tensor:
        """What has the gradients of the batch's loss at the microbatch's outputs.

        Its value is not a number where nobody asks, or where it is not clear by which factor to multiply that.
        """
        device = device_of(outputs)
        rows = {place: self._batch.split.global_rows(microbatch, device=place) for place in (CPU, device)}
        try:
            # In full precision: they are compared, and summed up over samples that are not all there.
            taken = tree_map(rows_of, outputs)
            wanted = self._wanted(taken, rows, microbatch)
            value = torch.full((), NAN, device=device)
            if self.thorough:
                value = self._value(outputs, taken, rows, wanted, self._wanted(taken, rows, microbatch, phase=1.0))
        except ConfigurationError:
            raise
        except Exception as error:
            self.loss(tree_map(copied, outputs), rows)  # It may fail with these, too, and that is to be seen then.
            reason = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:1])}"
            raise ConfigurationError(
                f"the loss fails with made-up outputs ({reason}), and not with the network's own: by them it is found "
                "out how much each microbatch counts; let it take them (as by validate_args=False in distributions), "
                "or use strategy ddp"
            ) from error
        leaves = tree_leaves(outputs)
        return with_gradients(value, list(wanted.values()), 1.0, [leaves[leaf] for leaf in wanted])

    def _wanted(self, taken: Any, rows: Rows, microbatch: int, phase: float = 0.0) -> Gradients:
        """The gradients of the batch's loss at a microbatch's outputs; the other samples' have a phase."""
        if probes := self._probes.get(phase):
            return self._by_probes(taken, rows, probes.of(microbatch))
        everything, whole = self._whole(taken, rows, phase)
        wanted = at_rows(whole, rows)
        self._doubt(compare(wanted, self._gradients(taken, rows)))
        if phase not in self._probes:
            self._probes[phase] = self._choose_probes(everything, whole)
        return wanted

    def _by_probes(self, taken: Any, rows: Rows, probes: Probes) -> Gradients:
        """The same from the microbatch alone, and samples whose gradients are known in its batch."""
        both = {place: torch.cat([own, probes.rows[place]]) for place, own in rows.items()}
        found, count = self._gradients(tree_map(joined, taken, probes.outputs), both), len(rows[CPU])
        compared = compare(probes.gradients, {leaf: one[count:] for leaf, one in found.items()})
        self._doubt(compared)
        return {leaf: one[:count] * compared[leaf][0] for leaf, one in found.items()}

    def _choose_probes(self, everything: Any, whole: Gradients) -> Probes | None:
        """Some samples of a batch; none where an output has no gradient in it: later microbatches may have one."""
        samples, parts = self._batch.split.samples, self._batch.split.microbatches
        told = self._look(*(one.abs().reshape(samples, -1).amax(1) for one in whole.values()))
        listed = [told[start : start + samples] for start in range(0, len(told), samples)]
        # By a sample whose gradient is not finite nothing is told of others'.
        known = [row for row in range(samples) if all(isfinite(of_samples[row]) for of_samples in listed)]
        if not all(any(of_samples[row] for row in known) for of_samples in listed):
            return None
        strong = strong_ones(listed, known)
        others = [known[-1 - part * len(known) // parts] for part in range(parts)]
        device = device_of(everything)
        chosen = torch.tensor([*strong, *others])
        if device.type == "cuda":
            chosen = chosen.pin_memory()  # Else the host would wait for the copy.
        rows = {CPU: chosen, device: chosen.to(device, non_blocking=True)}
        outputs = tree_map(partial(rows_of, rows=rows[device]), everything)
        return Probes(rows, outputs, at_rows(whole, rows), len(strong))

    def _value(self, outputs: Any, taken: Any, rows: Rows, wanted: Gradients, again: Gradients) -> Tensor:
        """What the microbatch adds to the batch's loss; refuse one whose factors depend on the others' outputs."""
        alone = self._gradients(taken, rows)
        now, then = compare(wanted, alone), compare(again, alone)
        several = [*now.values(), *then.values()]
        self._doubts += [numbers[1:] for numbers in several]
        told = self._look(*(numbers[:1] for numbers in several))
        factors, others = dict(zip(now, told, strict=False)), dict(zip(then, told[len(now) :], strict=True))
        for leaf in now.keys() & then.keys():
            self._check_that_outputs_do_not_matter(factors[leaf], others[leaf], tree_leaves(taken)[leaf].dtype)
        loss = self.loss(tree_map(copied, outputs), rows).detach()
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32))  # A loss scale may be beyond what it holds.
        least, most = min(factors.values()), max(factors.values())
        if not least and not most:
            return torch.zeros_like(loss)  # The loss of nothing may be a quotient of zeros.
        clear = most - least <= ROUNDING * torch.finfo(loss.dtype).eps * abs(most)
        return loss * most if clear else torch.full_like(loss, NAN)

    @staticmethod
    def _check_that_outputs_do_not_matter(factor: float, other: float, dtype: torch.dtype) -> None:
        if abs(other - factor) > max(SAME, ROUNDING * torch.finfo(dtype).eps) * abs(factor):
            raise ConfigurationError(
                f"how much a microbatch counts in the loss of its batch depends on what the network returns: "
                f"{factor:.6g} for some outputs and {other:.6g} for others, as where a loss is divided by the number "
                f"of samples that the network is sure of. {ADVICE}"
            )

    def _doubt(self, compared: Gradients) -> None:
        """Refuse a loss that compares samples.

        Where that would have the host wait for a device, it is looked at in the first microbatch of this batch or the
        next; until then what is to be refused trains nothing.
        """
        self._doubts += [numbers[1:] for numbers in compared.values()]
        if self.at_once or all(one.device == CPU for one in self._doubts):
            self._look()

    def _look(self, *others: Tensor) -> list[float]:
        """Read tensors, and the doubts, for which the host waits once."""
        doubts, self._doubts = self._doubts, []
        told: list[float] = torch.cat([*(one.to(wide(one)) for one in others), *doubts]).tolist()
        if any(excess > 0 for excess in told[len(told) - len(doubts) :]):
            raise ConfigurationError(
                "the loss of a batch is not made of losses of its samples: for the same outputs its gradients for some "
                "of the samples are others when it is computed of these alone, or when the others' outputs change (as "
                "with Dice, contrastive and other losses that compare samples, or random numbers that are drawn for "
                f"the batch). {ADVICE}"
            )
        return told[: len(told) - len(doubts)]

    def _whole(self, outputs: Any, own: Rows, phase: float) -> tuple[Any, Gradients]:
        """Outputs for the whole batch, and the gradients of its loss.

        They are those of a microbatch, repeated, and each number by another part smaller: a loss that compares
        samples shows it only where these differ. What may be probabilities remains within 0 and 1. The rows of the
        microbatch itself are as they are; another phase makes the rest other ones.
        """
        device = device_of(outputs)
        rows = torch.arange(self._batch.split.samples, device=device) % len(own[device])
        rows[own[device]] = torch.arange(len(own[device]), device=device)
        everything = tree_map(
            partial(varied, as_they_are=own[device], phase=phase), tree_map(partial(rows_of, rows=rows), outputs)
        )
        return everything, self._gradients(everything, None)

    def _gradients(self, outputs: Any, rows: Rows | None) -> Gradients:
        """The gradients of the loss at some outputs, of those on which it depends."""
        leaves = {index: leaf for index, leaf in enumerate(tree_leaves(outputs)) if differentiable(leaf)}
        with torch.enable_grad(), torch.autocast(device_of(outputs).type, enabled=False):
            for leaf in leaves.values():
                leaf.requires_grad_()
            loss = self.loss(tree_map(copied, outputs), rows)
            weights = [weight for weight in self.weights if weight.requires_grad]
            every: Sequence[Tensor | None] = [None] * len(leaves)
            if loss.requires_grad:
                every = torch.autograd.grad(loss, [*leaves.values(), *weights], allow_unused=True)
        for leaf in leaves.values():
            leaf.requires_grad_(False)
        if any(one is not None for one in every[len(leaves) :]):
            raise ConfigurationError(
                "the loss is computed from the weights themselves, not from what the network returns alone: the "
                "stages have only their own ones; use the optimizer's weight_decay, or strategy ddp"
            )
        gradients = zip(leaves, every[: len(leaves)], strict=True)
        found = {place: one for place, one in gradients if one is not None and one.numel()}
        if not found:
            raise ConfigurationError(
                "the loss does not depend on what the network returns: a pipeline computes its gradients from there, "
                "so it must be computed from these outputs without detaching them"
            )
        return found


# The loss of a batch in parts, in the last stage: what a microbatch adds to it has the gradient of the batch's loss.
PartialLoss = MeanLoss | WeighedLoss


class _WithGradients(torch.autograd.Function):
    """A value whose backward gives others gradients that are known already."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gradients: Sequence[Tensor | None], scale: float | Tensor, *others: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        ctx.scale = scale
        return value.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Any) -> Any:
        factor = grad_outputs[0] / ctx.scale  # type: ignore[attr-defined]
        gradients = ctx.gradients  # type: ignore[attr-defined]
        ctx.gradients = None  # type: ignore[attr-defined]
        return None, None, None, *(None if g is None else g.mul_(factor.to(g.dtype)) for g in gradients)


def with_gradients(
    value: Tensor, gradients: Sequence[Tensor | None], scale: float | Tensor, others: Sequence[Tensor]
) -> Tensor:
    """The value; its backward gives the others these gradients of ``scale`` times it, which are used up.

    They are multiplied by what is done to the value.
    """
    result: Tensor = _WithGradients.apply(value, gradients, scale, *others)
    return result


def _targets(rest: tuple[Tensor, ...]) -> Any:
    """What a batch holds besides the images: one tensor, or a tuple of them."""
    return rest[0] if len(rest) == 1 else rest


def _nothing(outputs: Any) -> Tensor:
    """A loss of zero, with gradients of zero."""
    return torch.stack([leaf.sum() * 0 for leaf in tree_leaves(outputs) if differentiable(leaf)]).sum()
