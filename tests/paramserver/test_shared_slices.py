"""Slices are balanced, and small parameters in a shared slice train as with slices of their own.

This includes parameters that have no gradient in some steps.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.paramserver.compression import COMPRESSIONS, as_bytes, payload_names
from cnnstrategies.paramserver.messages import Encoding, InvalidMessageError
from cnnstrategies.paramserver.server.pushes import Pushes
from cnnstrategies.paramserver.slicing import MOST_SHARED, SHARED_BYTES, Slice, cut
from cnnstrategies.paramserver.specification import Specification
from tests.paramserver.roles import PlainRoles
from tests.paramserver.training import specify

pytestmark = pytest.mark.light
SIZES = (40, 3, 5, 2, 400)
STEPS = 8


def has_gradient(index: int, step: int) -> bool:
    """Whether a parameter has a gradient in a step.

    The fourth parameter has none in the first steps, other parameters lack one now and then, and in step 5 no small
    parameter has one.
    """
    return step >= 3 if index == 3 else (step + index) % 4 != 0 and not (step == 5 and index < 4)


def gradient(index: int, step: int) -> Tensor:
    return torch.linspace(-1, 1, SIZES[index]) * (1 + index) + 0.1 * step


def gradients(step: int) -> list[Tensor | None]:
    return [gradient(index, step) if has_gradient(index, step) else None for index in range(len(SIZES))]


def train_in_one_process(run: PlainRoles) -> tuple[list[Tensor], dict[str, Any]]:
    """Train in one process; return the values and the optimizer's state dict."""
    optimizer = torch.optim.SGD(run.parameters, lr=0.5, momentum=0.5)
    for step in range(STEPS):
        for parameter, tensor in zip(run.parameters, gradients(step), strict=True):
            parameter.grad = tensor
        optimizer.step()
    return [parameter.detach() for parameter in run.parameters], optimizer.state_dict()


@pytest.mark.parametrize("options", [{"mode": "async"}, {"clip_norm": 1e6}, {"compression": "fp16"}], ids=str)
def test_training_equals_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    """Let a backup take over in the middle, after steps in which some parameters had no gradient."""
    with PlainRoles(tmp_path, SIZES, servers=2, replication=2, slice_bytes=512, **options) as run:
        assert [len(slice_.parts) for slice_ in cut(run.specification)] == [4, 1, 1, 1, 1]
        worker, values = run.joined()
        for step in range(STEPS):
            if step == 6:
                run.lose(cut(run.specification)[0].servers[0])
            run.step(
                worker, [gradient(index, step) if has_gradient(index, step) else None for index in range(len(SIZES))]
            )
        state = worker.optimizer_state()
        expected, expected_state = train_in_one_process(run)
    tolerance: dict[str, Any] = {"rtol": 1e-3, "atol": 2e-3} if "compression" in options else {}
    for value, right in zip(values, expected, strict=True):
        torch.testing.assert_close(value, right, **tolerance)
    assert state["state"].keys() == expected_state["state"].keys()
    for index, entry in expected_state["state"].items():
        torch.testing.assert_close(state["state"][index]["momentum_buffer"], entry["momentum_buffer"], **tolerance)


def test_a_parameter_is_left_unchanged_only_if_no_worker_has_a_gradient() -> None:
    shared = cut(specify({"name": "SGD", "lr": 0.1}, 2))[0]
    assert len(shared.parts) == 4, "the slice holds three biases and a small weight"
    payload = memoryview(as_bytes(torch.ones(shared.numel, dtype=torch.float64)))
    pushes = Pushes()
    workers = [(worker, 0) for worker in range(3)]
    pushes.add(workers[0], shared, payload, Encoding.DENSE, 0b011)
    assert pushes.absent(shared.key, workers) == 0b011
    pushes.add(workers[1], shared, payload, Encoding.DENSE, 0b110)
    pushes.add(workers[2], shared, memoryview(b""), Encoding.NOTHING)
    assert pushes.absent(shared.key, workers) == 0b010, "a worker that pushes nothing has no gradient of any part"
    assert pushes.absent(shared.key, workers[:1]) == 0b011, "pushes of workers outside the step do not count"
    for wrong in (0b1111, 0b10000, -1):
        with pytest.raises(InvalidMessageError, match="the bits that mark parts without a gradient do not fit"):
            Pushes().add(workers[0], shared, payload, Encoding.DENSE, wrong)


SHAPES = [(100, 50), (7,), (), (3, 1000), (64, 3, 3, 3)]


def of_shapes(shapes: Sequence[tuple[int, ...]] = SHAPES, **options: Any) -> Specification:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    return Specification.of(named, torch.optim.SGD(parameters, lr=0.1), 1, **options)


def loads(slices: tuple[Slice, ...], servers: int) -> list[int]:
    return [sum(slice_.nbytes for slice_ in slices if slice_.servers[0] == server) for server in range(servers)]


def test_slices_cover_every_element_once_and_are_balanced() -> None:
    specification = of_shapes(servers=3, slice_bytes=1024, replication=2)
    slices = cut(specification)
    assert [slice_.key for slice_ in slices] == list(range(len(slices)))
    for index, parameter in enumerate(specification.parameters):
        parts = [part for slice_ in slices for part in slice_.parts if part.parameter == index]
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
        assert parts[-1].stop == parameter.numel
    assert all(slice_.nbytes <= 1024 and len(set(slice_.servers)) == 2 for slice_ in slices)
    assert max(loads(slices, 3)) - min(loads(slices, 3)) <= 1024
    assert cut(Specification.from_json(specification.to_json())) == slices
    assert loads(cut(of_shapes([(10,), (10,), (20,)], servers=2)), 2) == [80, 80], "the largest slice is placed first"


def test_small_parameters_share_a_slice_unless_the_compression_is_lossy() -> None:
    """Check all compressions: what a lossy one leaves out of a parameter waits for the parameter's next gradient."""
    shared = cut(of_shapes([(10_000,)] * 100))
    assert all(slice_.numel * 4 <= SHARED_BYTES for slice_ in shared)
    assert len(shared) == -(-100 // 6), "six parameters of 40 kB share a slice"
    assert len(cut(of_shapes([(100,)] * 100, servers=4))) >= 16, "each server has several slices"
    for name in (*payload_names(), "auto"):
        lossy = name == "auto" or COMPRESSIONS[name].lossy
        assert ({len(slice_.parts) for slice_ in cut(of_shapes(compression=name))} == {1}) == lossy


def test_a_shared_slice_has_one_group_and_few_parts_and_bytes() -> None:
    small = [nn.Parameter(torch.zeros(1 + index % 8)) for index in range(400)]
    large = nn.Parameter(torch.zeros(100, 100))
    named = [(str(index), parameter) for index, parameter in enumerate((*small, large))]
    groups = [{"params": small[::2], "lr": 0.1}, {"params": [*small[1::2], large], "lr": 0.2}]
    specification = Specification.of(named, torch.optim.SGD(groups), 1, slice_bytes=256)
    shared = [slice_.parts for slice_ in cut(specification) if len(slice_.parts) > 1]
    assert sum(len(parts) for parts in shared) == len(small)
    assert all(len({part.parameter % 2 for part in parts}) == 1 for parts in shared)
    assert all(4 * sum(part.numel for part in parts) <= 256 for parts in shared)
    single = Specification.of(named, torch.optim.SGD(groups), 1)
    assert max(len(slice_.parts) for slice_ in cut(single)) == MOST_SHARED
