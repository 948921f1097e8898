"""Staging for a worker whose parameters are on a GPU: although copies happen late, the right values are used."""

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
import torch

from cnnstrategies.paramserver.drivers.staging import StagedCopies
from tests.paramserver.roles import PlainRoles
from tests.runner.ranks import run_apart
from tests.runner.simulated_cuda import simulate

STEPS = 5


def train(folder: Path) -> None:
    """Train one parameter that is cut into slices, and two that share a slice."""
    with (
        nullcontext() if Path("/dev/nvidia0").exists() else simulate(),
        PlainRoles(folder, sizes=(3000, 7, 5), workers=1, servers=2, slice_bytes=4096) as cluster,
    ):
        start = [torch.arange(1.0, parameter.numel() + 1) for parameter in cluster.parameters]
        values = [first.cuda() for first in start]
        worker = cluster.connect(0, values)
        worker.initialise()
        worker.join()
        expected = [first.clone().requires_grad_() for first in start]
        optimizer = torch.optim.SGD(expected, lr=0.5, momentum=0.5)
        for step in range(STEPS):
            if step % 2:
                worker.wait(0)  # `begin_step` waits for the other parameters.
                assert torch.allclose(values[0].cpu(), expected[0]), step
            worker.begin_step(cluster.options, 1)
            for index in (2, 1, 0):
                worker.push(index, values[index] / 8)
            worker.end_step()
            for parameter in expected:
                parameter.grad = parameter.detach() / 8
            optimizer.step()
        worker.wait_all()
        assert all(torch.allclose(value.cpu(), last) for value, last in zip(values, expected, strict=True))
        values[0].zero_()
        worker.refresh()
        assert torch.allclose(values[0].cpu(), expected[0])


def test_training_on_a_device_equals_training_on_the_host(tmp_path: Path) -> None:
    """Use a GPU if the machine has one, else a simulated GPU that copies late. Gradients depend on the values there."""
    run_apart(train, tmp_path)


@pytest.mark.light
def test_computing_and_copying_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the calls to torch.cuda in order: the computing stream makes the gradients and uses the values."""
    cuda = MagicMock()
    monkeypatch.setattr(torch, "cuda", cuda)
    copies = StagedCopies(torch.device("cuda:0"))
    copies.before_use(copies.begin(cuda.target, torch.ones(1)))
    side, computing, event = cuda.Stream(), cuda.current_stream(), cuda.Event()
    calls = [recorded for recorded in cuda.mock_calls if "." in recorded[0]]
    assert calls == [
        call.Stream().wait_stream(computing),
        call.stream().__enter__(),
        call.target.copy_(torch.ones(1), non_blocking=True),
        call.stream().__exit__(None, None, None),
        call.Event().record(side),
        call.current_stream().wait_event(event),
    ]
