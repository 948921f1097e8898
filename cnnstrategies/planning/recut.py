"""Other cuts for a pipeline, by what each of its stages takes for a microbatch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.costs import GraphCosts, Profile
from cnnstrategies.planning.predict import Predictor

OFF = 0.1  # of what the plan says of a stage's part of the time of all
GAIN = 0.05  # of a step


@dataclass(frozen=True)
class Recut:
    """Cuts that are predicted to be quicker.

    Attributes:
        cuts: Names of the nodes after which to cut.
        gain: The step's time before by that after, less 1.
        planned: Seconds that the profile has for each stage's forward and backward of a microbatch.
    """

    cuts: list[str]
    gain: float
    planned: list[float]


def recut(job: Job, layout: Layout, samples: int, seconds: Sequence[float], loss: float) -> Recut | None:
    """Plan again with what was measured; None where that agrees with the plan, or a step would gain too little.

    Each node is taken to be as much slower than in the profile as its stage. That all stages are slower alike, as where
    their ranks share a memory, is no reason to cut elsewhere.

    Args:
        job: What was planned for, with its replicas.
        layout: What that led to.
        samples: Of a step.
        seconds: Those of each stage for the forward and backward of a microbatch.
        loss: Seconds of the loss in the last stage, beside; no profile has it.
    """
    job = replace(job, samples=samples)
    predictor = Predictor(job)
    planned = [stage.time for stage in predictor.stages(layout)]
    rates = [time / max(plan, 1e-9) for time, plan in zip(seconds, planned, strict=True)]
    whole = (sum(seconds) + loss) / sum(planned)
    took = [*seconds[:-1], seconds[-1] + loss]
    if all(abs(time - plan * whole) <= OFF * plan * whole for time, plan in zip(took, planned, strict=True)):
        return None
    costs = _as_measured(predictor.costs, layout, rates, loss)
    predictor = Predictor(replace(job, profile=Profile(costs)))
    best = predictor.search()
    assert best is not None, "there are as many places to cut as before"
    gain = predictor.time(layout) / predictor.time(best) - 1
    if not GAIN < gain < inf:  # Nor where one does not fit into memory.
        return None
    return Recut([costs.nodes[cut - 1].name for cut in best.cuts], gain, planned)


def _as_measured(costs: GraphCosts, layout: Layout, rates: Sequence[float], loss: float) -> GraphCosts:
    """The nodes' times, each stage's by its own rate, and the loss with the last node, which no cut moves."""
    bounds = itertools.pairwise((0, *layout.cuts, len(costs.nodes)))
    nodes = [
        replace(node, forward=node.forward * rate, backward=node.backward * rate)
        for (start, end), rate in zip(bounds, rates, strict=True)
        for node in costs.nodes[start:end]
    ]
    # Not to its forward, which checkpointing runs twice.
    nodes[-1] = replace(nodes[-1], backward=nodes[-1].backward + loss)
    return replace(costs, nodes=tuple(nodes))
