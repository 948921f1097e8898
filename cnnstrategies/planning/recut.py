"""Better cuts for a pipeline, from the measured times of its stages."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.costs import GraphCosts, Profile
from cnnstrategies.planning.predict import Predictor

OFF = 0.1  # Tolerated difference, as a part of the planned time, between a stage's measured and planned times.
GAIN = 0.05  # Least gain, as a part of the step time, for which other cuts are proposed.


@dataclass(frozen=True)
class Recut:
    """Cuts that are predicted to be faster.

    Attributes:
        cuts: Names of the nodes after which to cut.
        gain: Present step time divided by the new step time, minus 1.
        planned: Seconds of each stage's forward and backward of a microbatch according to the profile.
    """

    cuts: list[str]
    gain: float
    planned: list[float]


def recut(job: Job, layout: Layout, samples: int, seconds: Sequence[float], loss: float) -> Recut | None:
    """Plan again with measured times.

    Each node is assumed to be slower than in the profile by the same factor as its stage. If all stages are slower by
    about the same factor, as with ranks that share a memory, the cuts stay.

    Args:
        job: Job of the present plan, with its replicas.
        layout: Layout of the present plan.
        samples: Samples of a step.
        seconds: Measured seconds of each stage's forward and backward of a microbatch.
        loss: Measured seconds of the loss in the last stage, which are in addition to `seconds` and in no profile.

    Returns:
        The better cuts; None if the measured times agree with the plan, or if a step would gain too little.
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
    if not GAIN < gain < inf:  # The gain is infinite or not a number if a layout does not fit into memory.
        return None
    return Recut([costs.nodes[cut - 1].name for cut in best.cuts], gain, planned)


def _as_measured(costs: GraphCosts, layout: Layout, rates: Sequence[float], loss: float) -> GraphCosts:
    """Return the costs with the nodes' times scaled by the rates of their stages, and with the loss.

    The loss counts for the last node, which stays in the last stage whatever the cuts are.
    """
    bounds = itertools.pairwise((0, *layout.cuts, len(costs.nodes)))
    nodes = [
        replace(node, forward=node.forward * rate, backward=node.backward * rate)
        for (start, end), rate in zip(bounds, rates, strict=True)
        for node in costs.nodes[start:end]
    ]
    # The loss is added to the backward, since activation checkpointing runs the forward twice but the loss once.
    nodes[-1] = replace(nodes[-1], backward=nodes[-1].backward + loss)
    return replace(costs, nodes=tuple(nodes))
