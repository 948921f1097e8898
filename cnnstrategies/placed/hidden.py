"""Optimizer steps in which each rank updates its own parameters, with the gradients of foreign parameters hidden.

Most optimizers update each parameter by itself, so a rank need not run the operations on foreign parameters, which do
nothing. A single foreign gradient also makes torch's optimizers leave their fast implementations for lists.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cnnstrategies._torch_private import not_intercepted
from cnnstrategies.optimizer_trial import (
    attribute_with_tensors,
    draws_random_numbers,
    is_elementwise,
    mixes_parameters,
    removes_gradients,
    values_of_all,
)
from cnnstrategies.placed.foreign import ForeignTensor
from cnnstrategies.placed.optimizer_state import PlacedState, parameters_of
from cnnstrategies.placed.places import Places


def hide_foreign_gradients(places: Places, optimizer: Optimizer) -> "HiddenGradients":
    """Hide gradients of foreign parameters from an optimizer during each step.

    Inside ``step`` the optimizer finds gradients of this rank's parameters only, and its operations run without the
    rules. Step hooks and the closure find all gradients, and follow the rules. After a step the optimizer has a state
    for all parameters; the state of a parameter is at the parameter's place.

    An optimizer that mixes parameters, for example by the norm of all gradients, is left as it is: its operations
    follow the rules. The same holds for optimizers that draw random numbers. All ranks must call this function.

    Args:
        places: The rules of this rank.
        optimizer: The optimizer.

    Returns:
        A handle, whose method ``remove`` undoes this.
    """
    return HiddenGradients(places, optimizer)


def steps_separately(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step of a parameter depends only on the parameter, its gradient and its state.

    Copies of the optimizer make trial steps with made-up parameters, unless its class is known to treat each element by
    itself. Return False if the trial fails.
    """
    if is_elementwise(type(optimizer)):
        return True
    devices_of_parameters = (parameter.device for group in optimizer.param_groups for parameter in group["params"])
    device = next(devices_of_parameters, None)
    if device is None or attribute_with_tensors(optimizer) is not None:
        return False  # Lightning's optimizer for modules that configure no optimizer does not have parameters.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            dtype, whole = values_of_all(optimizer, device)
            return not (
                mixes_parameters(optimizer, whole, device, dtype)
                or draws_random_numbers(optimizer, whole, device, dtype)
                or removes_gradients(optimizer, device, dtype)
            )
        except Exception:
            return False


