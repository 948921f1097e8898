"""Batches as people write them: what the network takes, what has a row per sample, and the rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples
from cnnstrategies.pipeline.batch import Batch, Images
from cnnstrategies.strategies.hybrid_pipeline.images import ImagesElsewhere

Kind = Literal["input", "source", "rows", "items", "same"]


@dataclass(frozen=True)
class Form:
    """What a batch is made of; travels with it.

    Attributes:
        tree: How its leaves are nested.
        leaves: What each leaf is, with a number or value: the network's ``input`` of that number; a ``source`` of such
            a shape and type from which the step computes the inputs; ``rows``, the tensor of that number with a row for
            each sample; ``items``, a list with one for each sample; or the ``same`` for all samples.
    """

    tree: TreeSpec
    leaves: tuple[tuple[Kind, Any], ...]

    @property
    def computes(self) -> bool:
        """Whether the step computes what it gives the network."""
        return any(kind == "source" for kind, _ in self.leaves)

    def whole(self, fill: Callable[[Kind, Any], Any]) -> Any:
        """A batch of this form, from what stands for each leaf."""
        return tree_unflatten([fill(kind, value) for kind, value in self.leaves], self.tree)


def flatten(batch: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a batch and how they are nested; a list without tensors, such as names of files, is one leaf."""
    return tree_flatten(batch, is_leaf=_is_list_of_items)


def as_given(images: Sequence[Any]) -> Images:
    """Images as a network takes them: a tuple where it takes several."""
    given: Images = images[0] if len(images) == 1 else tuple(images)
    return given


def take_apart(batch: Any, inputs: Sequence[int], computes: bool = False) -> tuple[Images, tuple[Tensor, ...], Form]:
    """The images of a replica's batch, what else has a row for each sample, and the form.

    The inputs are the leaves that the network takes, in the order of its arguments, or from which the step computes
    what it takes.
    """
    leaves, tree = flatten(batch)
    samples = len(leaves[inputs[0]])
    rest: list[Tensor] = []
    kinds: list[tuple[Kind, Any]] = []
    for index, leaf in enumerate(leaves):
        if index in inputs:
            kinds.append(("source", (leaf.shape[1:], leaf.dtype)) if computes else ("input", inputs.index(index)))
        elif not _has_rows(leaf, samples):
            kinds.append(("same", leaf.cpu() if isinstance(leaf, Tensor) else leaf))
        elif isinstance(leaf, Tensor):
            kinds.append(("rows", len(rest)))
            rest.append(leaf)
        else:
            kinds.append(("items", leaf))
    images = tuple(leaves[index] for index in inputs)
    return as_given(images), tuple(rest), Form(tree, tuple(kinds))


def seen(batch: Batch, microbatch: int | None, device: Any, none: bool = False) -> Any:
    """A batch as the steps of any rank see it: the network's inputs by shape alone, everything else in full.

    Of a microbatch its rows alone; or no row at all.
    """
    split = batch.split
    count = 0 if none else split.samples if microbatch is None else split.sizes[microbatch]
    form = form_of(batch)

    def fill(kind: Kind, value: Any) -> Any:
        if kind == "input":
            return ImagesElsewhere.like(count, batch.image_shapes[value], batch.image_dtypes[value], device, value)
        if kind == "source":
            shape, dtype = value
            return ImagesElsewhere.like(count, shape, dtype, device, computes=True)
        if kind == "rows":
            whole = batch.rest[value]
            return whole[:count] if microbatch is None else whole[split.global_rows(microbatch, device=whole.device)]
        if kind == "items":
            items = _items(batch, form, value)
            places = range(count) if microbatch is None else split.global_rows(microbatch).tolist()
            return type(value)(items[place] for place in places)
        return value.to(device) if isinstance(value, Tensor) else value

    return form.whole(fill)


def form_of(batch: Batch) -> Form:
    """What a batch with samples is made of, the same in all replicas."""
    form: Form = next(form for form in batch.forms if form is not None)
    return form


def first_rows(batch: Any, count: int) -> Any:
    """A batch's first samples."""
    leaves, tree = flatten(batch)
    samples = count_samples(batch)
    cut = [leaf[:count] if _has_rows(leaf, samples) else leaf for leaf in leaves]
    return tree_unflatten(cut, tree)


def check_forms(batch: Batch) -> None:
    """Refuse replicas of the first stage whose batches are not alike, by a ConfigurationError."""
    found = [form for form in batch.forms if form is not None]
    kinds = {(form.tree, tuple(kind for kind, _ in form.leaves)) for form in found}
    if len(kinds) > 1:
        raise ConfigurationError(
            "the replicas of the first stage have batches that are made of different things in one step: "
            f"{' and '.join(sorted(str(tree) for tree, _ in kinds))}; give all the same"
        )


def _items(batch: Batch, form: Form, value: list[Any]) -> list[Any]:
    """The items of the global batch, in the order of one process."""
    place = next(index for index, leaf in enumerate(form.leaves) if leaf[1] is value)
    listed = [item for one in batch.forms if one is not None for item in one.leaves[place][1]]
    ordered = list(listed)
    for position, item in zip(batch.split.positions.tolist(), listed, strict=True):
        ordered[position] = item
    return ordered


def _has_rows(leaf: Any, samples: int) -> bool:
    if isinstance(leaf, Tensor):
        return bool(leaf.ndim) and len(leaf) == samples
    return isinstance(leaf, (list, tuple)) and len(leaf) == samples


def _is_list_of_items(value: Any) -> bool:
    listed = type(value) in (list, tuple) and bool(value)
    return listed and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
