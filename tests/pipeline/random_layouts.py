"""Train random networks under random layouts, with ranks as threads, and compare with one process in float64.

`make test` tries a few layouts. For more, run `python -m tests.pipeline.random_layouts 2000`, or
`make fuzz-pipeline N=2000`.
"""

import argparse
import copy
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.timetable import CHECKPOINTING, ORDERS, SCHEDULES, Placement
from cnnstrategies.pipeline.tracing import cut_positions, trace
from cnnstrategies.shares.dealing import deal
from tests.pipeline.rank_threads import World, divided_once

STEPS = 2
FIXED = [(1, 3), (3, 2), (2, 1, 3), (1, 4, 2), (4, 1, 1), (1, 1, 1, 1), (2, 3, 1, 2), (3, 1), (2, 1, 3, 1), (8, 24)]


@dataclass(frozen=True)
class Case:
    """A layout of the pipeline and the options of its trial.

    Attributes:
        replicas: Number of replicas of each stage.
        microbatches: Number of microbatches of a step.
        rows: For each step, the number of samples of each replica of the first stage.
        schedule: ``gpipe`` or ``1f1b``.
        recompute: Option ``activation_checkpointing``.
        backend: Backend that ``torch.distributed`` reports to the engine.
        bucket_bytes: Size of the buckets in which gradients are summed.
        seed: Seed of the network, the cuts and the batches.
        placement: Numbering of the ranks.
        run_ahead: Whether stages hold one microbatch more than they need.
        shares: Share of the microbatches of each rank in the first step. The second step has different shares.
        accumulates: None, or the case accumulates gradients with ``Pipeline.step``; replicas then sum their gradients
            in ``each`` step or ``once``, after the last step.
    """

    replicas: tuple[int, ...]
    microbatches: int
    rows: tuple[tuple[int, ...], ...]
    schedule: Any
    recompute: Any
    backend: str
    bucket_bytes: int
    seed: int
    placement: Any = "stages"
    run_ahead: bool = False
    shares: tuple[float, ...] = ()
    accumulates: Any = None


class Skips(nn.Module):
    """A chain of layers with random skip connections over any distance; one bias needs no gradient."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(depth))
        self.skips = [[j for j in range(i) if rng.random() < 1.5 / depth] for i in range(depth)]
        self.images_again = rng.randrange(depth)
        self.layers[rng.randrange(depth)].bias.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        made = [images]
        for index, layer in enumerate(self.layers):
            value = torch.tanh(layer(made[-1]))
            for earlier in self.skips[index]:
                value = value + 0.5 * made[earlier + 1]
            if index == self.images_again:
                value = value + images
            made.append(value)
        return made[-1]


def random_cases(seed: int, most_ranks: int = 64) -> Iterator[Case]:
    """Yield the layouts that are known to be difficult, then random layouts, most of them small."""
    rng = random.Random(seed)
    fixed = list(FIXED)
    while True:
        most = int(2 ** rng.uniform(1.6, math.log2(most_ranks) + 0.01))
        replicas = fixed.pop(0) if fixed else _parts(rng, rng.randint(2, most), rng.randint(1, 8))
        microbatches = max(replicas) + rng.randint(0, max(replicas) + 4)
        rows = []
        for _ in range(STEPS):
            largest = rng.choice((1, 3, 6)) * microbatches // replicas[0] + 1
            step = [rng.randint(0, largest) for _ in range(replicas[0])]
            rows.append((step[0] or 1, *step[1:]))
        order = rng.choice(ORDERS)
        yield Case(
            replicas,
            microbatches,
            tuple(rows),
            rng.choice(SCHEDULES),
            rng.choice(CHECKPOINTING),
            rng.choice(("gloo", "nccl")),
            rng.choice((30, 200, 10**6)),
            rng.randrange(10**9),
            order,
            rng.random() < 0.7,
            _shares(rng, Placement(replicas, order, microbatches)),
            rng.choice((None, None, "each", "once")),
        )


def _parts(rng: random.Random, whole: int, count: int) -> tuple[int, ...]:
    count = min(count, whole)
    places = sorted(rng.sample(range(1, whole), count - 1))
    return tuple(end - start for start, end in zip([0, *places], [*places, whole], strict=True))


def _shares(rng: random.Random, placement: Placement) -> tuple[float, ...]:
    """Return the ranks' shares: in some cases random shares, if they leave every replica at least one microbatch."""
    shares = [1.0] * placement.world_size
    for stage in range(placement.stages if rng.random() < 0.7 else 0):
        drawn = [rng.uniform(0.3, 3) for _ in placement.ranks(stage)]
        if min(deal(placement.microbatches, drawn)):
            for rank, share in zip(placement.ranks(stage), drawn, strict=True):
                shares[rank] = share
    return tuple(shares)


