"""A worker whose parameters are on a GPU, which copies late: what is sent and what is used is what was meant."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from late_copies import LateCopies
from ranks import run_apart
from roles import PlainRoles
from simulated_cuda import simulate

from cnnstrategies.paramserver.drivers import staging
from cnnstrategies.paramserver.drivers.staging import Copies, Staging, staging_for

STEPS = 5


def train(folder: Path) -> None:
    """One parameter is cut into slices, two share one."""
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
                worker.wait(0)  # The others are waited for with all.
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
    """On a GPU where there is one, else on one that copies late: the gradient is made of the values that are there."""
    run_apart(train, tmp_path)


@pytest.mark.light
def test_a_gradient_is_sent_once_its_own_copy_is_over(tmp_path: Path) -> None:
    parameters = [torch.zeros(3), torch.zeros(2)]
    copies = LateCopies()
    staged = Staging(parameters, copies)
    for index, parameter in enumerate(parameters):
        staged.fetch(index, torch.full_like(parameter, index + 1))
    assert list(staged.fetched()) == list(staged.fetched()) == []
    ((index, gradient),) = staged.fetched()
    assert (index, gradient.tolist()) == (0, [1, 1, 1])
    ((index, gradient),) = staged.fetched(wait=True)
    assert (index, gradient.tolist()) == (1, [2, 2])


@pytest.mark.light
def test_the_gpu_copies_what_was_told_and_uses_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would be told, in order."""
    told: list[str] = []

    class Stream:
        def __init__(self, name: object = "side") -> None:
            self.name = name if isinstance(name, str) else "side"

        def wait_stream(self, other: "Stream") -> None:
            told.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: "Event") -> None:
            told.append(f"{self.name} waits for the copy")

        def __enter__(self) -> None:
            told.append(f"on {self.name}")

        def __exit__(self, *args: object) -> None:
            told.append("end")

    class Event:
        def record(self, stream: Stream) -> None:
            told.append(f"recorded on {stream.name}")

    class Target:
        def copy_(self, source: object, non_blocking: bool) -> None:
            told.append(f"copy, {non_blocking=}")

    for name, fake in (("Stream", Stream), ("Event", Event), ("stream", lambda stream: stream)):
        monkeypatch.setattr(staging.torch.cuda, name, fake)
    monkeypatch.setattr(staging.torch.cuda, "current_stream", lambda device: Stream("computing"))
    copies = Copies(torch.device("cuda:0"))
    event = copies.begin(Target(), torch.ones(1))  # type: ignore[arg-type]
    copies.before_use(event)
    assert told == [
        *("side waits for computing", "on side", "copy, non_blocking=True", "end", "recorded on side"),
        "computing waits for the copy",
    ]


@pytest.mark.light
def test_parameters_of_the_host_are_not_staged() -> None:
    assert staging_for([torch.zeros(2)]) is None
