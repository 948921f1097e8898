"""Load global batches so that every rank gets the whole batch: small tensors as copies, large tensors at a place."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from cnnstrategies.codec import DTYPES
from cnnstrategies.data.division import samplers_of
from cnnstrategies.data.sampling import batches_of
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.placed import Places
from cnnstrategies.placed.partial import PartialTensor, contiguous_strides
from cnnstrategies.runtime.seeds import mixed_seed, seed_all
from cnnstrategies.strategies.hybrid_pipeline.batch_form import put_together, take_apart
from cnnstrategies.strategies.hybrid_pipeline.batch_readers import BatchReaders, map_tensors
from cnnstrategies.strategies.hybrid_pipeline.joined_parts import (
    DividedRows,
    count_samples,
    first_rows,
    join_parts,
    keep_rows,
)
from cnnstrategies.strategies.hybrid_pipeline.loader_messages import START, LoaderMessage, exchange, receive, send
from cnnstrategies.strategies.hybrid_pipeline.loading_ranks import LoadingRanks
from cnnstrategies.strategies.hybrid_pipeline.random_states import changed_states, random_states, set_random_states
from cnnstrategies.strategies.hybrid_pipeline.stage_loader import StageLoader, note_indices

# Default for the largest number of bytes of a tensor of which all ranks get copies.
SMALL = 1 << 16
CPU = torch.device("cpu")
_numbers = itertools.count()  # Numbers of this process's loaders.


class LargeTensor(NamedTuple):
    """Metadata of a tensor that only the first stage has."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


# Metadata that take the place of tensors.
KINDS = (LargeTensor, DividedRows)


class NoneBatch(NamedTuple):
    """A batch that is None. The user's loader has yielded it, for example because all samples were left out."""


class PlacedLoader(StageLoader):
    """Loader that yields global batches, with the user's structure, on every rank.

    Ranks load parts of a batch as for :class:`StageLoader`. The samples of the global batch are in the order in which a
    single process would load them. All ranks have copies of small tensors and of values that are not tensors. Large
    tensors are on the ranks of the first stage, and on ranks that have read such a tensor of an earlier batch; see
    :class:`BatchReaders`. They are foreign on all other ranks. If several ranks load, each of them keeps its rows of a
    large tensor until an operation needs all rows; see :mod:`cnnstrategies.placed.partial`.

    After each batch, the random generators of all ranks have the states of those of the first loading rank. Numbers
    that the loader draws in this rank's process are therefore drawn once, as on one device.

    Attributes:
        number: Number of the loader, which is the same on all ranks.

    Args:
        loader: This rank's own loader.
        ranks: The ranks that load.
        places: The rules of this rank.
        placement: The numbering of the ranks.
        most: Function that returns the largest of the numbers that the ranks pass. All ranks must call this function.
        small: Largest number of bytes of a tensor of which all ranks get copies.
    """

    def __init__(
        self,
        loader: Any,
        ranks: LoadingRanks,
        places: Places,
        placement: Placement,
        most: Callable[[int], int],
        small: int = SMALL,
    ) -> None:
        super().__init__(loader, ranks, most)
        self.places, self.small = places, small
        self.sources = tuple(placement.ranks(0))
        # The processes may have created different numbers of loaders before.
        self.number = most(next(_numbers))

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator of the global batches. All ranks must call this, and use the iterator alike."""
        return PlacedBatches(self)

    def begin(self) -> Iterator[Any]:
        """Create the iterator of this rank's own loader, and return an iterator of this rank's parts of batches.

        A part is a result of :func:`~cnnstrategies.strategies.hybrid_pipeline.batch_form.take_apart`, or None if this
        rank does not have a part of a batch. The iterator of parts does not end.
        """
        return self.ranks.batches(self._own(iter(self.loader)) if self.loads_now else iter(()))

    @property
    def loads_now(self) -> bool:
        """Whether this rank loads, or compares its first batches with other ranks' to find out which ranks load."""
        return self.ranks.all_load is not False or self.ranks.in_first_stage

    @property
    def makes_tensors(self) -> bool:
        """Whether each batch has new tensors. If not, the user's code may use a batch's tensors elsewhere as well."""
        loader = self.loader
        if not isinstance(loader, DataLoader):
            return False
        return bool(loader.num_workers) or (loader.batch_sampler is not None and loader.collate_fn is default_collate)

    @property
    def pins(self) -> bool:
        """Whether batches are in pinned memory, as the user's loader yields them if there is a GPU."""
        return bool(getattr(self.loader, "pin_memory", False)) and torch.cuda.is_available()

    @property
    def has_own_order(self) -> bool:
        """Whether the order of the samples does not depend on the states of the global random generators."""
        samplers = [sampler for sampler in samplers_of(self.loader) if isinstance(sampler, DistributedSampler)]
        # Lightning's wrapper draws the order from the user's own sampler.
        return bool(samplers) and not any(isinstance(sampler, DistributedSamplerWrapper) for sampler in samplers)

    def note(self, index: int) -> None:
        """Take note of a batch that has been loaded.

        Args:
            index: Index of the batch in its epoch.
        """

    def _own(self, batches: Iterable[Any]) -> Iterator[Any]:
        left, sampler = self._real_samples(), batches_of(self.loader)
        for index, batch in enumerate(batches):
            if batch is None:
                yield None if self.ranks.all_load else NoneBatch()
                continue
            part = take_apart(batch, self._sendable)
            # A rank that does not have a sample in a batch repeats a sample of another rank.
            has_sample = sampler is None or sampler.counts(sampler.skip + index)[sampler.rank] > 0
            samples = count_samples(part) if has_sample else 0
            self._count = samples if left is None else min(samples, left)
            if left is None:
                yield part if has_sample else None
                continue
            if left:
                yield first_rows(part, samples, left) if samples > left else part
            left -= self._count

    def _sendable(self, tensor: Tensor, path: str) -> Tensor:
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.requires_grad or name not in DTYPES:
            kind = "tensor that requires a gradient" if tensor.requires_grad else "tensor"
            raise ConfigurationError(
                f"{path}: a {kind} of dtype {tensor.dtype}, layout {tensor.layout} and device {tensor.device} cannot "
                "be sent from the rank that loads to the other ranks: let collate_fn return dense tensors of a "
                "common dtype without a gradient, and convert them in the step"
            )
        # All replicas of the first stage join the same values, and their results need equal strides as well.
        return tensor if len(self.sources) == 1 else tensor.contiguous()


