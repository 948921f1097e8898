"""What a microbatch adds to the loss of the whole batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch import Batch

Loss = Callable[[Any, Any], Tensor]
# In units of the type's resolution: how far the gradients of rows may differ between two ways to sum them up.
ROUNDING = 64
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

    def begin(self, batch: Batch, microbatches: Sequence[int]) -> None:
        """Start on another batch."""
        self._batch = batch
        self._whole = None if self.weight is None else self.weight(_targets(batch.rest))

    def part(self, outputs: Any, microbatch: int) -> Tensor:
        """The microbatch's mean, times its share of the batch."""
        targets = targets_of(self._batch, microbatch)
        mean = self.loss(outputs, targets)
        if self.weight is None:
            return mean * (self._batch.split.sizes[microbatch] / self._batch.split.samples)
        share = self.weight(targets) / self._whole
        # A microbatch that counts for nothing may have no mean.
        if isinstance(share, Tensor):
            return torch.where(share > 0, mean, _nothing(outputs)) * share.to(mean.dtype)
        return mean * share if share else _nothing(outputs)


class WeighedLoss:
    """Any loss whose gradients in a microbatch are, but for a factor, those that it has in the whole batch.

    Such as a mean over samples (where the factor is the microbatch's share of them), a sum (1), one with class weights
    or ignored targets (the share of what divides it), or a sum of such of several outputs. The factor of each output
    is found in each step, by the gradients of both losses at the same outputs: those of one microbatch, in the place
    of those of all.

    Args:
        loss: The loss from outputs and a microbatch; None stands for all samples of the batch. It draws the same
            random numbers each time, and leaves no trace.
        weights: The stage's parameters, on which the loss must not depend but by the outputs.

    Attributes:
        thorough: Whether to check in each step that the factors do not depend on the outputs.
    """

    def __init__(self, loss: Callable[[Any, int | None], Tensor], weights: Sequence[nn.Parameter] = ()) -> None:
        self.loss = loss
        self.weights = weights
        self.thorough = True

    def begin(self, batch: Batch, microbatches: Sequence[int]) -> None:
        """Start on another batch."""
        self._batch = batch
        self._own = microbatches
        self._found: dict[float, dict[int, dict[int, float | None]]] = {}

    def part(self, outputs: Any, microbatch: int) -> Tensor:
        """The microbatch's loss, whose gradients are multiplied by the factors.

        Its value is not a number where it is not clear by which factor to multiply that.
        """
        try:
            return self._part(outputs, microbatch)
        except ConfigurationError:
            raise
        except Exception as error:
            self.loss(outputs, microbatch)  # It may fail with these, too, and that is to be seen then.
            reason = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:1])}"
            raise ConfigurationError(
                f"the loss fails with made-up outputs ({reason}), and not with the network's own: by them it is found "
                "out how much each microbatch counts; let it take them (as by validate_args=False in distributions), "
                "or use strategy ddp"
            ) from error

    def _part(self, outputs: Any, microbatch: int) -> Tensor:
        factors = self._factors(outputs, microbatch)
        leaves, tree = tree_flatten(outputs)
        if not any(factors.values()):
            # The loss of nothing may be a quotient of zeros.
            return _nothing([leaf for index, leaf in enumerate(leaves) if index in factors])
        scaled = [_Scaled.apply(leaf, factors[i]) if i in factors else leaf for i, leaf in enumerate(leaves)]
        loss = self.loss(tree_unflatten(scaled, tree), microbatch)
        least, most = min(factors.values()), max(factors.values())
        factor = most if most - least <= ROUNDING * torch.finfo(loss.dtype).eps * abs(most) else float("nan")
        return loss + (loss.detach() * factor - loss.detach())

    def _factors(self, outputs: Any, microbatch: int) -> dict[int, float]:
        """One for each leaf of the outputs that the loss depends on."""
        factors = self.factors_at(outputs, microbatch)
        if None in factors.values():
            # The first microbatch's outputs give this one no gradient; its own ones decide.
            factors = self._compared(*self._whole(outputs, microbatch), [microbatch])[microbatch]
        if self.thorough:
            self._check_that_outputs_do_not_matter(outputs, microbatch, factors)
        return {leaf: 1.0 if factor is None else factor for leaf, factor in factors.items()}

    def factors_at(self, outputs: Any, microbatch: int, phase: float = 0.0) -> dict[int, float | None]:
        """A microbatch's factors, found for all at once at outputs that are made of the first one's."""
        if phase not in self._found:
            self._found[phase] = self._compared(*self._whole(outputs, phase=phase), self._own)
        return self._found[phase][microbatch]

    def _check_that_outputs_do_not_matter(
        self, outputs: Any, microbatch: int, factors: Mapping[int, float | None]
    ) -> None:
        """Refuse a loss whose factors depend on the outputs; those of other microbatches are not known yet."""
        leaves = tree_leaves(outputs)
        for leaf, factor in self.factors_at(outputs, microbatch, phase=1.0).items():
            before = factors.get(leaf)
            if factor is None or before is None:
                continue
            allowed = max(SAME, ROUNDING * torch.finfo(_taken(leaves[leaf], slice(0)).dtype).eps)
            if abs(factor - before) > allowed * abs(before):
                raise ConfigurationError(
                    f"how much a microbatch counts in the loss of its batch depends on what the network returns: "
                    f"{before:.6g} for some outputs and {factor:.6g} for others, as where a loss is divided by the "
                    f"number of samples that the network is sure of. {ADVICE}"
                )

    def _whole(self, outputs: Any, microbatch: int | None = None, phase: float = 0.0) -> tuple[Any, dict[int, Tensor]]:
        """Outputs for the whole batch, and the gradients of its loss.

        They are those of a microbatch, repeated, and each number by another part smaller: a loss that compares
        samples shows it only where these differ. What may be probabilities remains within 0 and 1. The rows of a
        microbatch that is named are as they are; another phase makes the rest other ones.
        """
        first = next(leaf for leaf in tree_leaves(outputs) if _differentiable(leaf))
        rows = torch.arange(self._batch.split.samples, device=first.device) % len(first)
        own = rows[:0]
        if microbatch is not None:
            own = self._batch.split.global_rows(microbatch, device=first.device)
            rows[own] = torch.arange(len(first), device=first.device)
        everything = tree_map(
            partial(_varied, as_they_are=own, phase=phase), tree_map(partial(_taken, rows=rows), outputs)
        )
        return everything, self._gradients(everything, None)

    def _compared(
        self, everything: Any, gradients: dict[int, Tensor], microbatches: Sequence[int]
    ) -> dict[int, dict[int, float | None]]:
        """For each of some microbatches the factors; what they are made of is read from the device once for all."""
        measures, places = [], []
        device = next(leaf.device for leaf in tree_leaves(everything) if _differentiable(leaf))
        for microbatch in microbatches:
            rows = self._batch.split.global_rows(microbatch, device=device)
            own = self._gradients(tree_map(partial(_taken, rows=rows), everything), microbatch)
            for leaf in gradients.keys() | own.keys():
                some = gradients.get(leaf, own.get(leaf))
                assert some is not None
                nothing = torch.zeros((), dtype=some.dtype, device=some.device).expand(len(rows), *some.shape[1:])
                whole = gradients[leaf][rows] if leaf in gradients else nothing
                measures.append(_measures(whole, own.get(leaf, nothing)))
                places.append((microbatch, leaf, torch.finfo(some.dtype).eps))
        factors: dict[int, dict[int, float | None]] = {microbatch: {} for microbatch in microbatches}
        found = torch.stack(measures).tolist() if measures else []
        for (microbatch, leaf, resolution), numbers in zip(places, found, strict=True):
            factors[microbatch][leaf] = _factor(numbers, resolution)
        return factors

    def _gradients(self, outputs: Any, microbatch: int | None) -> dict[int, Tensor]:
        """The gradients of the loss at some outputs, of those on which it depends."""
        leaves = {index: leaf for index, leaf in enumerate(tree_leaves(outputs)) if _differentiable(leaf)}
        places = list(leaves)
        with torch.enable_grad(), torch.autocast(leaves[places[0]].device.type, enabled=False):
            for leaf in leaves.values():
                leaf.requires_grad_()
            copies = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, outputs)
            loss = self.loss(copies, microbatch)  # It may change them in place.
            if not loss.requires_grad:
                raise ConfigurationError(
                    "the loss does not depend on what the network returns: a pipeline computes its gradients from "
                    "there, so it must be computed from these outputs without detaching them"
                )
            weights = [weight for weight in self.weights if weight.requires_grad]
            every = torch.autograd.grad(loss, [*leaves.values(), *weights], allow_unused=True)
        gradients = every[: len(leaves)]
        if any(one is not None for one in every[len(leaves) :]):
            raise ConfigurationError(
                "the loss is computed from the weights themselves, not from what the network returns alone: the "
                "stages have only their own ones; use the optimizer's weight_decay, or strategy ddp"
            )
        for leaf in leaves.values():
            leaf.requires_grad_(False)
        return {place: one for place, one in zip(places, gradients, strict=True) if one is not None}


