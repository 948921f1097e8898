"""Optimizers of torch update slices exactly as they update whole parameters, including the optimizer's state."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.paramserver.optimizer_state import cut_state, join_state, pack_state, unpack_state
from cnnstrategies.paramserver.optimizers import FusedOptimizer
from cnnstrategies.paramserver.server.store import Store
from cnnstrategies.paramserver.slicing import Slice, cut
from cnnstrategies.paramserver.specification import Specification

SHAPES = [(40, 5), (7,), (3, 1, 2, 2)]


def flat(slice_: Slice, tensors: Sequence[Tensor | None]) -> Tensor:
    """Return a slice of some parameters' values or gradients, with zeros where a tensor is None."""
    tensors_of_parts = [(part, tensors[part.parameter]) for part in slice_.parts]
    return torch.cat(
        [
            torch.zeros(part.numel) if tensor is None else tensor.flatten()[part.start : part.stop]
            for part, tensor in tensors_of_parts
        ]
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), ("Adam", {"amsgrad": True}), ("AdamW", {}),
        ("Adamax", {}), ("NAdam", {}), ("RAdam", {}), ("RMSprop", {"momentum": 0.5, "centered": True}),
        ("Adagrad", {}), ("Adadelta", {}), ("ASGD", {}), ("Rprop", {}), ("Adafactor", {}),
    ],
)  # fmt: skip
def test_slices_are_updated_as_whole_parameters_are(name: str, options: dict[str, Any]) -> None:
    """Use two parameters that share a slice. One has no gradient in some steps, so it and its state must not change."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = getattr(torch.optim, name)(parameters, **options)
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    specification = Specification.of(named, optimizer, 1, slice_bytes=128)
    slices = cut(specification)
    stores = [Store(specification, slices), Store(specification, slices)]
    store = stores[0]

    def fill(store: Store) -> None:
        for slice_ in slices:
            store.put(slice_.key, flat(slice_, [parameter.detach() for parameter in parameters]), 0)

    fill(store)
    hyper = [group.options for group in specification.groups]
    for step in range(8):
        if step == 3:  # Move the state through a plain state dict to another server.
            state = join_state(specification, slices, {s.key: store.state(s.key) for s in slices}, hyper)
            assert state["param_groups"] == optimizer.state_dict()["param_groups"]
            store = stores[1]
            fill(store)
            for key, slice_state in cut_state(specification, slices, state).items():
                store.set_state(key, unpack_state(memoryview(pack_state(slice_state)), slices[key]))
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape)
        if step in (0, 2, 5):
            parameters[1].grad = None
        gradients = [parameter.grad for parameter in parameters]
        for slice_ in slices:
            present = [gradients[part.parameter] is not None for part in slice_.parts]
            absent = sum(1 << place for place, has_gradient in enumerate(present) if not has_gradient)
            store.apply(slice_.key, flat(slice_, gradients) if any(present) else None, hyper, absent)
        optimizer.step()
    for slice_ in slices:
        whole = flat(slice_, [parameter.detach() for parameter in parameters])
        torch.testing.assert_close(store.values[slice_.key].flatten(), whole)


def shared(name: str, **options: Any) -> tuple[FusedOptimizer, list[nn.Parameter]]:
    """Return an optimizer of two parameters, and the parameters."""
    parameters = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    return FusedOptimizer(getattr(torch.optim, name), [(parameters, {"lr": 0.5, **options})]), parameters


def test_fused_optimizers_are_used_unless_the_user_chooses() -> None:
    for name in ("SGD", "Adam", "AdamW", "Adagrad"):
        for options, expected in (({}, True), ({"fused": None, "foreach": None}, True), ({"fused": False}, False)):
            optimizer, (parameter, _) = shared(name, **options)
            optimizer.step([(parameter, torch.ones(3, dtype=torch.float64))], [{"lr": 0.5, **options}])
            assert (optimizer.optimizer.param_groups[0]["fused"] is True) == expected, (name, options)


def test_first_and_later_gradients_may_come_together() -> None:
    """Give a parameter its first gradient after others: torch's fused SGD takes only first or only later gradients."""
    together, expected = shared("SGD", momentum=0.9), shared("SGD", momentum=0.9, foreach=False)
    gradient = torch.arange(3.0, dtype=torch.float64)
    for optimizer, (first, second) in (together, expected):
        optimizer.step([(first, gradient)], [{}])
        optimizer.step([(first, gradient), (second, gradient + 1)], [{}])
    for got, value in zip(together[1], expected[1], strict=True):
        torch.testing.assert_close(got, value, rtol=1e-14, atol=0)
