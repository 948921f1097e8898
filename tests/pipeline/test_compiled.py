"""Tests of recomputed stages: compiled or not, they train the same values, and they are compiled once for each size."""

import importlib
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnnstrategies.pipeline.engine import Pipeline
from tests.runner.ranks import run_ranks


class Network(nn.Module):
    """A network that a compiler could get wrong, with layers that run twice, in-place operations and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.twice, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.last = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(256, 5))

    def forward(self, images: Tensor) -> Tensor:
        first = self.first(images)
        out: Tensor = self.last(self.norm(self.twice(self.norm(self.twice(first)).relu_())) + first)
        return out


class Trained(NamedTuple):
    """Result of a training on one rank.

    Attributes:
        values: Outputs, evaluated outputs and weights by name.
        sizes: Sizes of the microbatches that the rank trained.
        compilations: Number of compiled frames.
        breaks: Number of graph breaks.
    """

    values: dict[str, Tensor]
    sizes: set[int]
    compilations: int
    breaks: int


def train(replicas: tuple[int, ...], batches: Sequence[int], backend: str | None, recompute: Any) -> Trained:
    torch.manual_seed(0)
    network = Network().double()
    values: dict[str, Tensor] = {}
    sizes = set()
    with Pipeline(
        network, ["first"], replicas, 4, activation_checkpointing=recompute, compile_backend=backend
    ) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters, lr=0.1, momentum=0.9)
        stage, replica = pipeline.place.stage, pipeline.place.replica
        torch.manual_seed(2)
        for step, size in enumerate(batches):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(size, 1, 8, 8, generator=generator).double()[replica :: replicas[0]]
            targets = torch.randint(5, (size,), generator=generator)[replica :: replicas[0]]
            batch = pipeline.share(images, targets)
            sizes |= set(batch.split.sizes[replica :: replicas[stage]])
            gradients, outputs = pipeline.train(batch, F.cross_entropy)
            values[f"outputs {step}"] = pipeline.gather(batch, outputs)
            for parameter, gradient in zip(pipeline.parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        pipeline.module.eval()
        batch = pipeline.share(images)
        values["evaluation"] = pipeline.gather(batch, pipeline.evaluate(batch))
        values |= pipeline.merge()
    compiler: Any = sys.modules.get("torch._dynamo")  # A process that compiles nothing does not import it.
    counters = compiler.utils.counters if compiler else defaultdict(Counter[str])
    return Trained(values, sizes, counters["frames"]["total"], sum(counters["graph_break"].values()))


def both(replicas: tuple[int, ...], batches: Sequence[int], backend: str | None) -> tuple[Trained, Trained]:
    return train(replicas, batches, None, "never"), train(replicas, batches, backend, "except_last")


# The four microbatches of a batch have 3 samples each, or 3 and 2.
@pytest.mark.parametrize(
    ("backend", "batches"),
    [pytest.param("aot_eager", (10, 12), marks=pytest.mark.cluster), (None, (12,))],  # Compiling takes 20 s.
)
def test_recomputed_stages_train_the_same_values(backend: str | None, batches: Sequence[int]) -> None:
    """Recomputations draw the same random numbers, also in compiled stages."""
    if backend:
        # Forked ranks inherit the import, which takes seconds.
        importlib.import_module("torch._inductor.pattern_matcher")

    for expected, again in run_ranks(2, both, (1, 1), batches, backend):
        torch.testing.assert_close(again.values, expected.values, rtol=1e-12, atol=1e-14)
        sizes = len(again.sizes) + 1 if backend else 0
        assert again.compilations == sizes, "a stage is compiled once for each size and once for evaluation"
        assert expected.compilations == again.breaks == 0
