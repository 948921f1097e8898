"""A worker whose parameters are on a GPU, which copies late: what is sent and what is used is what was meant."""

from pathlib import Path

import pytest
import torch
from late_copies import LateCopies
from roles import PlainRoles, join

from cnnstrategies.paramserver import api
from cnnstrategies.paramserver.drivers import staging
from cnnstrategies.paramserver.drivers.staging import CudaCopies, Staging, staging_for

STEPS = 5


@pytest.mark.light
def test_training_on_a_device_equals_training_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is made of the values that are there; one parameter is cut into slices, two share one."""
    copies = LateCopies()
    monkeypatch.setattr(api, "staging_for", lambda parameters: Staging(parameters, copies))
    with PlainRoles(tmp_path, sizes=(3000, 7, 5), workers=1, servers=2, slice_bytes=4096) as cluster:
        worker, values = cluster.worker()
        start = [torch.arange(value.numel()).to(value) + 1 for value in values]
        for value, first in zip(values, start, strict=True):
            value.copy_(first)
        worker.initialise()
        worker.join()
        expected = [first.clone().requires_grad_() for first in start]
        optimizer = torch.optim.SGD(expected, lr=0.5, momentum=0.5)
        for step in range(STEPS):
            gradients = []
            for index, value in enumerate(values):
                if index or step % 2:
                    worker.wait(index)  # The other is waited for with all.
                    copies.compute()
                    assert torch.allclose(value, expected[index]), (step, index)
                gradients.append(value / 8)
            worker.begin_step(cluster.options, 1)
            copies.compute()
            gradients[0] = values[0] / 8
            for index in (2, 1, 0):
                worker.push(index, gradients[index])
            worker.end_step()
            for parameter in expected:
                parameter.grad = parameter.detach() / 8
            optimizer.step()
        worker.wait_all()
        copies.compute()
        for value, last in zip(values, expected, strict=True):
            assert torch.allclose(value, last)
        values[0].zero_()
        worker.refresh()
        copies.compute()
        assert torch.allclose(values[0], expected[0])


@pytest.mark.light
def test_a_gradient_is_sent_when_its_copy_is_over_and_the_others_are_not_waited_for(tmp_path: Path) -> None:
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
def test_the_gpu_copies_after_what_it_was_told_and_uses_after_it_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
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
    copies = CudaCopies(torch.device("cuda:0"))
    event = copies.begin(Target(), torch.ones(1))  # type: ignore[arg-type]
    copies.before_use(event)
    assert told == [
        *("side waits for computing", "on side", "copy, non_blocking=True", "end", "recorded on side"),
        "computing waits for the copy",
    ]


@pytest.mark.light
def test_parameters_of_the_host_are_not_staged() -> None:
    assert staging_for([torch.zeros(2)]) is None


@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no GPU here")
def test_training_on_a_gpu_equals_training_on_the_host(tmp_path: Path) -> None:
    with PlainRoles(tmp_path, sizes=(300_000, 7), workers=1, servers=2) as cluster:
        values = [torch.ones(parameter.shape, device="cuda") for parameter in cluster.parameters]
        worker = cluster.connect(0, values)
        join([worker])
        expected = [value.cpu().requires_grad_() for value in values]
        optimizer = torch.optim.SGD(expected, lr=0.5, momentum=0.5)
        for _ in range(STEPS):
            worker.begin_step(cluster.options, 1)
            for index in (1, 0):
                worker.push(index, values[index] / 8)
            worker.end_step()
            for parameter in expected:
                parameter.grad = parameter.detach() / 8
            optimizer.step()
        worker.wait_all()
        for value, last in zip(values, expected, strict=True):
            assert torch.allclose(value.cpu(), last)