class Trial:
    """A case's network and batches, with the gradients, losses and outputs of one process.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        rng = random.Random(case.seed)
        torch.manual_seed(case.seed)
        stages = len(case.replicas)
        self.network = Skips(rng, max(3, stages + rng.randint(0, 4))).double()
        self.cuts = sorted(rng.sample(cut_positions(trace(self.network)), stages - 1))
        self.batches = [torch.randn(2, sum(rows), 3, dtype=torch.float64).unbind() for rows in case.rows]
        self.expected = [_alone(self.network, *batch) for batch in self.batches]

    def train(self) -> None:
        """Train as one of the ranks, and compare gradients, losses and outputs.

        Raises:
            AssertionError: A value differs from one process's value.
        """
        case = self.case
        pipeline = Pipeline(
            copy.deepcopy(self.network),
            self.cuts,
            case.replicas,
            case.microbatches,
            case.schedule,
            run_ahead=case.run_ahead,
            activation_checkpointing=case.recompute,
            bucket_bytes=case.bucket_bytes,
            placement=case.placement,
            shares=case.shares,
        )
        names = {parameter: name for name, parameter in pipeline.module.named_parameters()}
        if case.accumulates is not None:
            self._accumulate(pipeline, names)
            pipeline.close()
            return
        for (images, targets), rows, expected in zip(self.batches, case.rows, self.expected, strict=True):
            gradients, loss, outputs = expected
            positions = _positions(pipeline, rows)
            batch = pipeline.share(images[positions], targets[positions])
            reduced, made = pipeline.train(batch, F.mse_loss)
            for parameter, gradient in zip(pipeline.parameters, reduced, strict=True):
                _compare(gradient, gradients[names[parameter]], names[parameter])
            _compare(pipeline.mean_loss(), loss, "loss")
            _compare(pipeline.gather(batch, made), outputs, "outputs")
            batch = pipeline.share(images[positions], targets[positions])
            assert torch.equal(batch.rest[0], targets)
            pipeline.module.eval()
            _compare(pipeline.gather(batch, pipeline.evaluate(batch)), outputs, "evaluated outputs")
            pipeline.module.train()
        pipeline.close()

    def _accumulate(self, pipeline: Pipeline, names: dict[nn.Parameter, str]) -> None:
        for step, ((images, targets), rows) in enumerate(zip(self.batches, self.case.rows, strict=True)):
            positions = _positions(pipeline, rows)
            more = self.case.accumulates == "once" and step < STEPS - 1
            _compare(
                pipeline.step(images[positions], targets[positions], F.mse_loss, more), self.expected[step][1], "loss"
            )
        for parameter in pipeline.parameters:
            every = torch.stack([gradients[names[parameter]] for gradients, *_ in self.expected])
            _compare(parameter.grad, every.sum(0), names[parameter])


def run_as_threads(case: Case) -> World:
    """Run a case with ranks as threads.

    Raises:
        AssertionError: A rank's value differs from one process's value, or a process group was not destroyed.
        DeadlockError: The ranks wait for each other.
    """
    trial = Trial(case)
    world = World(sum(case.replicas), case.backend, drained=case.backend == "nccl")
    with divided_once(trial.network, trial.cuts):
        world.run(lambda rank: trial.train())
    assert not any(world.groups), "a process group was not destroyed"
    return world


def _positions(pipeline: Pipeline, rows: Sequence[int]) -> Tensor:
    """Return the positions of this replica's samples in the whole batch, whose samples go to the replicas in turn."""
    replica = pipeline.place.replica
    if pipeline.place.stage:
        return torch.empty(0, dtype=torch.int64)
    order = sorted((index, other) for other, count in enumerate(rows) for index in range(count))
    return torch.tensor([at for at, (_, other) in enumerate(order) if other == replica], dtype=torch.int64)


def _alone(network: nn.Module, images: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    alone = copy.deepcopy(network)
    outputs = alone(images)
    loss = F.mse_loss(outputs, targets)
    loss.backward()
    gradients = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    return gradients, loss.detach(), outputs.detach()


def _compare(got: Tensor | None, expected: Tensor, value: str) -> None:
    assert got is not None, value
    error = float((got - expected).norm())
    assert error <= 1e-10 * float(expected.norm()) + 1e-14, f"{value}: off by {error}"


def main() -> None:
    """Try many layouts and print the failures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("number", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start, failures, ranks = time.process_time(), 0, 0
    for number, case in zip(range(arguments.number), random_cases(arguments.seed), strict=False):
        ranks += sum(case.replicas)
        try:
            run_as_threads(case)
        except Exception as error:
            failures += 1
            print(f"{number}: {case}\n  {type(error).__name__}: {str(error)[:500]}", flush=True)
    seconds = time.process_time() - start
    print(f"{arguments.number} layouts, {ranks} ranks, {failures} failures, {seconds:.0f} s of CPU time")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
