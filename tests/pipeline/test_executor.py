"""What runs again is what ran before, and what can start early does."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.gradients import GradientReducer
from cnnstrategies.pipeline.timetable import CHECKPOINTING

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


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(5, (8,), generator=generator)


def gradients(recompute: Any, half: bool) -> tuple[list[Tensor], Any]:
    """This stage's gradients, and the outputs."""
    images, targets = make_batch()
    network = make_network()
    if not half:
        network, images = network.double(), images.double()
    pipeline = Pipeline(network, ["2"], (1, 1), MICROBATCHES, activation_checkpointing=recompute)
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        batch = pipeline.share(images, targets)
        found, outputs = pipeline.train(batch, F.cross_entropy)
        return [gradient for gradient in found if gradient is not None], pipeline.gather(batch, outputs)


def all_gradients(half: bool) -> dict[str, tuple[list[Tensor], Any]]:
    return {recompute: gradients(recompute, half) for recompute in CHECKPOINTING}


@pytest.mark.parametrize("half", [False, True], ids=["float64", "bf16"])
def test_a_forward_that_runs_again_is_the_same(half: bool) -> None:
    """It draws the same random numbers, and in lower precision it has weights that gradients reach."""
    for results in run_ranks(2, all_gradients, half):
        expected, outputs = results["never"]
        assert outputs.dtype == (torch.bfloat16 if half else torch.float64)
        for recompute, (found, _) in results.items():
            assert len(found) == len(expected) > 0
            for got, wanted in zip(found, expected, strict=True):
                assert (got - wanted).norm() <= (1e-5 if half else 1e-10) * wanted.norm(), recompute


def events_of_a_step(replicas: tuple[int, ...], cuts: list[str]) -> list[str]:
    """What a rank's second step does, in order; in the first one it learns what messages look like."""
    images, targets = make_batch()
    pipeline = Pipeline(make_network(), cuts, replicas, MICROBATCHES, bucket_bytes=100)
    events: list[str] = []

    def noted(function: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(" ".join([name, *(arg for arg in args if isinstance(arg, str))]))
            return function(*args, **kwargs)

        return call

    part = slice(pipeline.place.replica, None, replicas[0])
    for _ in range(2):
        pipeline.step(images[part], targets[part], F.cross_entropy)
        if not events:
            pipeline.transport.receive = noted(pipeline.transport.receive, "expect")  # type: ignore[method-assign]
            pipeline.transport.send = noted(pipeline.transport.send, "send")  # type: ignore[method-assign]
            pipeline.reducer.finish = noted(GradientReducer.finish.__get__(pipeline.reducer), "finish")  # type: ignore[method-assign]
            dist.all_reduce = noted(dist.all_reduce, "reduce")
    return events


def test_a_microbatch_is_received_during_the_one_before() -> None:
    _, last = run_ranks(2, events_of_a_step, (1, 1), ["2"])
    for microbatch in range(MICROBATCHES - 1):
        expected = last.index(f"expect the activations of microbatch {microbatch + 1}")
        assert expected < last.index(f"send the gradients of microbatch {microbatch}")
    for microbatch in range(MICROBATCHES - 3):
        expected = last.index(f"expect the activations of microbatch {microbatch + 3}")
        assert expected < last.index(f"send the gradients of microbatch {microbatch + 1}"), "also of a stage ahead"


def test_replicas_add_up_gradients_while_the_last_backward_runs() -> None:
    for events in run_ranks(2, events_of_a_step, (2,), []):
        early = events[: events.index("finish")]
        assert early.count("reduce") == len(list(make_network().parameters())) + 2, "and targets and loss"


def reductions(steps: int) -> tuple[int, int]:
    """How often a replica reduces gradients in accumulated steps after the first ones; hooks left at the end."""
    images, targets = make_batch()
    network = make_network()
    handles, register = [], Tensor.register_post_accumulate_grad_hook

    def registered(parameter: Tensor, hook: Any) -> Any:
        handles.append(register(parameter, hook))
        return handles[-1]

    Tensor.register_post_accumulate_grad_hook = registered  # type: ignore[method-assign]
    pipeline = Pipeline(network, [], (2,), MICROBATCHES)
    part = slice(pipeline.place.replica, None, 2)
    count, reduce = 0, dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += bool(tensor.ndim and tensor.is_floating_point())  # Targets and losses are not.
        return reduce(tensor, *args, **options)

    for step in range(3 * steps):
        if step == steps:
            dist.all_reduce = counted
            hooks = len(handles)
        pipeline.step(images[part], targets[part], F.cross_entropy, more=(step + 1) % steps > 0)
    dist.all_reduce = reduce
    pipeline.close()
    assert len(handles) == hooks > 0, "they are made once, with the buckets"
    return count, sum(handle.id in (handle.hooks_dict_ref() or ()) for handle in handles)


def test_accumulated_steps_are_reduced_once_by_hooks_made_once() -> None:
    for reduced, left in run_ranks(2, reductions, 3):
        assert reduced == 2, "once for each of the two optimizer steps"
        assert left == 0, "parameters outlive their pipeline without its hooks"


class Turned(nn.Module):
    """Returns what lies in another order than that of its dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(2, 3)


def alive_at_once() -> int:
    """Most tensors of the cut's shape that a first stage under gpipe holds beside those that are on the wire."""
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), Turned(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, 5)
    )
    pipeline = Pipeline(network, ["1"], (1, 1), MICROBATCHES, schedule="gpipe")
    most = 0

    def look(_: Any) -> None:
        nonlocal most
        own = [one for one in gc.get_objects() if isinstance(one, Tensor) and one.shape == (2, 4, 8, 8)]
        most = max(most, sum(not one.is_contiguous() for one in own))

    pipeline.watchers.append(look)
    pipeline.step(*make_batch(), F.cross_entropy)
    return most


