"""Data for a pipeline: the first stage's replicas load batches, made of what the network takes and the rest."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import DataLoader, DistributedSampler

from cnnstrategies.data.sampling import batches_of
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.samples import count_samples
from cnnstrategies.pipeline.batch import Batch, Images
from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.pipeline.probes import Rows
from cnnstrategies.strategies.hybrid_pipeline.first_samples import as_given
from cnnstrategies.strategies.hybrid_pipeline.loading_ranks import LoadingRanks
from cnnstrategies.strategies.hybrid_pipeline.placeholders import ImagesElsewhere

Kind = Literal["input", "rows", "items", "same"]


@dataclass(frozen=True)
class Form:
    """What a batch is made of; travels with it.

    Attributes:
        leaves: What each leaf is, with a number or value: the network's ``input`` of that number; ``rows``, the tensor
            of that number with a row for each sample; ``items``, a list with one for each sample; or the ``same`` for
            all samples.
    """

    tree: TreeSpec
    leaves: tuple[tuple[Kind, Any], ...]


def flatten(batch: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of a batch and how they are nested; a list without tensors, such as names of files, is one leaf."""
    return tree_flatten(batch, is_leaf=_is_list_of_items)


def take_apart(batch: Any, inputs: Sequence[int]) -> tuple[Images, tuple[Tensor, ...], Form]:
    """The images of a replica's batch, what else has a row for each sample, and the form.

    The inputs are the leaves that the network takes, in the order of its arguments.
    """
    leaves, tree = flatten(batch)
    samples = len(leaves[inputs[0]])
    rest: list[Tensor] = []
    kinds: list[tuple[Kind, Any]] = []
    for index, leaf in enumerate(leaves):
        if index in inputs:
            kinds.append(("input", inputs.index(index)))
        elif not _has_rows(leaf, samples):
            kinds.append(("same", leaf.cpu() if isinstance(leaf, Tensor) else leaf))
        elif isinstance(leaf, Tensor):
            kinds.append(("rows", len(rest)))
            rest.append(leaf)
        else:
            kinds.append(("items", leaf))
    images = tuple(leaves[index] for index in inputs)
    return as_given(images), tuple(rest), Form(tree, tuple(kinds))


def seen(batch: Batch, rows: Rows | None, device: Any, none: bool = False) -> Any:
    """A batch as the steps of any rank see it: the network's inputs by shape alone, everything else in full.

    Of some rows these alone; or no row at all.
    """
    count = 0 if none else batch.split.samples if rows is None else len(rows[CPU])
    form = form_of(batch)

    def fill(kind: Kind, value: Any) -> Any:
        if kind == "input":
            return ImagesElsewhere.like(count, batch.image_shapes[value], batch.image_dtypes[value], device, value)
        if kind == "rows":
            whole = batch.rest[value]
            return whole[:count] if rows is None else whole[rows[whole.device]]
        if kind == "items":
            items = _items(batch, form, value)
            places = range(count) if rows is None else rows[CPU].tolist()
            return type(value)(items[place] for place in places)
        return value.to(device) if isinstance(value, Tensor) else value

    return tree_unflatten([fill(kind, value) for kind, value in form.leaves], form.tree)


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


class NoBatch(tuple[Any, ...]):
    """What a rank gets that loads nothing: ``(images, targets)`` of no samples."""

    __slots__ = ()

    def __new__(cls, items: Any = ()) -> "NoBatch":
        """The same empty pair, whatever it is made from."""
        return super().__new__(cls, (torch.empty(0), torch.empty(0, dtype=torch.int64)))


