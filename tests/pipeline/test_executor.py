"""What runs again is what ran before, and what can start early does."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

from cnnstrategies.pipeline import gradients as gradients_module
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.gradients import GradientReducer
from cnnstrategies.pipeline.recompute import CHECKPOINTING

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


def test_a_microbatch_is_received_while_the_one_before_it_is_computed() -> None:
    _, last = run_ranks(2, events_of_a_step, (1, 1), ["2"])
    for microbatch in range(MICROBATCHES - 1):
        expected = last.index(f"expect the activations of microbatch {microbatch + 1}")
        assert expected < last.index(f"send the gradients of microbatch {microbatch}")


def test_replicas_add_up_gradients_while_the_last_backward_runs() -> None:
    for events in run_ranks(2, events_of_a_step, (2,), []):
        early = events[: events.index("finish")]
        assert early.count("reduce") == len(list(make_network().parameters())) + 1, "each gradient, and the loss"


def reductions(steps: int) -> tuple[list[str], int, int]:
    """What a replica reduces in accumulated steps; buckets made after the first step, and hooks left at the end."""
    images, targets = make_batch()
    network = make_network()
    pipeline = Pipeline(network, [], (2,), MICROBATCHES)
    part = slice(pipeline.place.replica, None, 2)
    events: list[str] = []
    reduce = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        events.append("gradients" if tensor.ndim else "loss")
        return reduce(tensor, *args, **options)

    made, bucket = 0, gradients_module.Bucket

    def counted(*args: Any) -> Any:
        nonlocal made
        made += 1
        return bucket(*args)

    for step in range(3 * steps):
        if step == steps:
            dist.all_reduce = noted
            gradients_module.Bucket = counted  # type: ignore[assignment,misc]
        pipeline.step(images[part], targets[part], F.cross_entropy, more=(step + 1) % steps > 0)
    dist.all_reduce = reduce
    del pipeline
    gc.collect()
    left = sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in network.parameters())
    return events, made, left


def test_accumulated_steps_are_reduced_once_in_buckets_that_are_made_once() -> None:
    for events, made, left in run_ranks(2, reductions, 3):
        assert events.count("gradients") == 2, "once for each of the two optimizer steps"
        assert made == 0
        assert left == 0, "parameters outlive their pipeline without its hooks"
