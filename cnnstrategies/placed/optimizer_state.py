"""An optimizer's state of parameters at places: the state of a parameter is at the place of the parameter."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from cnnstrategies.placed.foreign import ForeignTensor
from cnnstrategies.placed.places import Places
from cnnstrategies.placed.results import ResultForm


class StateForm(NamedTuple):
    """Metadata of a tensor in an optimizer's state.

    Attributes:
        form: Shape, strides and dtype.
        is_on_cpu: Whether the tensor is on the CPU, such as a number of steps. Other tensors are on the device of the
            parameter.
        label: Name of the tensor.
    """

    form: ResultForm
    is_on_cpu: bool
    label: str


class PlacedState:
    """Gives an optimizer's state the places of the parameters, so that all ranks can read the state.

    Of parameters of other ranks, a rank has the tensors of the state as foreign tensors.

    Args:
        places: The rules of this rank.
        is_own: Whether a rank's steps compute the state of this rank's parameters only. Numbers of another rank's
            state, such as a number of steps that is not a tensor, are then left out: they would be out of date after
            the next step. Otherwise all ranks have these numbers, and tensors with a single number.
    """

    def __init__(self, places: Places, is_own: bool) -> None:
        self._places, self._is_own = places, is_own
        self._emptied: set[int] = set()  # Ids of parameters whose state must be described again.
        # By id of a parameter whose state all ranks know: the parameter, which keeps the id in use.
        self._described: dict[int, Tensor] = {}
        self._with_state: set[int] = set()  # Those whose state has entries.

    def mark(self, state: Any, place: tuple[int, ...], label: str) -> None:
        """Mark the tensors in the state of a parameter of this rank."""
        for name, value in (state or {}).items():
            self._places.mark(value, place, f"{name} of {label}")

    def is_described(self, parameter: Tensor) -> bool:
        """Whether the state of a parameter has its place, and all ranks know the state."""
        return id(parameter) in self._described and id(parameter) not in self._emptied

    def place_all(self, optimizer: Optimizer) -> None:
        """Place the state of all parameters, of which all ranks have copies, as after ``load_state_dict``."""
        with self._places.local():
            for parameter in parameters_of(optimizer):
                state, place = optimizer.state.get(parameter), self._places.place_of(parameter)
                if not state or place is None:
                    continue
                self._described[id(parameter)] = parameter
                self._with_state.add(id(parameter))
                label = self._places.label_of(parameter)
                is_out_of_date = self._is_own and type(parameter) is ForeignTensor
                optimizer.state[parameter] = {
                    name: self._given(value, place, f"{name} of {label}")
                    for name, value in state.items()
                    if not (is_out_of_date and _has_numbers(value))
                }

    def _given(self, value: Any, place: tuple[int, ...], label: str) -> Any:
        def given(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not (self._is_own or leaf.dim() > 0):
                return leaf
            if self._places.place_of(leaf) == place:
                # From a copy of a state, in which only some ranks have a name for the tensor.
                self._places.set_place(leaf, place, label)
                return leaf
            return self._places.give(leaf, place, label)

        return tree_map(given, value)

    def note_emptied(self, optimizer: Optimizer) -> None:
        """Note before a step which parameters' states the user's code has emptied, on all ranks alike."""
        self._emptied = {number for number in self._with_state if not optimizer.state.get(self._described[number])}

    def describe(self, optimizer: Optimizer, stepped: Sequence[Tensor]) -> None:
        """Create the state of foreign parameters that have made their first step. All ranks must call this.

        Args:
            optimizer: The optimizer.
            stepped: Parameters with a gradient in the last step that are not on all ranks.
        """
        new = {id(parameter) for parameter in stepped} - self._described.keys() | self._emptied
        self._emptied = set()
        if not new:
            return
        by_place: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters_of(optimizer):
            place = self._places.place_of(parameter)
            if id(parameter) in new and place is not None:
                self._described[id(parameter)] = parameter
                by_place.setdefault(place, []).append(parameter)
        for place, parameters in sorted(by_place.items()):

            def own_forms(parameters: Sequence[Tensor] = parameters) -> list[Any]:
                states = [optimizer.state.get(parameter) for parameter in parameters]
                return [None if state is None else _forms(self._places, state) for state in states]

            all_forms = self._places.tell(place, own_forms, "the optimizer's state")
            for parameter, forms in zip(parameters, all_forms, strict=True):
                if forms:
                    self._with_state.add(id(parameter))
                if type(parameter) is ForeignTensor and forms is not None:
                    optimizer.state[parameter] = {name: self._foreign(form, parameter) for name, form in forms.items()}
        # All ranks have the entries in the same order, so that loops over the state read the same values.
        ordered = {
            parameter: optimizer.state[parameter]
            for parameter in parameters_of(optimizer)
            if parameter in optimizer.state
        }
        others = {key: value for key, value in optimizer.state.items() if key not in ordered}
        optimizer.state.clear()
        optimizer.state.update({**others, **ordered})

    def _foreign(self, forms: Any, parameter: ForeignTensor) -> Any:
        """Return a value of a foreign parameter's state from its form."""

        def created(form: Any) -> Any:
            if not isinstance(form, StateForm):
                return form
            device = torch.device("cpu") if form.is_on_cpu else parameter.device
            shape, stride, dtype = form.form
            return ForeignTensor.create(self._places, shape, stride, dtype, device, parameter.place, form.label)

        return tree_map(created, forms, is_leaf=lambda value: isinstance(value, StateForm))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters in the order of the indices in its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _forms(places: Places, state: Any) -> dict[str, Any]:
    """Return a parameter's state with a `StateForm` in place of each tensor, without entries that have numbers."""

    def form_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return StateForm(ResultForm.of(value), value.device.type == "cpu", places.label_of(value))
        return value

    return {name: tree_map(form_of, value) for name, value in state.items() if not _has_numbers(value)}


def _has_numbers(value: Any) -> bool:
    return any(leaf is not None and not isinstance(leaf, Tensor) for leaf in tree_leaves(value))