class PlacedPredictionLoader(PlacedLoader):
    """A :class:`PlacedLoader` that tells Lightning's prediction writers the indices of the predicted samples.

    Args:
        *args: Arguments of `PlacedLoader`.
        has_rows: Whether this rank gets the predictions.
        **kwargs: Arguments of `PlacedLoader`.
    """

    def __init__(self, *args: Any, has_rows: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_rows = has_rows

    def note(self, index: int) -> None:
        """Put the indices of the global batch's samples where Lightning reads them."""
        note_indices(self.loader, self.ranks, index, self._count, self.has_rows)


class PlacedBatches(Iterator[Any]):
    """The global batches of an epoch; see :class:`PlacedLoader`."""

    def __init__(self, loader: PlacedLoader) -> None:
        self._loader, self._places, self._sources = loader, loader.places, loader.sources
        self._first, self._is_first = self._sources[0], self._places.rank == self._sources[0]
        self._index = 0  # Index of the next batch.
        self._readers = BatchReaders(loader.places, loader.sources, loader.number)
        self._rows: dict[str, Tensor] = {}  # Tensors of this rank's part of a batch; see `keep_rows`.
        self._storages: set[int] = set()  # Addresses of the storages of the current batch's tensors.
        self._counts: list[int] = []  # Number of samples that each replica of the first stage has loaded.
        # A loader may draw random numbers when its iterator is created, so this must not happen later than on one
        # device, and therefore not in a generator.
        with self._places.local():
            self._parts, states = self._drawn(loader.begin)
            position = (loader.number, START)
            if self._is_first:
                send(self._places, LoaderMessage(position, [], states), without=[self._first])
            else:
                set_random_states(receive(self._places, self._first, position).states)

    def __next__(self) -> Any:
        """Return the next global batch. All ranks must call this."""
        loader = self._loader
        if loader.length is not None and self._index >= loader.length:
            raise StopIteration
        self._readers.begin_batch()
        with self._places.local():
            part, states = self._drawn(lambda: next(self._parts) if loader.loads_now else None)
            position = (loader.number, self._index)
            if self._places.rank in self._sources:
                messages = exchange(self._places, self._sources, self._message(position, part, states))
                batches, states = self._joined(messages), messages[0].states
                if self._is_first:
                    message = LoaderMessage(position, [], states)
                    send(self._places, message, self._sources, partial(self._described, batches))
            else:
                _, batches, states, _ = receive(self._places, self._first, position)
            if not self._is_first:
                set_random_states(states)
            if not batches:
                raise StopIteration
            loader.note(self._index)
            self._index += 1
            batch = put_together(map_tensors(self._placed, batches[0], KINDS), _unchanged)
            self._rows = {}
            return batch

    def _message(self, position: tuple[int, int], part: Any, states: dict[str, Any]) -> LoaderMessage:
        """Return the message with this rank's part of a batch. If there are several parts, large rows stay here."""
        if part is None or isinstance(part, NoneBatch):
            return LoaderMessage(position, [] if part is None else [part], states)
        samples = count_samples(part)
        if len(self._sources) > 1:
            part, self._rows = keep_rows(part, samples, self._loader.small, self._readers.sent_keys)
        return LoaderMessage(position, [part], states, samples)

    def _drawn(self, load: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        """Call a function that may draw random numbers.

        Returns:
            The function's result. On the first loading rank also the states of the random generators that have changed.
            On other ranks all states are as before.
        """
        if not self._loader.loads_now:
            return load(), {}
        before = random_states()
        if not self._is_first and self._loader.has_own_order:
            # Otherwise all replicas would draw the same random augmentation for the samples that they load at a time.
            seed_all(mixed_seed(int(torch.randint(2**62, ())), self._places.rank))
        with self._places.functions_of_others():
            result = load()
        if self._is_first:
            return result, changed_states(before, random_states())
        set_random_states(before)
        return result, {}

    def _joined(self, messages: Sequence[LoaderMessage]) -> list[Any]:
        """Return the whole batch as the only item of a list, from all replicas' parts; an empty list without parts."""
        self._counts = [message.samples for message in messages]
        pairs = [(part, message.samples) for message in messages for part in message.batches]
        real = [pair for pair in pairs if not isinstance(pair[0], NoneBatch)]
        if not real:
            return [None][: len(pairs)]
        # Parts without samples are left out. If no part has samples, the batch is the first part.
        real = [pair for pair in real if pair[1]] or real[:1]
        whole = join_parts([part for part, _ in real], [count for _, count in real])
        self._storages.clear()
        return [map_tensors(self._alone, whole, KINDS)]

    def _is_large(self, tensor: Tensor) -> bool:
        return tensor.nbytes > self._loader.small

    def _alone(self, tensor: Tensor | DividedRows, index: int) -> Tensor | DividedRows:
        """Return a tensor that does not share its storage, because all tensors of a storage have the same place."""
        if isinstance(tensor, DividedRows):
            self._readers.keys[index] = tensor.key
            return tensor
        is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        if not self._is_large(tensor):
            # Copies on other ranks are contiguous. Equal strides on all ranks allow the same views.
            return tensor.contiguous() if is_whole else tensor.clone(memory_format=torch.contiguous_format)
        address = tensor.untyped_storage().data_ptr()
        is_own = is_whole and self._loader.makes_tensors and address not in self._storages
        self._storages.add(address)
        tensor = tensor if is_own else tensor.clone()
        return tensor.contiguous() if self._readers.of(index) else tensor

    def _described(self, batches: list[Any], rank: int) -> list[Any]:
        """Return a batch for another rank, with metadata in place of large tensors that the rank does not read."""

        def described(tensor: Tensor | DividedRows, index: int) -> Tensor | LargeTensor | DividedRows:
            if isinstance(tensor, DividedRows) or not self._is_large(tensor) or rank in self._readers.of(index):
                return tensor
            return LargeTensor(tuple(tensor.shape), tensor.stride(), tensor.dtype)

        result: list[Any] = map_tensors(described, batches, KINDS)
        return result

    def _placed(self, tensor: Tensor | LargeTensor | DividedRows, index: int) -> Tensor:
        """Return a tensor of the batch as this rank has it.

        Args:
            tensor: The tensor, or its metadata.
            index: Position of the tensor among those of the batch.
        """
        label = self._readers.label(index)
        # The rows of divided tensors are on the ranks that load alone.
        place = self._sources if isinstance(tensor, DividedRows) else self._readers.place(index)
        if isinstance(tensor, Tensor):
            tensor = self._pinned(tensor)
            return self._places.mark(tensor, place, label) if self._is_large(tensor) else tensor
        stride = tensor.stride if isinstance(tensor, LargeTensor) else contiguous_strides(tensor.shape)
        if isinstance(tensor, LargeTensor) or self._places.rank not in self._sources:
            form = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device="meta")
            return self._places.foreign_like(form, place, label, CPU)
        if self._counts[self._sources.index(self._places.rank)]:
            rows = self._rows[tensor.key]
            rows = rows if self._loader.makes_tensors else rows.clone()
        else:
            rows = torch.empty(0, *tensor.shape[1:], dtype=tensor.dtype)
        return PartialTensor.of_rows(self._places, self._pinned(rows), self._counts, place, stride, label)

    def _pinned(self, tensor: Tensor) -> Tensor:
        """Return a tensor in pinned memory, if the user's loader yields such tensors.

        Tensors that were joined or received are not pinned, and their copies to a GPU would make this process wait.
        """
        return tensor.pin_memory() if self._loader.pins else tensor


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
