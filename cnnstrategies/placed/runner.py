"""Run each operation of torch by the rules: here, on other ranks, or after tensors have been sent."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cnnstrategies._torch_private import schema_of
from cnnstrategies.placed.foreign import ForeignTensor
from cnnstrategies.placed.messages import RefusedError
from cnnstrategies.placed.operations import tensors_in, with_tensors

if TYPE_CHECKING:
    from cnnstrategies.placed.places import Places
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cnnstrategies._torch_private import QuickOperationMode, is_compiling, not_compiled, without_functions
from cnnstrategies.placed.decision import Place, SeveralPlacesError, decide, is_at
from cnnstrategies.placed.messages import DivergedError
from cnnstrategies.placed.operations import Operation, operation_of
from cnnstrategies.placed.partial import partial_in, run_partial
from cnnstrategies.placed.results import ResultForm, ResultForms, as_forms, run_on_meta
from cnnstrategies.placed.rows import run_rows
from cnnstrategies.placed.rules import Rule

if TYPE_CHECKING:
    from cnnstrategies.placed.places import Places


CPU = torch.device("cpu")
DETACH = torch.ops.aten.detach.default


class OperationRunner:
    """The rules of one rank for operations.

    Args:
        places: Where tensors are, and the messages to other ranks.
    """

    def __init__(self, places: "Places") -> None:
        self.places = places
        self.forms = ResultForms()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation by its rule, and return its results."""
        if self.places.has_partial and (partial := partial_in(args, kwargs)):
            return run_partial(self, func, partial, args, kwargs)
        if func is DETACH and not self.places.sums.waiting:
            # Autograd detaches each gradient. The storage of the result has the mark already.
            tensor = args[0]
            return tensor.twin(tensor.label) if type(tensor) is ForeignTensor else func(tensor)
        operation = operation_of(func)
        if operation.writes_first_only and args and type(args[0]) is ForeignTensor and self._all_at(args, kwargs):
            return args[0]
        if operation.has_lists and not self.places.sums.waiting:
            return run_rows(self, func, operation, args, kwargs)
        place_of = self.places.place_of
        operands = list(tensors_in(args, kwargs))
        owner: Place = None
        has_one_owner = True
        for operand in operands:
            place = operand.place if type(operand) is ForeignTensor else place_of(operand)
            if place is not None and place != owner:
                has_one_owner = owner is None
                owner = place
                if not has_one_owner:
                    break
        if operation.rule is Rule.COLLECTIVE:
            return run_collective(self.places, func, args, kwargs)
        if owner is None:
            return func(*args, **kwargs)
        if self.places.sums.waiting:
            result = self.places.sums.run(func, operation, args, kwargs, operands)
            if result is not None:
                return result
        # These are the most frequent cases, which the general rules below would run in the same way, but slower.
        if has_one_owner and operation.is_plain:
            if self.places.rank in owner:
                return self.places.mark(func(*args, **kwargs), owner)
            return self._foreign(operation, args, kwargs, owner, self.forms.of(func, args, kwargs))
        if (
            has_one_owner
            and operation.writes_first_only
            and place_of(args[0]) is not None
            and self.places.rank in owner
        ):
            return func(*args, **kwargs)
        return self._run_by_rule(func, operation, args, kwargs, operands)

    def _run_by_rule(self, func: Any, operation: Operation, args: Any, kwargs: Any, operands: list[Tensor]) -> Any:
        if operation.is_composite:
            with self.places.operations_again():
                return func.decompose(*args, **kwargs)
        rule = operation.rule_for(args, kwargs)
        if rule is Rule.PACKED:
            return self._pack_sequences(func, *args)
        if operation.has_lists:
            return run_rows(self, func, operation, args, kwargs)
        if operation.name == "equal" and args[0].shape != args[1].shape:
            return False
        written = operation.written_values(args, kwargs) + operation.hidden_values(args, kwargs)
        written = list(tensors_in(written, {}))
        place = None if rule is Rule.EVERYWHERE else self.place_for(operation, operands, written)
        if place is None:
            copies = self.places.all_everywhere(operands, operation.name)
            args, kwargs = with_tensors(lambda tensor: copies.get(id(tensor), tensor), args, kwargs)
            return func(*args, **kwargs)
        if operation.name == "set_":
            args = self._source_at(args, place)
        elif any(not is_at(self.places.place_of(operand), place) for operand in operands):
            copies = self.places.bring_all(operands, place, operation.name)
            args, kwargs = with_tensors(lambda tensor: copies.get(id(tensor), tensor), args, kwargs)
        if rule is Rule.VALUE:
            details = self.places.describe(operands)
            return self.places.tell(place, lambda: func(*args, **kwargs), operation.name, details)
        if self.places.rank in place:
            return self._run_here(func, operation, rule, args, kwargs, place)
        return self._run_elsewhere(func, operation, rule, args, kwargs, place)

    def _all_at(self, args: Any, kwargs: Any) -> bool:
        """Whether all operands are on the ranks of the first operand, which is foreign."""
        place, place_of = args[0].place, self.places.place_of
        for value in (*args[1:], *kwargs.values()) if kwargs else args[1:]:
            if isinstance(value, Tensor):
                if not is_at(place_of(value), place):
                    return False
            elif isinstance(value, (list, tuple)) and not all(
                is_at(place_of(item), place) for item in value if isinstance(item, Tensor)
            ):
                return False
        return True

    def place_for(self, operation: Operation, operands: Sequence[Tensor], written: Sequence[Tensor]) -> Place:
        """Return the place where an operation runs.

        Raises:
            RefusedError: The operation writes tensors of several places.
        """
        places = [self.places.place_of(operand) for operand in operands]
        targets = {id(tensor) for tensor in written}
        try:
            return decide(places, [id(operand) in targets for operand in operands], lambda i: distinct(operands[i]))
        except SeveralPlacesError:
            raise RefusedError(
                f"{operation.name} writes tensors of several places ({self.places.describe(written)}): write each of "
                "them by an operation of its own"
            ) from None

    def _run_here(
        self, func: Any, operation: Operation, rule: Rule, args: Any, kwargs: Any, place: tuple[int, ...]
    ) -> Any:
        results = func(*args, **kwargs)
        if rule is Rule.DRAWS_BY_VALUE:
            generator = generator_of(args, kwargs)
            generator.set_state(self.places.tell(place, generator.get_state, "generator"))
        if operation.asks_shapes(rule):
            forms = as_forms(results)
            first_forms = self.places.tell(place, lambda: forms, operation.name)
            if [form.shape for form in tree_forms(first_forms)] != [form.shape for form in tree_forms(forms)]:
                raise DivergedError(
                    f"{operation.name} gives the shapes {forms} on rank {self.places.rank}, but {first_forms} on rank "
                    f"{place[0]}: all copies of a tensor must be equal"
                )
        return self.places.mark(results, place)

    def _run_elsewhere(
        self, func: Any, operation: Operation, rule: Rule, args: Any, kwargs: Any, place: tuple[int, ...]
    ) -> Any:
        if rule is Rule.DRAWS:
            draw_and_drop(func, args, kwargs)
        elif rule is Rule.DRAWS_BY_VALUE:
            generator_of(args, kwargs).set_state(self.places.tell(place, lambda: None, "generator"))
        written = operation.written_values(args, kwargs)
        if rule is Rule.RESHAPES or operation.resizes:
            self._reshape(func, args, kwargs, written)
        if operation.returns and None not in operation.returns:
            results = [written[index] for index in operation.returns if index is not None]
            return results[0] if len(results) == 1 else tuple(results)
        if not operation.returns:
            return None
        if operation.asks_shapes(rule):
            forms = self.places.tell(place, lambda: None, operation.name)
        else:
            forms = self.forms.of(func, args, kwargs)
        results = self._foreign(operation, args, kwargs, place, forms)
        if len(operation.returns) == 1:
            return results
        return tuple(
            result if index is None else written[index]
            for result, index in zip(results, operation.returns, strict=True)
        )

    def _foreign(self, operation: Operation, args: Any, kwargs: Any, place: tuple[int, ...], forms: Any) -> Any:
        device = kwargs.get("device") or common_device(args, kwargs)
        # Views have the name of the tensor that they are views of, because they share its storage on other ranks.
        label = args[0].label if operation.is_view and type(args[0]) is ForeignTensor else ""
        return foreign_results(self.places, forms, device, place, label)

    def _reshape(self, func: Any, args: Any, kwargs: Any, written: Sequence[Any]) -> None:
        """Give foreign tensors the shapes and strides that an operation gives the tensors that it writes."""
        forms = tree_forms(run_on_meta(func, args, kwargs))
        for tensor, form in zip(tensors_in(written, {}), forms, strict=False):
            if isinstance(tensor, ForeignTensor) and (tensor.shape, tensor.stride()) != (form.shape, form.stride):
                reshaped = ForeignTensor.create(
                    self.places, form.shape, form.stride, tensor.dtype, tensor.device, tensor.place, tensor.label
                )
                # This changes the tensor's metadata in place. Functions of torch's C++ code hold the tensor as well.
                tensor.data = reshaped

    def _pack_sequences(self, func: Any, data: Tensor, lengths: Tensor, *options: Any) -> Any:
        """Pack sequences. All ranks get the numbers of sequences, which torch's layers read from memory."""
        lengths = self.places.everywhere(lengths, "lengths")
        place = self.places.place_of(data)
        if place is None or self.places.rank in place:
            packed, counts = func(data, lengths, *options)
            return packed if place is None else self.places.mark(packed, place), counts
        packed, counts = func(torch.empty_strided(data.shape, data.stride(), dtype=data.dtype), lengths, *options)
        return self.places.foreign_like(packed, place, device=data.device), counts

    def _source_at(self, args: Any, place: tuple[int, ...]) -> Any:
        """Return arguments of ``set_`` whose source is at the place of the tensor that will share its storage."""
        if len(args) < 2 or not isinstance(args[1], Tensor):
            raise RefusedError(
                f"set_ with a storage for {self.places.describe(args[:1])} of ranks {list(place)}: use a tensor "
                "instead of the storage"
            )
        source = self.places.at_exactly(args[1], place, "set_")
        if type(args[0]) is ForeignTensor:
            args[0].label = self.places.label_of(source)
        return [args[0], source, *args[2:]]


