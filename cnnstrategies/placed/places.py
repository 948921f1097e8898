"""A rank's knowledge of where tensors are, and the messages that bring values from one place to another."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies._torch_private import (
    functions_without,
    mark_as_parameter,
    swap_contents,
    without_functions,
    without_modes,
)
from cnnstrategies.placed.decision import Place, is_at
from cnnstrategies.placed.device_link import DeviceLink
from cnnstrategies.placed.foreign import ForeignTensor
from cnnstrategies.placed.functions import Functions
from cnnstrategies.placed.messages import MessageLink, Messages, RefusedError, as_plain
from cnnstrategies.placed.parcel import TensorParcel
from cnnstrategies.placed.partial import PartialTensor, joined_rows
from cnnstrategies.placed.results import check_layout
from cnnstrategies.placed.runner import OperationRunner, Operations
from cnnstrategies.placed.sums import DeferredSum, DeferredSums

T = TypeVar("T")
# Name of the attribute of a storage that contains its mark. A storage's Python object lives as long as the storage.
MARK = "cnnstrategies_placed"


class Mark(NamedTuple):
    """The place of a storage, on a rank that has the storage.

    Attributes:
        places: The object that set the mark. Marks of earlier objects, such as those of an earlier run in the same
            process, do not count.
        place: Ranks that have copies.
        label: Name of the tensor that was marked first.
        sum: If the values must still be summed over the place: the mark of the sum.
    """

    places: "Places"
    place: tuple[int, ...]
    label: str
    sum: DeferredSum | None = None


class Places:
    """The rules of one rank. As a context manager, an object of this class makes torch follow the rules.

    Tensors of which all ranks have copies need no mark. Other tensors are marked by their storage on ranks that have
    them, so that views need no marks of their own; on other ranks they are foreign tensors.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        link: Connections for messages.
        devices: Connections for tensors on the ranks' devices; None if the device is the CPU.

    Attributes:
        messages: Messages to and from other ranks.
        devices: See above.
        sums: Sums over the ranks of a place that have not been computed yet.
        readers: By the names of tensors that are observed, the ranks to which operations have brought these tensors.
        active: Whether this rank follows the rules now, so that other ranks expect its messages.
        has_partial: Whether this rank has created a `PartialTensor`. Otherwise operations need not look for them.
    """

    def __init__(self, rank: int, world_size: int, link: MessageLink, devices: DeviceLink | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.has_partial = False
        self.readers: dict[str, set[int]] = {}
        self.messages = Messages(rank, world_size, link)
        self.sums = DeferredSums(self)
        self.devices = devices
        self.active = False
        self._spans: list[AbstractContextManager[None]] = []  # Contexts that `begin_local` has entered.
        self._runner = OperationRunner(self)
        self._operations, self._functions = Operations(self._runner), Functions(self)

    # Contexts

    def __enter__(self) -> Self:
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        self._operations.__enter__()  # type: ignore[no-untyped-call]
        self.active = True
        return self

    def __exit__(self, *error: Any) -> None:
        while self._spans:  # An error has ended the code before `end_local`.
            self.end_local()
        self.active = False
        self._operations.__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]

    def local(self) -> AbstractContextManager[None]:
        """Return a context for code that only some ranks run, such as a stage's forward.

        Operations on a rank's own tensors run as without this package, and results are not marked. Reads of foreign
        values are refused, because the other ranks do not run the same code.
        """
        return _LocalCode(self)

    def functions_of_others(self) -> AbstractContextManager[None]:
        """Return a context inside of :meth:`local` in which other modes and classes have their functions of torch."""
        return functions_without(self._functions)

    def begin_local(self) -> None:
        """Enter the context :meth:`local`, which :meth:`end_local` leaves, for code between two hooks."""
        context = self.local()
        context.__enter__()
        self._spans.append(context)

    def end_local(self) -> None:
        """Leave the context that :meth:`begin_local` has entered last."""
        self._spans.pop().__exit__(None, None, None)

    @contextmanager
    def operations_again(self) -> Iterator[None]:
        """Return a context, for use inside an operation, in which the parts of the operation follow the rules."""
        if not self.active:
            yield
            return
        with self._operations:
            yield

    # Places of tensors

    def place_of(self, tensor: Tensor) -> Place:
        """Return the ranks that have copies of a tensor; None if all ranks have copies."""
        if isinstance(tensor, ForeignTensor):
            return tensor.place
        mark = self._mark_of(tensor)
        return None if mark is None else mark.place

    def places_of(self, tensors: Iterable[Tensor]) -> list[Place]:
        """Return the place of each tensor of a list."""
        place_of = self.place_of
        return [tensor.place if type(tensor) is ForeignTensor else place_of(tensor) for tensor in tensors]

    def label_of(self, tensor: Tensor) -> str:
        """Return a tensor's name; an empty text if it has no name."""
        if isinstance(tensor, ForeignTensor):
            return tensor.label
        mark = self._mark_of(tensor)
        return "" if mark is None else mark.label

    def _mark_of(self, tensor: Tensor) -> Mark | None:
        if tensor.layout is not torch.strided:
            return None
        mark: Mark | None = vars(Tensor.untyped_storage(tensor)).get(MARK)
        return mark if mark is not None and mark.places is self else None

    def deferred_sum_of(self, tensor: Tensor) -> DeferredSum | None:
        """Return the mark of a tensor whose values must still be summed over its place; None for other tensors."""
        if type(tensor) is ForeignTensor:
            return None
        mark = self._mark_of(tensor)
        return None if mark is None else mark.sum

    def mark_sum(self, tensor: Tensor, deferred_sum: DeferredSum | None) -> None:
        """Note that a marked tensor's values must be summed over its place, or that they have been summed."""
        mark = self._mark_of(tensor)
        assert mark is not None
        setattr(Tensor.untyped_storage(tensor), MARK, mark._replace(sum=deferred_sum))

    def mark(self, value: T, place: tuple[int, ...], label: str = "") -> T:
        """Mark tensors of this rank, possibly in nested containers, as tensors of a place. Return the value.

        A storage keeps its first mark, because an operation may return an operand or a view of it.
        """
        for tensor in (value,) if isinstance(value, Tensor) else tree_leaves(value):
            if isinstance(tensor, Tensor) and not isinstance(tensor, ForeignTensor):
                check_layout(tensor)
                if self._mark_of(tensor) is None:
                    setattr(Tensor.untyped_storage(tensor), MARK, Mark(self, place, label))
        return value

    def foreign_like(
        self, tensor: Tensor, place: tuple[int, ...], label: str = "", device: torch.device | None = None
    ) -> ForeignTensor:
        """Create a foreign tensor with another tensor's metadata."""
        return ForeignTensor.create(
            self, tensor.shape, tensor.stride(), tensor.dtype, device or tensor.device, place, label
        )

    def give(self, value: Tensor, place: tuple[int, ...], label: str = "") -> Tensor:
        """Return a tensor of a place: marked on the place's ranks, foreign on other ranks.

        Args:
            value: The tensor. On other ranks, a tensor with the same metadata.
            place: Ranks that have copies of the tensor.
            label: Name for messages.
        """
        if self.rank in place:
            return self.mark(value, place, label)
        return self.foreign_like(value, place, label)

    def take(self, value: Tensor, place: tuple[int, ...], label: str) -> Tensor:
        """Return a tensor of a place that shares the storage of a tensor with copies on all ranks.

        From now on, the values of this storage are those on the place's ranks. Other ranks keep copies that are out of
        date, but do not read them: the storage's mark says so.
        """
        setattr(Tensor.untyped_storage(value), MARK, Mark(self, place, label))
        return value if self.rank in place else self.foreign_like(value, place, label)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor at the tensor's place, without a gradient."""
        if type(tensor) is ForeignTensor:
            return tensor.twin("")
        place = self.place_of(tensor)
        if place is None or self.sums.waiting or isinstance(tensor, PartialTensor):
            return tensor.detach().clone()
        with self.local():
            return self.mark(tensor.detach().clone(), place)

    def set_place(self, tensor: Tensor, place: tuple[int, ...], label: str) -> None:
        """Give a parameter or buffer a place and a name: mark the tensor on the place's ranks, else make it foreign.

        The tensor may already be foreign, or have a mark with another name.
        """
        if self.rank in place:
            setattr(Tensor.untyped_storage(tensor), MARK, Mark(self, place, label))
        elif isinstance(tensor, ForeignTensor):
            tensor.place, tensor.label = place, label
        else:
            self.put_away(tensor, place, label)

    def forget(self, tensor: Tensor) -> None:
        """Take a tensor's mark away. All ranks must have copies of the tensor."""
        vars(Tensor.untyped_storage(tensor)).pop(MARK, None)

    def put_away(
        self, tensor: Tensor, place: tuple[int, ...], label: str = "", device: torch.device | None = None
    ) -> None:
        """Make a parameter or buffer foreign in place, so that all references to it refer to the foreign tensor.

        Args:
            tensor: The parameter or buffer.
            place: Ranks that have copies of the tensor.
            label: Name for messages.
            device: Device of the foreign tensor; by default the tensor's device.

        Raises:
            RuntimeError: A weak reference to the tensor exists, or an autograd graph uses the tensor.
        """
        foreign = self.foreign_like(tensor.detach(), place, label, device)
        if isinstance(tensor, nn.Parameter):
            mark_as_parameter(foreign)
        foreign.requires_grad_(tensor.requires_grad)
        with without_modes():
            swap_contents(tensor, foreign)

    # Messages. All ranks call these methods at the same point of the program.

    def bring(self, tensor: Tensor, ranks: tuple[int, ...], why: str = "bring") -> Tensor:
        """Return a tensor that has copies on the given ranks, without a gradient."""
        return self.bring_all([tensor], ranks, why).get(id(tensor), tensor)

    def bring_all(self, tensors: Iterable[Tensor], ranks: tuple[int, ...], why: str = "bring") -> dict[int, Tensor]:
        """Send tensors to ranks, in one message from each place to each rank.

        Returns:
            The copies, by the id of the tensor. Tensors that have copies on all given ranks are left out.
        """
        tensors = list(tensors)
        self.sums.settle_for(tensors)
        with without_functions():
            places = self.places_of(tensors)
        elsewhere: dict[tuple[int, ...], dict[int, Tensor]] = {}
        for tensor, place in zip(tensors, places, strict=True):
            if place is not None and not is_at(place, ranks):
                elsewhere.setdefault(place, {})[id(tensor)] = self._with_all_rows(tensor)
                if (label := self.label_of(tensor)) in self.readers:
                    self.readers[label].update(ranks)
        brought: dict[int, Tensor] = {}
        for place in sorted(elsewhere):
            moved = list(elsewhere[place].values())
            subject = self._subject(why, moved)
            with self.local():
                parcel = TensorParcel(moved, self.devices)
                parts = parcel.pack() if self.rank == place[0] or (self.rank in place and self.rank in ranks) else []
                if self.rank == place[0]:
                    for rank in ranks:
                        if rank not in place:
                            self.messages.send(rank, subject, parcel.for_message(parts))
                            parcel.send(parts, rank)
                if self.rank not in ranks:
                    copies: list[Tensor] = [
                        ForeignTensor.create(self, tensor.shape, form.stride, tensor.dtype, tensor.device, ranks)
                        for form, tensor in zip(parcel.forms, moved, strict=True)
                    ]
                else:
                    if self.rank not in place:
                        parts = parcel.receive(self.messages.receive(place[0], subject), place[0])
                    copies = self.mark(parcel.unpack(parts), ranks)
            brought |= zip(elsewhere[place], copies, strict=True)
        return brought

    def everywhere(self, tensor: Tensor, why: str = "read") -> Tensor:
        """Return a tensor that has copies on all ranks, without a gradient."""
        return self.all_everywhere([tensor], why).get(id(tensor), tensor)

    def all_everywhere(self, tensors: Iterable[Tensor], why: str = "read") -> dict[int, Tensor]:
        """Return copies of placed tensors on all ranks, by the id of the tensor."""
        tensors = list(tensors)
        self.sums.settle_for(tensors)
        placed: dict[tuple[int, ...], dict[int, Tensor]] = {}
        for tensor in tensors:
            place = self.place_of(tensor)
            if place is not None:
                placed.setdefault(place, {})[id(tensor)] = self._with_all_rows(tensor)
        subjects = {place: self._subject(why, list(placed[place].values())) for place in sorted(placed)}
        copies: dict[int, Tensor] = {}
        with self.local():
            parcels = {place: TensorParcel(list(placed[place].values()), self.devices) for place in subjects}
            packed = {place: parcels[place].pack() for place in subjects if place[0] == self.rank}
            for place, parts in packed.items():  # Before this rank waits for other ranks.
                self._send_to_others(parcels[place].for_message(parts), subjects[place])
            for place, subject in subjects.items():
                message = packed[place] if place in packed else self.messages.receive(place[0], subject)
                shared = parcels[place].share(message, place[0])
                copies |= zip(placed[place], parcels[place].unpack(shared), strict=True)
        return copies

    def at_exactly(self, tensor: Tensor, place: Place, why: str) -> Tensor:
        """Return a tensor whose place is the given place. It may be copied or sent, and is then without a gradient.

        Use this function before two tensors share a storage, which can only have one place.
        """
        self.sums.settle_for([tensor])
        source = self.place_of(tensor)
        if source == place:
            return tensor
        if place is None:
            return self.everywhere(tensor, why)
        if is_at(source, place):
            return self.give(tensor.detach().clone(), place)
        return self.bring(tensor, place, why)

    def _with_all_rows(self, tensor: Tensor) -> Tensor:
        return tensor.checked_whole() if isinstance(tensor, PartialTensor) else tensor

    def join_rows(self, tensor: PartialTensor, rows: Tensor) -> Tensor:
        """Return a partial tensor with all rows. All ranks of the tensor's place must call this.

        Args:
            tensor: The partial tensor.
            rows: This rank's rows.
        """
        subject = self.messages.subject("rows", self.describe([tensor]))
        with self.local():
            parts = self.exchange(rows.detach().cpu(), tensor.place, subject)
            return self.mark(joined_rows(tensor, parts, tensor.counts), tensor.place, tensor.label)

    def is_misplaced(self, tensor: Tensor) -> bool:
        """Whether a tensor has a gradient at another place. Sparse gradients, which all ranks have, do not count."""
        gradient = tensor.grad
        if gradient is None or gradient.layout is not torch.strided:
            return False
        if type(tensor) is ForeignTensor and type(gradient) is ForeignTensor:
            return gradient.place != tensor.place
        return self.place_of(gradient) != self.place_of(tensor)

    def settle_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Bring gradients to the places of their tensors, in one message for each pair of places.

        A gradient may be elsewhere after a backward pass: the gradient of a product is where the other factor is.
        """
        why = "gradients"
        misplaced: dict[Place, list[Tensor]] = {}
        with without_functions():  # A function mode would intercept each access to an attribute of a tensor.
            for tensor in tensors:
                if self.is_misplaced(tensor):
                    misplaced.setdefault(self.place_of(tensor), []).append(tensor)
        for place in sorted(misplaced, key=lambda place: place or ()):
            gradients = [tensor.grad for tensor in misplaced[place] if tensor.grad is not None]
            copies = self.all_everywhere(gradients, why) if place is None else self.bring_all(gradients, place, why)
            for tensor, gradient in zip(misplaced[place], gradients, strict=True):
                tensor.grad = self.at_exactly(copies.get(id(gradient), gradient), place, why)

    def tell(self, place: tuple[int, ...], make: Callable[[], Any], why: str, details: str = "") -> Any:
        """Return a value that the first rank of a place computes, on all ranks.

        The other ranks of the place receive the value as well. All ranks therefore continue in the same way, even if
        copies differ in the last bit.

        Args:
            place: Ranks that can compute the value.
            make: Function that computes the value. Only the first rank of the place calls the function. Tensors in the
                value arrive on the CPU.
            why: First word of the message's subject.
            details: Description of the value.
        """
        subject = self._subject(why, (), details)
        if self.rank != place[0]:
            with self.local():
                return self.messages.receive(place[0], subject)
        value = make()
        with self.local():
            value = tree_map(as_plain, value)
            self._send_to_others(value, subject)
        return value

    def _send_to_others(self, value: Any, subject: str) -> None:
        for rank in range(self.world_size):
            if rank != self.rank:
                self.messages.send(rank, subject, value)

    def exchange(self, value: T, among: Sequence[int], why: str) -> list[T]:
        """Return the values of the given ranks, in their order. These ranks call this method, possibly alone."""
        with self.local():
            for rank in among:
                if rank != self.rank:
                    self.messages.send(rank, why, value)
            return [value if rank == self.rank else self.messages.receive(rank, why) for rank in among]

    def describe(self, tensors: Sequence[Tensor]) -> str:
        """Return a text with the number of tensors, and with shapes and names of the first ones."""
        texts = [f"{self.label_of(tensor) or 'a tensor'} {tuple(tensor.shape)}" for tensor in tensors[:3]]
        return ", ".join(texts) + (f" and {len(tensors) - 3} other tensors" if len(tensors) > 3 else "")

    def _subject(self, why: str, tensors: Sequence[Tensor], details: str = "") -> str:
        details = details or self.describe(tensors)
        if not self.active:
            raise RefusedError(
                f"{why} of {details} needs values of other ranks, but these ranks do not run the same code now: read "
                "the value in the module's step or in a hook of Lightning, and not inside the divided network"
            )
        return self.messages.subject(why, details)

    # Operations

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation by the rules."""
        return self._runner.run(func, args, kwargs)


class _LocalCode(without_modes):
    """See `Places.local`. A step enters such a context dozens of times."""

    def __init__(self, places: Places) -> None:
        self._places = places

    def __enter__(self) -> None:
        self._before, self._places.active = self._places.active, False
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._places.active = self._before
