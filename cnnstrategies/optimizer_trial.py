"""Trial steps of copies of an optimizer, with made-up parameters.

Strategies that divide an optimizer's parameters among processes find out with trial steps whether the divided optimizer
makes the same steps as the whole optimizer.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

# Factors of the gradients of the trial's steps. Some optimizers mix parameters only if gradients are large, or after
# several steps in the same direction.
FACTORS = (1.0, 1.0, 1.0, 1.0, 1.0, 1e4, 1e-3)
FEW = 4  # Number of parameters that a trial takes from the beginning, and from the end, of each parameter group.
LARGEST_SIZE = 3  # Largest size of a dimension of a made-up parameter.
# Optimizers in torch.optim that update each element only from the gradients of this element. Parts of a tensor can
# therefore be updated separately.
_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop",
)  # fmt: skip
DECAY = 0.1  # Factor of a parameter's value in its gradient, so that gradients depend on the steps before.


def is_elementwise(optimizer_class: type[Optimizer]) -> bool:
    """Return whether an optimizer is known to update each element of a tensor independently of the other elements."""
    return any(optimizer_class is getattr(torch.optim, name) for name in _ELEMENTWISE)


@dataclass(frozen=True)
class OptimizerTrial:
    """A copy of an optimizer that has made-up parameters and no state.

    Attributes:
        optimizer: The copy.
        parameters: All made-up parameters of the trial. The copy may hold only some of these parameters.
        places: Indices of the parameters that the copy holds.
        directions: A tensor of the shape of each parameter. A step's gradients are computed from these tensors.
    """

    optimizer: Any
    parameters: list[nn.Parameter]
    places: list[int]
    directions: list[Tensor]

    def gradients(self, factor: float) -> list[Tensor]:
        """Return the gradients of a step for all parameters, at their current values."""
        return [
            factor * direction + DECAY * parameter.detach()
            for direction, parameter in zip(self.directions, self.parameters, strict=True)
        ]

    def step(self, factor: float) -> None:
        """Make a step with a gradient for each parameter."""

        def closure() -> Tensor:
            for parameter, gradient in zip(self.parameters, self.gradients(factor), strict=True):
                parameter.grad = gradient
            return torch.ones(())

        closure()  # Some optimizers read the gradients before they call the closure.
        with torch.enable_grad():
            self.optimizer.step(closure)

    def step_without_gradients(self) -> None:
        """Make a step in which no parameter has a gradient."""
        for parameter in self.parameters:
            parameter.grad = None
        with torch.enable_grad():
            self.optimizer.step(lambda: torch.ones(()))

    def values(self) -> dict[int, Tensor]:
        """Return a copy of the values of the parameters that the optimizer holds. The keys are indices."""
        return {place: self.parameters[place].detach().clone() for place in self.places}


def trial_of(
    optimizer: Optimizer,
    device: torch.device,
    is_held: Callable[[int], bool] = lambda place: True,
    dtype: torch.dtype = torch.float64,
) -> OptimizerTrial:
    """Return a copy of an optimizer with a few made-up parameters. Every call returns the same parameters.

    The optimizer itself and its parameters are not changed.

    Args:
        optimizer: The optimizer.
        device: Device of the made-up parameters.
        is_held: Whether the copy holds the parameter with an index. By default the copy holds all parameters.
        dtype: Dtype of the made-up parameters.
    """
    generator = torch.Generator().manual_seed(0)
    made: dict[int, Any] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        shape = [min(size, LARGEST_SIZE) for size in parameter.shape]
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        made[id(parameter)] = nn.Parameter(values.to(device, dtype))
    tried: Any = object.__new__(type(optimizer))
    # A learning-rate scheduler replaces `step` by a function that makes a step of the original optimizer.
    attributes = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state")}
    # Hooks may belong to objects of any size, such as the user's module.
    hooks = {name: type(value)() for name, value in attributes.items() if name.endswith("_hooks")}
    vars(tried).update(copy.deepcopy(attributes | hooks, dict(made)))
    tried.state = type(optimizer.state)(dict)
    chosen: list[nn.Parameter] = []
    for group in tried.param_groups:
        members = group["params"]
        group["params"] = members if len(members) <= 2 * FEW else [*members[:FEW], *members[-FEW:]]
        chosen += group["params"]
        if "lr" in group:
            group["lr"] = group.get("initial_lr", group["lr"]) or 1e-2  # The rate can be 0 at the start of a warm-up.
    places = {id(parameter): place for place, parameter in enumerate(chosen) if is_held(place)}
    for group in tried.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in places]
    getattr(tried, "train", lambda: None)()  # Schedule-free optimizers make steps only after this call.
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) for p in chosen]
    return OptimizerTrial(tried, chosen, list(places.values()), directions)


def values_after_steps(
    optimizer: Optimizer,
    device: torch.device,
    is_held: Callable[[int], bool] = lambda place: True,
    dtype: torch.dtype = torch.float64,
) -> dict[int, Tensor]:
    """Return the values of made-up parameters after some steps of a copy of an optimizer; see :func:`trial_of`."""
    trial = trial_of(optimizer, device, is_held, dtype)
    with torch.compiler.set_stance("force_eager"):  # Compilation would take much longer than the steps.
        for factor in FACTORS:
            trial.step(factor)
    return trial.values()


def values_of_all(optimizer: Optimizer, device: torch.device) -> tuple[torch.dtype, dict[int, Tensor]]:
    """Return the values of made-up parameters after steps of a copy that holds all of them, and their dtype.

    The dtype is float64, which shows small differences, or float32 if the optimizer fails with float64. The function
    sets the seed 0.
    """
    torch.manual_seed(0)
    try:
        return torch.float64, values_after_steps(optimizer, device)
    except Exception:
        return torch.float32, values_after_steps(optimizer, device, dtype=torch.float32)


def draws_random_numbers(
    optimizer: Optimizer, whole: dict[int, Tensor], device: torch.device, dtype: torch.dtype = torch.float64
) -> bool:
    """Return whether an optimizer's steps depend on torch's random numbers.

    Args:
        optimizer: The optimizer, which is not changed.
        whole: Result of :func:`values_after_steps` for a copy with all made-up parameters, with another seed than 1.
        device: Device of the made-up parameters.
        dtype: Dtype of the made-up parameters.
    """
    torch.manual_seed(1)
    return are_different(values_after_steps(optimizer, device, dtype=dtype), whole)


def removes_gradients(optimizer: Optimizer, device: torch.device, dtype: torch.dtype = torch.float64) -> bool:
    """Return whether a step of an optimizer leaves parameters without their gradients."""
    trial = trial_of(optimizer, device, dtype=dtype)
    with torch.compiler.set_stance("force_eager"):
        trial.step(1.0)
    return any(parameter.grad is None for parameter in trial.parameters)


def counters_of(
    optimizer: Optimizer, device: torch.device, dtype: torch.dtype = torch.float64
) -> dict[str, float | Tensor]:
    """Return the entries that an optimizer's first step adds to its parameter groups, such as the number of steps.

    Only numbers and tensors with one number count.

    Returns:
        The value 0 for each entry by name, as a number or tensor.
    """
    trial = trial_of(optimizer, device, dtype=dtype)
    before = [group.keys() | set() for group in trial.optimizer.param_groups]
    with torch.compiler.set_stance("force_eager"):
        trial.step(1.0)
    counters: dict[str, float | Tensor] = {}
    for known, group in zip(before, trial.optimizer.param_groups, strict=True):
        for name in group.keys() - known:
            value = group[name]
            if isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point():
                counters[name] = torch.zeros_like(value)
            elif type(value) in (int, float):
                counters[name] = type(value)()
    return counters


def mixes_parameters(
    optimizer: Optimizer, whole: dict[int, Tensor], device: torch.device, dtype: torch.dtype = torch.float64
) -> bool:
    """Return whether an optimizer's step of a parameter depends on other parameters or on their gradients.

    Two copies of the optimizer make steps with one half of the made-up parameters each.

    Args:
        optimizer: The optimizer, which is not changed.
        whole: Result of :func:`values_after_steps` for a copy with all made-up parameters.
        device: Device of the made-up parameters.
        dtype: Dtype of the made-up parameters.

    Raises:
        Exception: The optimizer fails with the made-up parameters.
    """
    halves = (values_after_steps(optimizer, device, is_held, dtype) for is_held in (_is_even, _is_odd))
    return any(are_different(half, whole) for half in halves)


def _is_even(place: int) -> bool:
    return place % 2 == 0


def _is_odd(place: int) -> bool:
    return place % 2 == 1


def are_different(values: dict[int, Tensor], expected: dict[int, Tensor]) -> bool:
    """Return whether values differ from the expected values with the same keys by more than rounding errors."""
    for place, value in values.items():
        resolution = torch.finfo(value.dtype).eps
        if not torch.allclose(value, expected[place], rtol=4096 * resolution, atol=4 * resolution, equal_nan=True):
            return True
    return False


def attribute_with_tensors(optimizer: Optimizer) -> str | None:
    """Return the name of an attribute in which an optimizer keeps tensors of parameters beside its state.

    Return None if there is no such attribute.
    """
    return next(
        (
            name
            for name, value in vars(optimizer).items()
            if name not in ("state", "param_groups") and _has_tensors(value)
        ),
        None,
    )


def _has_tensors(value: Any) -> bool:
    leaves: Sequence[Any] = tree_leaves(value)
    return any(isinstance(leaf, Tensor) and leaf.ndim and leaf.numel() for leaf in leaves)