def test_what_a_stage_has_sent_is_not_held_for_its_backward() -> None:
    first, _ = run_ranks(2, alive_at_once)
    assert first < MICROBATCHES


class Order(nn.Identity):
    """Looks at the order in memory of what passes, forward and back."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[bool] = []
        self.backwards: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.forwards.append(is_channels_last(x))
        x.register_hook(lambda gradient: self.backwards.append(is_channels_last(gradient)))
        return x * 2


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


class Copies(TorchDispatchMode):
    """Counts copies of activations into another order."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.count += func is torch.ops.aten.clone.default and result.ndim == 4
        return result


def channels_last(last: bool) -> tuple[list[bool], list[bool], int, list[Tensor | None]]:
    """Whether what enters the second stage, and what comes back from it, lies so; copies made; the gradients."""
    torch.manual_seed(0)
    before, after = Order(), Order()
    layers = [nn.Conv2d(1, 4, 3, padding=1), before, after, nn.Flatten(), nn.Linear(256, 5)]
    network = nn.Sequential(*layers).double()
    format_ = torch.channels_last if last else torch.contiguous_format
    pipeline = Pipeline(network.to(memory_format=format_), ["1"], (1, 1), MICROBATCHES)
    images, targets = make_batch()
    batch = pipeline.share(images.double().to(memory_format=format_), targets)
    with Copies() as copies:
        found, _ = pipeline.train(batch, F.cross_entropy)
    return after.forwards, before.backwards, copies.count, found


def test_channels_last_is_kept_over_a_cut() -> None:
    (_, backwards, copies, gradients), (forwards, _, _, _) = run_ranks(2, channels_last, True)
    assert forwards == backwards == [True] * MICROBATCHES
    assert copies == 0, "it is sent as it lies"
    (_, backwards, _, expected), (forwards, _, _, _) = run_ranks(2, channels_last, False)
    assert forwards == backwards == [False] * MICROBATCHES
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