def foreign_results(places: "Places", forms: Any, device: torch.device, place: tuple[int, ...], label: str = "") -> Any:
    """Return an operation's results with a foreign tensor in place of each `ResultForm`."""
    if isinstance(forms, ResultForm):
        return ForeignTensor.create(places, forms.shape, forms.stride, forms.dtype, device, place, label)
    if isinstance(forms, (list, tuple)):
        return [foreign_results(places, form, device, place, label) for form in forms]
    return forms


def tree_forms(forms: Any) -> list[ResultForm]:
    """Return the instances of `ResultForm` in an operation's results, in order."""
    if isinstance(forms, ResultForm):
        return [forms]
    return [form for item in forms for form in tree_forms(item)] if isinstance(forms, (list, tuple)) else []


def distinct(tensor: Tensor) -> int:
    """Return a tensor's number of elements, without repetitions of an expanded tensor."""
    count = 1
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if step else 1
    return count


def common_device(args: Any, kwargs: Any) -> torch.device:
    """Return the device of an operation's results. A CPU tensor without dimensions may stand beside GPU tensors."""
    devices = [tensor.device for tensor in tensors_in(args, kwargs)]
    return next((device for device in devices if device.type != "cpu"), devices[0] if devices else CPU)


class Operations(QuickOperationMode):  # type: ignore[no-untyped-call]
    """The mode that runs each operation by the rules."""

    def __init__(self, runner: OperationRunner) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runner = runner
        # The compiler marks the function, which a method of an object does not allow.
        self._run_without_compiler = not_compiled(lambda func, args, kwargs: runner.run(func, args, kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation by the rules."""
        with without_functions():
            run = self._run_without_compiler if is_compiling() else self._runner.run
            return run(func, args, kwargs or {})


# Collectives of `torch.distributed`. Every rank runs the whole program, so a program that gathers or sums over
# processes must find one process, as on one device. In such a group each result is an operand, which is copied by the
# rules.

# Collectives that leave their operands as they are in a group of one process. All others write their first argument,
# with tensors in nested lists, from their second argument.
IN_PLACE = {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"}


def run_collective(places: "Places", func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective.

    Raises:
        RefusedError: The operands have places, and the group has several processes.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if all(places.place_of(tensor) is None for tensor in tensors):
        return func(*args, **kwargs)
    name: str = func.overloadpacket.__name__
    schema = schema_of(func)
    position = [argument.name for argument in schema.arguments].index("process_group")
    group = args[position] if position < len(args) else kwargs["process_group"]
    size = dist.ProcessGroup.unbox(group).size()
    if size > 1:
        placed = next(tensor for tensor in tensors if places.place_of(tensor) is not None)
        raise RefusedError(
            f"{name.strip('_')} of {places.describe([placed])} in a group of {size} processes: all ranks run the same "
            "program with the whole batch, so there is nothing to gather or to sum; leave the call out, or call it in "
            "a step of the module, where the group has one process"
        )
    if name not in IN_PLACE:
        with places.operations_again():
            for target, source in zip(tree_leaves(args[0]), tree_leaves(args[1]), strict=True):
                if target is not source:
                    target.copy_(source.reshape(target.shape))
    if not schema.returns:
        return None
    with places.local():
        # Groups of NCCL refuse tensors on the CPU.
        _, work = torch.ops.c10d.broadcast_.default([torch.zeros((), device=tensors[0].device)], group, 0, 0)
    return work if len(schema.returns) == 1 else (args[0], work)


def draw_and_drop(func: Any, args: Any, kwargs: Any) -> None:
    """Draw the random numbers that other ranks draw in an operation, so that this rank's generator advances as theirs.

    Operands without values are replaced by 0.5. A probability, a mean and a standard deviation may all be 0.5.
    """

    def with_storage(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ForeignTensor):
            return torch.full(tensor.shape, 0.5, device=tensor.device).to(tensor.dtype)
        return tensor.clone()

    args, kwargs = with_tensors(with_storage, args, kwargs)
    func(*args, **kwargs)


def generator_of(args: Any, kwargs: Any) -> torch.Generator:
    """Return the generator from which an operation draws."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    device = next(tensors_in(args, kwargs)).device
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
