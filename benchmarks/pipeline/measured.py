"""Measure steps of two stages, and what the planner says of them, in turn on the same two processes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cutting import best_cut, bound, two_stages
from networks import images
from ranks import run_ranks
from torch import nn

from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.timeline import Span, draw_timeline
from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.pipeline.tracing import trace
from cnnstrategies.planning.costs import GraphCosts, Link
from cnnstrategies.planning.measure_links import measure_local_link
from cnnstrategies.planning.measure_nodes import profile
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.stage_costs import stage_costs

STEPS = 10  # between two profiles


@dataclass(frozen=True)
class Result:
    """The quickest step, and prediction and bound from the quickest profile, in seconds.

    Other work on the machine only ever adds time, so the smallest is nearest to the machine's own.

    Attributes:
        cut: The node after which the network is cut.
        step: Measured step.
        predicted: The planner's prediction from profiles taken between the steps.
        bound: sum t_i + (M - 1) max t_i from the same profiles.
        prediction_ratio: Median over the rounds of predicted / measured.
    """

    cut: str
    step: float
    predicted: float
    bound: float
    prediction_ratio: float


def measure(
    make: Callable[[], nn.Module],
    size: int,
    classes: int,
    samples: int,
    microbatches: int,
    rounds: int,
    timeline: Path | None = None,
) -> Result:
    """Cut the network where the planner says, then profile and step in turn.

    Both processes profile at the same time, so that the profile sees the machine as the steps do: shared.
    """
    link = measure_local_link(torch.device("cpu"), "gloo")
    inputs, _ = images(size, samples // microbatches, classes)
    _, layout, cut = best_cut(make(), inputs, microbatches, link)
    arguments = (make, size, classes, samples, microbatches, rounds, cut, layout, link, timeline)
    results = run_ranks(2, _measure, *arguments)
    steps = [step for step, _, _ in results[0]]
    predicted = [median((first[1], second[1])) for first, second in zip(*results, strict=True)]
    quiet = quietest([costs for rank in results for _, _, costs in rank])
    return Result(
        cut,
        min(steps),
        two_stages(quiet, link, microbatches).time(layout),
        bound(stage_costs(quiet, layout.cuts), microbatches),
        median(a / b for a, b in zip(predicted, steps, strict=True)),
    )


def quietest(profiles: list[GraphCosts]) -> GraphCosts:
    """The profile that took the least time."""
    return min(profiles, key=lambda costs: sum(node.forward + node.backward for node in costs.nodes))


def _measure(
    rank: int,
    make: Callable[[], nn.Module],
    size: int,
    classes: int,
    samples: int,
    microbatches: int,
    rounds: int,
    cut: str,
    layout: Layout,
    link: Link,
    timeline: Path | None,
) -> list[tuple[float, float, GraphCosts]]:
    torch.manual_seed(1)
    network = make()
    pipeline = Pipeline(network, [cut], [1, 1], microbatches)
    inputs, targets = images(size, samples, classes)
    microbatch = inputs[: samples // microbatches]
    traced = trace(network)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        pipeline.module.zero_grad(set_to_none=True)
        batch = pipeline.share(inputs, targets)
        pipeline.train(batch, F.cross_entropy)
        dist.barrier()
        return time.perf_counter() - start

    for _ in range(2):
        step()
    results = []
    for _ in range(rounds):
        dist.barrier()
        predictor = two_stages(profile(traced, microbatch, repeats=3), link, microbatches)
        results.append((min(step() for _ in range(STEPS)), predictor.time(layout), predictor.costs))
    if timeline is not None:
        _draw(rank, pipeline, step, predictor, layout, timeline)
    return results


def _draw(
    rank: int, pipeline: Pipeline, step: Callable[[], float], predictor: Predictor, layout: Layout, path: Path
) -> None:
    """Draw one measured step and its prediction."""
    rank_spans: list[Span] = []
    pipeline.watchers.append(rank_spans.append)
    step()
    gathered = [None, None]
    dist.all_gather_object(gathered, rank_spans)
    if rank == 0:
        spans = [span for part in gathered for span in part or ()]
        names = {0: "stage 0", 1: "stage 1"}
        draw_timeline(spans, path.with_name(path.name + "_measured.png"), "Measured step", names)
        predicted = predictor.simulate(layout, run_ahead=True).spans
        draw_timeline(predicted, path.with_name(path.name + "_predicted.png"), "Predicted step", names)