# The loss of a batch in parts, in the last stage: what a microbatch adds to it has the gradient of the batch's loss.
PartialLoss = MeanLoss | WeighedLoss


class _Scaled(torch.autograd.Function):
    """A value whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()  # It may be changed in place.

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        return grad_outputs[0] * ctx.factor, None


def targets_of(batch: Batch, microbatch: int) -> Any:
    """What a batch holds for a microbatch besides the images: one tensor, or a tuple of them."""
    return _targets(batch.rest_of(microbatch))


def _targets(rest: tuple[Tensor, ...]) -> Any:
    return rest[0] if len(rest) == 1 else rest


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _nothing(outputs: Any) -> Tensor:
    """A loss of zero, with gradients of zero."""
    return torch.stack([leaf.sum() * 0 for leaf in tree_leaves(outputs) if _differentiable(leaf)]).sum()


def _varied(leaf: Any, as_they_are: Tensor, phase: float) -> Any:
    """An output whose numbers are multiplied, each with another one between 0.5 and 1, but for some rows."""
    if not _differentiable(leaf):
        return leaf
    numbers = torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float32).reshape(leaf.shape)
    shares = (0.75 + 0.25 * torch.sin(numbers * 2.3 + phase)).to(leaf.dtype)
    shares[as_they_are] = 1.0
    return leaf * shares


def _taken(leaf: Any, rows: Tensor | slice) -> Any:
    """Some rows of an output, apart from its graph."""
    if not isinstance(leaf, Tensor):
        return leaf
    taken = leaf.detach()[rows]
    # The factors do not depend on the precision.
    lower = torch.is_autocast_enabled(leaf.device.type) and _differentiable(leaf) and leaf.dtype.itemsize < 4
    return taken.float() if lower else taken


def _measures(whole: Tensor, part: Tensor) -> Tensor:
    """What :func:`_factor` is told of two gradients (5,), on their device."""
    wide = torch.float64 if whole.device.type != "mps" else torch.float32
    one, other = whole.to(wide).flatten(), part.to(wide).flatten()
    if not one.numel():
        return one.new_zeros(5)
    squares = other @ other
    factor = torch.where(squares > 0, (one @ other) / squares, 0.0)
    is_finite = torch.isfinite(other).all().to(wide)
    return torch.stack([1 - is_finite, squares, one.abs().max(), factor, (one - factor * other).abs().max()])


def _factor(measures: Sequence[float], resolution: float) -> float | None:
    """By what to multiply one gradient to have the other; None where both are zero."""
    has_no_bounds, squares, largest, factor, rest = measures
    if has_no_bounds:
        return float(largest != 0)
    if squares == 0 and largest == 0:
        return None
    if rest > ROUNDING * resolution * largest:
        raise _compares_samples()
    return factor


def _compares_samples() -> ConfigurationError:
    return ConfigurationError(
        "the loss of a batch is not made of losses of its samples: for the same outputs its gradients for some of the "
        "samples are others when it is computed of these alone, or when the others' outputs change (as with Dice, "
        f"contrastive and other losses that compare samples, or random numbers that are drawn for the batch). {ADVICE}"
    )
