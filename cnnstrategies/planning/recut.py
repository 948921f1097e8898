"""Find better cuts for a running pipeline from the measured times of its stages."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.costs import GraphCosts, Profile
from cnnstrategies.planning.predict import Predictor

# Tolerated difference between the measured time of a stage and its planned time, as a fraction of the planned time. The
# planned times of all stages are first scaled so that their sum is the measured sum.
TOLERANCE = 0.1
GAIN = 0.05  # New cuts are only proposed if their `Recut.gain` is larger than this.


@dataclass(frozen=True)
class Recut:
    """Cuts that are predicted to be faster than the current cuts.

    Attributes:
        cuts: For each cut, the name of the node after which the network is cut.
        gain: Current step time divided by the new step time, minus 1.
        planned: Seconds that the profile predicts for the forward and backward of a microbatch, for each current stage.
    """

    cuts: list[str]
    gain: float
    planned: list[float]


def recut(job: Job, layout: Layout, samples: int, seconds: Sequence[float], loss: float) -> Recut | None:
    """Search for better cuts with the measured times of the stages.

    In each stage, the profile's times of the nodes are scaled by one factor, so that they add up to the stage's
    measured time. If the factors of all stages are about equal, the current cuts stay. For example, a memory bus that
    all ranks share slows all stages equally.

    Args:
        job: The job for which the current layout was planned, with the current number of replicas.
        layout: The current layout.
        samples: Number of samples in a step.
        seconds: Measured seconds of the forward and backward of a microbatch, for each stage.
        loss: Measured seconds of the loss for a microbatch, in the last stage. The profile and `seconds` do not contain
            this time.

    Returns:
        The better cuts; None if the measured times agree with the plan, or if the best cuts would make a step only
        slightly shorter.
    """
    job = replace(job, samples=samples)
    predictor = Predictor(job)
    planned = [stage.time for stage in predictor.stages(layout)]
    rates = [time / max(plan, 1e-9) for time, plan in zip(seconds, planned, strict=True)]
    whole = (sum(seconds) + loss) / sum(planned)
    took = [*seconds[:-1], seconds[-1] + loss]
    if all(abs(time - plan * whole) <= TOLERANCE * plan * whole for time, plan in zip(took, planned, strict=True)):
        return None
    costs = _as_measured(predictor.costs, layout, rates, loss)
    predictor = Predictor(replace(job, profile=Profile(costs)))
    best = predictor.search()
    assert best is not None, "the network has enough cut positions, since the current layout was possible"
    gain = predictor.time(layout) / predictor.time(best) - 1
    # If the current layout does not fit into memory, its predicted time is infinite. The gain is then infinite or NaN,
    # and is not usable.
    if not GAIN < gain < inf:
        return None
    return Recut([costs.nodes[cut - 1].name for cut in best.cuts], gain, planned)


def _as_measured(costs: GraphCosts, layout: Layout, rates: Sequence[float], loss: float) -> GraphCosts:
    """Return the costs of the nodes, scaled to the measured times of the stages.

    The time of the loss is added to the last node. Whatever the cuts are, this node is in the last stage.

    Args:
        costs: Costs according to the profile.
        layout: The current layout.
        rates: Measured time divided by planned time, for each stage.
        loss: Seconds of the loss for a microbatch.
    """
    bounds = itertools.pairwise((0, *layout.cuts, len(costs.nodes)))
    nodes = [
        replace(node, forward=node.forward * rate, backward=node.backward * rate)
        for (start, end), rate in zip(bounds, rates, strict=True)
        for node in costs.nodes[start:end]
    ]
    # The loss is added to the backward's time, because activation checkpointing runs the forward twice but the loss
    # only once.
    nodes[-1] = replace(nodes[-1], backward=nodes[-1].backward + loss)
    return replace(costs, nodes=tuple(nodes))
