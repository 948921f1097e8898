"""Load batches on one rank of each group, and hand out the rows of images."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from lightning.fabric.utilities.seed import pl_worker_init_function

from cnnstrategies.data.division import StreamComparison, describe_batch, divided_among, has_map
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.placed.runner import CPU
from cnnstrategies.runtime.generator_states import GeneratorStates
from cnnstrategies.runtime.groups import gather_rows, gather_tensors
from cnnstrategies.strategies.batch_form import yields_pinned
from cnnstrategies.strategies.spatial.checks import refuse_divided_data
from cnnstrategies.strategies.spatial.groups import ImageGroups
from cnnstrategies.strategies.spatial.parted_batches import PartedBatch, join_batch, part_batch

START = -1  # Index in the position of a message about a new iterator. Messages about batches have the batch's index.
FIRST = 16  # Largest number of batches that are compared before the first step.


class BatchMessage(NamedTuple):
    """Message of the rank that loads to the other ranks of its group.

    Attributes:
        position: Number of the loader, and index of the batch or `START`.
        batch: The batch without its divided tensors; None at the end of the batches, and for a new iterator.
        states: States of the random generators that the loader has changed.
    """

    position: tuple[int, int]
    batch: PartedBatch | None
    states: dict[str, Any]


class GroupLoader:
    """Loader that yields a group's batches on each rank of the group, with this rank's rows of divided tensors.

    The first rank of the group loads the batches. After each batch, the random generators of all ranks of the group
    have the states of the first rank's. Numbers that the loader draws are therefore drawn once, as on one device. Other
    attributes of a loader are those of the rank's own loader.

    Attributes:
        loader: This rank's own loader.

    Args:
        loader: This rank's own loader.
        groups: The groups of ranks.
        axis: The dimension of images that is divided; None for the longest one.
        is_predicting: Whether Lightning's prediction writers read the indices of samples.
    """

    def __init__(self, loader: Any, groups: ImageGroups, axis: int | None, is_predicting: bool) -> None:
        self.loader, self.groups, self.axis, self.is_predicting = loader, groups, axis, is_predicting
        self.number = groups.next_number()
        # Whether the user's code may have divided a stream of samples among the ranks.
        self.is_unknown = divided_among(loader) is None and not has_map(loader)
        # To find out whether a loader can continue in the middle of an epoch, Lightning reads these attributes.
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # While an instance is unpickled, it does not have this attribute yet.
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def worker_init_fn(self) -> Any:
        """The function of the rank's own loader. Lightning sets this attribute to seed the loader's workers."""
        return self.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        if isinstance(function, partial) and function.func is pl_worker_init_function:
            # Lightning gives each rank's workers other random numbers. The workers of a group draw the numbers that
            # those of the device with the group's number draw under DDP.
            function = partial(pl_worker_init_function, rank=self.groups.replica)
        self.loader.worker_init_fn = function

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator of the batches. All ranks of a group must call this, and use the iterator alike."""
        return GroupBatches(self)


class GroupBatches(Iterator[Any]):
    """The batches of an epoch; see :class:`GroupLoader`."""

    def __init__(self, loader: GroupLoader) -> None:
        self._loader, self._groups = loader, loader.groups
        self._index = START
        self._batches: Iterator[Any] = iter(())
        # A loader may draw random numbers when its iterator is created, so this must not happen later than on one
        # device, and therefore not in a generator.
        self._tell(self._begin)
        if loader.is_unknown and self._groups.parts.count > 1:
            self._compare()
        loader.is_unknown = False

    def __next__(self) -> Any:
        """Return the next batch. All ranks of the group must call this."""
        divided = None

        def load() -> PartedBatch | None:
            nonlocal divided
            for batch in self._batches:
                parted, divided = part_batch(batch, self._loader.axis)
                return parted
            return None

        parted = self._tell(load)
        if parted is None:
            raise StopIteration
        if self._loader.is_predicting and self._groups.part:
            self._note_no_samples()
        return join_batch(self._groups.parts, parted, divided, yields_pinned(self._loader.loader))

    def _tell(self, load: Callable[[], PartedBatch | None]) -> PartedBatch | None:
        """Return the result of a function that only the rank that loads calls, and continue with its random numbers."""
        before, position = GeneratorStates.current(CPU), (self._loader.number, self._index)
        self._index += 1
        message = None
        if not self._groups.part or (self._loader.is_unknown and self._index == START + 1):
            loaded = load()
            now = GeneratorStates.current(CPU)
            message = BatchMessage(position, loaded, {name: getattr(now, name) for name in before.changed(now)})
        message = self._groups.from_loader(message)
        if self._groups.part and message.states:
            GeneratorStates.current(CPU)._replace(**message.states).restore(CPU)
        if message.position != position:
            raise ConfigurationError(
                f"a rank is at {_text(position)}, while the rank that loads for it is at {_text(message.position)}: "
                "all ranks must iterate over the same loaders in the same order"
            )
        batch: PartedBatch | None = message.batch
        return batch

    def _begin(self) -> None:
        self._batches = iter(self._loader.loader)

    def _compare(self) -> None:
        """Refuse batches that are not the same on all ranks of the group, which would be left out on most of them.

        Raises:
            ConfigurationError: The user's code has divided the samples among the ranks of the group.
        """
        states, group = GeneratorStates.current(CPU), self._groups.cpu_group
        comparison = StreamComparison([0], range(1, group.size()))
        loaded: list[Any] = []
        is_divided: bool | None = None
        while is_divided is None:
            loaded.append(next(self._batches, None))
            rows = gather_rows(describe_batch(loaded[-1]), lambda values: gather_tensors(values, group))
            is_divided = comparison.add(rows)
            if is_divided is None and (len(loaded) == FIRST or not any(row[0] for row in rows)):
                is_divided = comparison.decide()
        if is_divided:
            reason = "the ranks of a group load different batches"
            refuse_divided_data(reason, self._groups.replicas, group.size(), is_stream=True)
        if self._groups.part:
            self._batches = iter(())  # Ends the workers of the loader.
            states.restore(CPU)
        else:
            self._batches = chain([batch for batch in loaded if batch is not None], self._batches)
        self._groups.from_loader(GeneratorStates.current(CPU)).restore(CPU)

    def _note_no_samples(self) -> None:
        """Put an empty list where Lightning's prediction writers read the indices of the samples of this rank."""
        sampler: Any = getattr(self._loader.loader, "batch_sampler", None)
        if sampler is not None:
            sampler.seen_batch_indices = [[]] * self._index


def _text(position: tuple[int, int]) -> str:
    loader, batch = position
    return f"the start of loader {loader}" if batch == START else f"batch {batch} of loader {loader}"