class StageLoader:
    """Loader that yields the same number of batches on every rank.

    A rank outside the first stage gets an empty batch. If the user's code has divided the data among all ranks, such a
    rank loads its part all the same, and hands the batches over to the first stage.

    Samples that a sampler repeats to make the parts of an evaluation even are left out again.

    Args:
        loader: The rank's own loader.
        ranks: The ranks that load.
        most: Function that returns the largest of the numbers that the ranks pass. All ranks must call this function.
    """

    def __init__(self, loader: Any, ranks: LoadingRanks, most: Callable[[int], int]) -> None:
        self.loader = loader
        self.ranks = ranks
        self.most = most
        self._count = 0  # Number of samples of the last batch that this rank has loaded itself.
        try:
            self.length: int | None = len(loader)
        except (TypeError, NotImplementedError):
            self.length = None
        self._batch_size = most(_batch_size(loader))
        longest = most(-1 if self.length is None else self.length)
        self.length = None if self.length is None else longest
        # Lightning asks a loader that can go on in the middle of an epoch by its class or its own attributes.
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # Not there yet while an instance is unpickled.
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def loads(self) -> bool:
        """Whether this rank loads batches, as far as this is known before the first batch."""
        return bool(self.ranks.all_load) or self.ranks.in_first_stage

    @property
    def loading_processes(self) -> int:
        """Number of ranks that load batches, as far as this is known before the first batch."""
        return self.ranks.number

    @property
    def usual(self) -> int | None:
        """Number of samples of a first stage's replica in a batch that is not the last; None if it is not known."""
        return -(-self._batch_size * self.ranks.number // self.ranks.replicas) or None

    @property
    def worker_init_fn(self) -> Any:
        """The loader's own; Lightning sets it to seed the workers."""
        return self.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.loader.worker_init_fn = function

    def __len__(self) -> int:
        """Batches of every rank."""
        if self.length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, then empty ones until every rank has had its last."""
        batches = self.ranks.batches(self._own(self.loader))
        served = 0
        while self.length is None or served < self.length:
            batch = next(batches, None)
            # Without a length it is not known before which rank is the last.
            if self.length is None and not self.most(int(batch is not None)):
                return
            served += 1
            yield NoBatch() if batch is None else batch

    def _own(self, batches: Iterable[Any]) -> Iterator[Any]:
        left, sampler = self._real_samples(), batches_of(self.loader)
        for place, batch in enumerate(batches):
            if left is None:
                # One that has no sample repeats another's.
                has_some = sampler is None or sampler.counts(sampler.skip + place)[sampler.rank]
                self._count = count_samples(batch) if has_some else 0
                yield batch if has_some else None
                continue
            size = count_samples(batch)
            self._count = min(size, left)
            if left:
                yield first_rows(batch, left) if size > left else batch
            left -= self._count

    def _real_samples(self) -> int | None:
        """Samples of this shard without repeated ones, where the loader's sampler may repeat some."""
        sampler = getattr(self.loader, "sampler", None)
        if (
            not isinstance(self.loader, DataLoader)
            or self.loader.batch_size is None
            or not isinstance(sampler, DistributedSampler)
            or sampler.shuffle
        ):
            return None
        return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]


def _batch_size(loader: Any) -> int:
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else 0


class PredictionLoader(StageLoader):
    """A :class:`StageLoader` that tells Lightning's prediction writers what rows a rank has, all of them or none."""

    def __init__(self, loader: Any, ranks: LoadingRanks, most: Callable[[int], int], has_rows: bool) -> None:
        super().__init__(loader, ranks, most)
        self.has_rows = has_rows

    def __iter__(self) -> Iterator[Any]:
        """As that of other loaders."""
        for place, batch in enumerate(super().__iter__()):
            note_indices(self.loader, self.ranks, place, self._count, self.has_rows)
            yield batch


def note_indices(loader: Any, ranks: LoadingRanks, place: int, count: int, has_rows: bool) -> None:
    """Put the indices of a global batch's samples where Lightning's prediction writers read them.

    All ranks must call this for each batch.

    Args:
        loader: This rank's own loader.
        ranks: The ranks that load.
        place: Index of the batch in its epoch.
        count: Number of samples that this rank has loaded for the batch.
        has_rows: Whether this rank has the predictions of all samples. Otherwise it has none.
    """
    sampler: Any = getattr(loader, "batch_sampler", None)
    if ranks.all_load:
        seen = getattr(sampler, "seen_batch_indices", [])
        indices = ranks.indices(seen[place][:count] if place < len(seen) else [])
        # Lightning reads the list at this place on every rank, and a rank may have fewer batches than others.
        seen += [[]] * (place + 1 - len(seen))
        seen[place] = indices
    elif sampler is not None and not has_rows:
        sampler.seen_batch_indices = [[]] * (place + 1)
    elif hasattr(sampler, "seen_batch_indices"):
        indices = sampler.seen_batch_indices[place]
        sampler.seen_batch_indices[place] = _of_all_replicas(indices, getattr(sampler, "sampler", None))


def _of_all_replicas(indices: list[int], sampler: object) -> list[int]:
    """The indices of a batch of all replicas, from those of the first, which take turns."""
    if not isinstance(sampler, DistributedSampler):
        return indices
    every = [first + replica for first in indices for replica in range(sampler.num_replicas)]
    return [index for index in every if index < len(sampler.dataset)]  # type: ignore[arg-type]
