"""The global batches of one epoch, as every rank has them: small tensors as copies, large tensors at a place."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from cnnstrategies.pipeline.microbatches import CPU
from cnnstrategies.placed import Places
from cnnstrategies.placed.partial import PartialTensor, contiguous_strides
from cnnstrategies.runtime.generator_states import GeneratorStates
from cnnstrategies.runtime.seeds import mixed_seed, seed_all
from cnnstrategies.strategies.batch_form import put_together, yields_pinned
from cnnstrategies.strategies.hybrid_pipeline.loader_messages import START, LoaderMessage, exchange, receive, send
from cnnstrategies.strategies.joined_parts import DividedRows, count_samples, join_parts, keep_rows

if TYPE_CHECKING:
    from cnnstrategies.strategies.hybrid_pipeline.loading import PlacedLoader


class LargeTensor(NamedTuple):
    """Metadata of a tensor that only the first stage has."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class NoneBatch(NamedTuple):
    """A batch that is None. The user's loader has yielded it, for example because all samples were left out."""


class BatchReaders:
    """The ranks that read the large tensors of one epoch's batches. All ranks have this object, and use it alike.

    The large tensors of a loader's first batch are on the ranks of the first stage alone. A loss then brings the masks
    of a segmentation to the last stage, and so do its backward and each metric. From the next batch on, such a tensor
    is sent to these ranks once, together with the batch, and operations there find it. Tensors that no operation brings
    to other ranks, such as the images, stay where they are.

    A tensor is known by its position among the tensors of its batch. Tensors on GPUs are not sent with the batch,
    because the devices send them to each other faster than the processes.

    Args:
        places: The rules of this rank.
        sources: Ranks of the first stage.
        number: Number of the loader, which is the same on all ranks.

    Attributes:
        keys: By position, the keys of tensors whose rows stay on the ranks that have loaded them; see `DividedRows`.
    """

    def __init__(self, places: Places, sources: Sequence[int], number: int) -> None:
        self._places, self._sources, self._number = places, tuple(sources), number
        self._of_batch: dict[int, frozenset[int]] = {}
        self._labels: list[str] = []
        self.keys: dict[int, str] = {}

    def begin_batch(self) -> None:
        """Take note of the ranks to which tensors of earlier batches have been brought."""
        readers = {index: self._places.readers.get(label) for index, label in enumerate(self._labels)}
        self._of_batch = {index: frozenset(ranks) for index, ranks in readers.items() if ranks}

    def of(self, index: int) -> frozenset[int]:
        """Return the ranks to which the current batch's tensor at a position is sent, without ranks that load."""
        return self._of_batch.get(index, frozenset()).difference(self._sources)

    def place(self, index: int) -> tuple[int, ...]:
        """Return the ranks that have the current batch's tensor at a position, if the tensor is large."""
        return tuple(sorted(self.of(index).union(self._sources)))

    def label(self, index: int) -> str:
        """Return the name of the tensor at a position, and let the rules observe who reads tensors of this name."""
        while len(self._labels) <= index:
            label = f"tensor {len(self._labels)} of a batch of loader {self._number}"
            self._labels.append(label)
            if self._places.devices is None:
                self._places.readers[label] = set()
        return self._labels[index]

    @property
    def sent_keys(self) -> frozenset[str]:
        """Keys of tensors whose rows do not stay on the ranks that have loaded them, because others read them."""
        return frozenset(key for index, key in self.keys.items() if self.of(index))


class PlacedBatches(Iterator[Any]):
    """The global batches of an epoch; see :class:`~.loading.PlacedLoader`."""

    def __init__(self, loader: "PlacedLoader") -> None:
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
                continue_with(receive(self._places, self._first, position).states)

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
                continue_with(states)
            if not batches:
                raise StopIteration
            if loader.predicts:
                loader.note_indices(self._index)
            self._index += 1
            batch = put_together(_map_tensors(self._placed, batches[0]))
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
        before = GeneratorStates.current(CPU)
        if not self._is_first and self._loader.has_own_order:
            # Otherwise all replicas would draw the same random augmentation for the samples that they load at a time.
            seed_all(mixed_seed(int(torch.randint(2**62, ())), self._places.rank))
        with self._places.functions_of_others():
            result = load()
        if self._is_first:
            now = GeneratorStates.current(CPU)
            return result, {name: getattr(now, name) for name in before.changed(now)}
        before.restore(CPU)
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
        return [_map_tensors(self._alone, whole)]

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

        result: list[Any] = _map_tensors(described, batches)
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
        return tensor.pin_memory() if yields_pinned(self._loader.loader) else tensor


def continue_with(states: Mapping[str, Any]) -> None:
    """Continue with other states of some random generators, by their names in `GeneratorStates`."""
    if states:
        GeneratorStates.current(CPU)._replace(**states).restore(CPU)


def _map_tensors(function: Callable[[Any, int], Any], batch: Any) -> Any:
    """Return a batch with the results of a function of each tensor, or its metadata, and the tensor's position."""
    kinds, positions = (Tensor, LargeTensor, DividedRows), itertools.count()

    def mapped(leaf: Any) -> Any:
        return function(leaf, next(positions)) if isinstance(leaf, kinds) else leaf

    return tree_map(mapped, batch, is_leaf=lambda value: isinstance(value, kinds))
