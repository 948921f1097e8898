"""Tests of the engine's order of work and memory: transfers and reductions start early, and memory is freed early."""

import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.gradients import GradientReducer
from tests.runner.ranks import run_ranks

MICROBATCHES = 4


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.Dropout(0.5),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(256, 5),
    )


def make_batch(size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(5, (size,), generator=generator)


def events_of_a_step(replicas: tuple[int, ...], cuts: list[str]) -> list[str]:
    """Return the events of a rank's second step, in order.

    In the first step, a rank learns the shapes of the messages.
    """
    events: list[str] = []

    def noted(function: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(" ".join([name, *(arg for arg in args if isinstance(arg, str))]))
            return function(*args, **kwargs)

        return call

    GradientReducer.ready = noted(GradientReducer.ready, "ready")  # type: ignore[method-assign]
    pipeline = Pipeline(make_network(), cuts, replicas, MICROBATCHES, bucket_bytes=100)
    images, targets = (tensor[pipeline.place.replica :: replicas[0]] for tensor in make_batch())
    pipeline.train(pipeline.share(images, targets), F.cross_entropy)
    batch = pipeline.share(images, targets)
    events.clear()
    pipeline.transport.receive = noted(pipeline.transport.receive, "expect")  # type: ignore[method-assign]
    pipeline.transport.send = noted(pipeline.transport.send, "send")  # type: ignore[method-assign]
    pipeline.reducer.finish = noted(pipeline.reducer.finish, "finish")  # type: ignore[method-assign]
    dist.all_reduce = noted(dist.all_reduce, "reduce")
    pipeline.train(batch, F.cross_entropy)
    pipeline.close()
    events.append("closed")
    torch.stack([parameter.sum() for parameter in pipeline.parameters]).sum().backward()
    return events


def test_a_microbatch_is_received_during_the_previous_microbatch() -> None:
    _, last = run_ranks(2, events_of_a_step, (1, 1), ["2"])
    for microbatch in range(MICROBATCHES - 1):
        expected = last.index(f"expect the activations of microbatch {microbatch + 1}")
        assert expected < last.index(f"send the gradients of microbatch {microbatch}")


def test_replicas_sum_gradients_while_the_last_backward_runs() -> None:
    for events in run_ranks(2, events_of_a_step, (2,), []):
        early = events[: events.index("finish")]
        assert early.count("reduce") == len(list(make_network().parameters()))
        assert events[-1] == "closed", "a closed pipeline leaves no hooks on the parameters"


class Meter:
    """A counter of the bytes that autograd has saved and not yet freed."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> "Saved":
        return Saved(self, tensor)


class Saved:
    def __init__(self, meter: Meter, tensor: Tensor) -> None:
        self.meter = meter
        self.tensor = tensor
        meter.now += tensor.nbytes
        meter.most = max(meter.most, meter.now)

    def __del__(self) -> None:
        self.meter.now -= self.tensor.nbytes


WAYS = [("1f1b", False, "never"), ("1f1b", True, "never"), ("gpipe", False, "never"), ("gpipe", False, "always")]


def peaks() -> list[tuple[int, int]]:
    """Return, for each way, the largest number of microbatches in flight and of bytes that autograd saved at once."""
    results = []
    for schedule, run_ahead, recompute in WAYS:
        layers = [nn.Sequential(nn.Conv2d(8 if i else 1, 8, 3, padding=1), nn.Tanh()) for i in range(6)]
        network = nn.Sequential(*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())).double()
        options: Any = {"schedule": schedule, "run_ahead": run_ahead, "activation_checkpointing": recompute}
        pipeline = Pipeline(network, ["1", "3"], (1, 1, 1), 8, **options)
        meter, in_flight, most_in_flight = Meter(), 0, 0

        def count(span: Any) -> None:
            nonlocal in_flight, most_in_flight
            in_flight += {"forward": 1, "backward": -1}.get(span.kind, 0)
            most_in_flight = max(most_in_flight, in_flight)

        pipeline.watchers.append(count)
        images, targets = make_batch(16)
        with torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda saved: saved.tensor):
            pipeline.step(images.double(), targets, F.cross_entropy)
        assert meter.now == 0, "a step leaves no activations behind"
        results.append((most_in_flight, meter.most))
    return results


def test_peak_memory_holds_only_the_microbatches_in_flight() -> None:
    microbatch = 2 * 8 * 64 * 8  # Bytes of one activation: 2 samples of 8 channels of 8 x 8.
    for stage, results in enumerate(run_ranks(3, peaks)):
        (held, saved), (ahead, _), (all_of_them, all_saved), (_, again) = results
        assert held == 3 - stage
        assert ahead == held + (stage < 2)
        assert all_of_them == 8
        # Two layers save their inputs and outputs. The constant covers the weights.
        assert saved <= held * 4.5 * microbatch + 40_000
        assert all_saved > 2 * saved or stage == 0
        assert again < all_saved / 3


class Turned(nn.Module):
    """A module that returns a tensor whose memory order differs from the order of its dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3)


def alive_at_once() -> int:
    """Return the largest number of the cut's activations that the first stage holds under gpipe, except sent copies."""
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), Turned(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, 5)
    )
    pipeline = Pipeline(network, ["1"], (1, 1), MICROBATCHES, schedule="gpipe")
    most = 0

    def look(_: Any) -> None:
        nonlocal most
        tensors = [tensor for tensor in gc.get_objects() if isinstance(tensor, Tensor) and tensor.shape == (2, 4, 8, 8)]
        most = max(most, sum(not tensor.is_contiguous() for tensor in tensors))

    pipeline.watchers.append(look)
    pipeline.step(*make_batch(), F.cross_entropy)
    return most


def test_sent_activations_are_not_kept_for_the_backward() -> None:
    first, _ = run_ranks(2, alive_at_once)
    assert first < MICROBATCHES


class Copies(TorchDispatchMode):
    """A counter of copies of activations into a different memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.count += func is torch.ops.aten.clone.default and result.ndim == 4
        return result


def channels_last() -> int:
    """Return the number of copies that a stage in channels_last format makes."""
    last = nn.Sequential(nn.Conv2d(4, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), last)
    pipeline = Pipeline(network.to(memory_format=torch.channels_last), ["1"], (1, 1), MICROBATCHES)
    images, targets = make_batch()
    batch = pipeline.share(images.to(memory_format=torch.channels_last), targets)
    with Copies() as copies:
        pipeline.train(batch, F.cross_entropy)
    return copies.count


def test_channels_last_is_kept_over_a_cut() -> None:
    assert run_ranks(2, channels_last) == [0, 0], "activations are sent and received in their memory order"