class HiddenGradients:
    """The hooks of one optimizer that hide gradients; see `hide_foreign_gradients`.

    Attributes:
        hides: Whether gradients are hidden. Otherwise the hooks only bring gradients to the places of their parameters.
    """

    def __init__(self, places: Places, optimizer: Optimizer) -> None:
        with places.local():
            self.hides = steps_separately(optimizer)
        # Only classes of users read the loss, such as an optimizer whose rate depends on it. They may also replace the
        # memory of parameters, gradients and state, by an assignment of a tensor.
        self._is_users = not is_elementwise(type(optimizer))
        self._places = places
        self._state = PlacedState(places, self.hides)
        self._is_hiding = False
        self._hidden: list[tuple[ForeignTensor, Tensor]] = []
        # This rank's parameters with a gradient, their places and, for a user's class, their labels.
        self._stepped: list[tuple[Tensor, tuple[int, ...], str]] = []
        self._before = optimizer.register_step_pre_hook(self._begin)
        self._after = optimizer.register_step_post_hook(self._end)
        self._loaded = _after_loading(optimizer, self._state.place_all)
        self._order = register_optimizer_step_pre_hook(_order_hooks(weakref.ref(optimizer), weakref.ref(self)))
        self._attributes, self._zero_grad = vars(optimizer), not_intercepted(optimizer.zero_grad)
        if getattr(optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad:
            # torch's own code calls only functions that need no rules.
            self._attributes["zero_grad"] = self._zero_grad

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in (self._before, self._after, self._loaded, self._order):
            handle.remove()
        if self._attributes.get("zero_grad") is self._zero_grad:  # The user's code may have put another one there.
            del self._attributes["zero_grad"]

    def order_hooks(self) -> None:
        """Let the hooks of this object run closest to the step, so that the hooks of users find all gradients."""
        for handle, is_last in ((self._before, True), (self._after, False)):
            hooks: Any = handle.hooks_dict_ref()
            hooks.move_to_end(handle.id, last=is_last)

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            self._hide(optimizer)  # With a closure, the gradients are complete only after the closure.

        def wrapped(argument: Any) -> Any:
            return self._shown(optimizer, argument) if callable(argument) else argument

        return (args[0], *map(wrapped, args[1:])), {name: wrapped(argument) for name, argument in kwargs.items()}

    def _shown(self, optimizer: Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure that finds all gradients and follows the rules. All ranks get a loss that may be read."""

        def shown(*args: Any, **kwargs: Any) -> Any:
            self._show(optimizer)
            result = closure(*args, **kwargs)
            if self.hides and self._is_users and isinstance(result, Tensor):
                result = self._places.everywhere(result.detach(), "the loss")
            self._hide(optimizer)
            return result

        return shown

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped = self._show(optimizer)
        if self.hides and self._places.active:
            self._state.describe(optimizer, stepped)

    def _hide(self, optimizer: Optimizer) -> None:
        self._show(optimizer)  # The last step may have ended with an error.
        self._places.sums.settle()
        parameters, place_of = parameters_of(optimizer), self._places.place_of
        self._places.settle_gradients(parameters)
        if not self.hides:
            return
        self._state.note_emptied(optimizer)
        self._places.begin_local()
        self._is_hiding = True
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if type(parameter) is ForeignTensor:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None
            elif (place := place_of(parameter)) is not None:
                label = self._places.label_of(parameter) if self._is_users else ""
                self._stepped.append((parameter, place, label))

    def _show(self, optimizer: Optimizer) -> list[Tensor]:
        """Undo `_hide`. Return the parameters with a gradient that are not on all ranks."""
        if not self._is_hiding:
            return []
        for parameter, place, label in self._stepped:
            if self._is_users:
                self._places.mark(parameter, place, label)
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    self._places.mark(parameter.grad, place)
            elif self._state.is_described(parameter):
                continue
            self._state.mark(optimizer.state.get(parameter), place, label or self._places.label_of(parameter))
        for foreign, gradient in self._hidden:
            foreign.grad = gradient
        stepped = [*(parameter for parameter, _, _ in self._stepped), *(foreign for foreign, _ in self._hidden)]
        self._stepped, self._hidden, self._is_hiding = [], [], False
        self._places.end_local()
        return stepped


def _order_hooks(
    optimizer: "weakref.ref[Optimizer]", hidden: "weakref.ref[HiddenGradients]"
) -> Callable[[Optimizer, Any, Any], None]:
    """Return a hook of all optimizers, which runs before the hooks of an optimizer."""

    def order(stepping: Optimizer, args: Any, kwargs: Any) -> None:
        hider = hidden()
        if hider is not None and stepping is optimizer():
            hider.order_hooks()

    return order


class _LoadHandle:
    """Handle of an optimizer whose method ``load_state_dict`` was replaced; :meth:`remove` undoes this."""

    def __init__(self, optimizer: Optimizer, hook: Callable[[Optimizer], None]) -> None:
        self._optimizer = optimizer
        load = optimizer.load_state_dict

        def load_and_call(state_dict: Any) -> None:
            load(state_dict)
            hook(optimizer)

        vars(optimizer)["load_state_dict"] = load_and_call

    def remove(self) -> None:
        vars(self._optimizer).pop("load_state_dict", None)


def _after_loading(optimizer: Optimizer, hook: Callable[[Optimizer], None]) -> Any:
    """Call a hook after an optimizer has loaded a state. Return a handle whose method ``remove`` undoes this."""
    try:
        return optimizer.register_load_state_dict_post_hook(hook)
    except AttributeError:
        # An optimizer that wraps another one may not call `Optimizer.__init__`, which makes the list of hooks.
        return _LoadHandle(optimizer, hook)
