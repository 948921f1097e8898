"""A plan: how a network is divided, what each stage costs, and how long a step should take."""

import itertools
from dataclasses import dataclass

from cnnstrategies.pipeline.layout import Layout
from cnnstrategies.pipeline.timeline import Span
from cnnstrategies.pipeline.timetable import Order
from cnnstrategies.planning.predict import Predictor
from cnnstrategies.planning.request import Request
from cnnstrategies.planning.stage_costs import StageCost, messages, stage_costs


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan.

    Attributes:
        first: Name of its first node.
        last: Name of its last node.
        replicas: Its replicas.
        cost: Its costs for one microbatch.
        sent_bytes: Activations that it sends on for one microbatch.
        memory: Bytes that each of its devices holds at most.
        busy: Share of the step that each of its devices computes.
    """

    first: str
    last: str
    replicas: int
    cost: StageCost
    sent_bytes: int
    memory: int
    busy: float


@dataclass(frozen=True)
class Plan:
    """A layout with its predicted step.

    Attributes:
        layout: Cuts and replicas.
        request: What it was made for.
        stages: The stages.
        placement: How ranks are numbered, and so handed out to the machines.
        step_time: Seconds of forward, backward, transfers and reduction; without the optimizer's update.
        samples: Samples of a step.
        sent_bytes: Bytes that all devices together send in a step.
        spans: The predicted timeline.
    """

    layout: Layout
    request: Request
    stages: tuple[StagePlan, ...]
    placement: Order
    step_time: float
    samples: float
    sent_bytes: int
    spans: tuple[Span, ...]

    @property
    def samples_per_second(self) -> float:
        """Predicted throughput."""
        return self.samples / self.step_time


def describe(predictor: Predictor, layout: Layout) -> Plan:
    """What a layout's stages cost, and its step.

    Args:
        predictor: Of the network's costs on the devices.
        layout: The layout.
    """
    costs, request = predictor.costs, predictor.request
    run_ahead = predictor.runs_ahead(layout)
    placement = predictor.placement(layout)
    simulation = predictor.simulate(layout, run_ahead, placement)
    stages = stage_costs(costs, layout.cuts)
    passing = messages(costs, layout.cuts)
    memory = predictor.stage_memory(layout, run_ahead)
    bounds = list(itertools.pairwise((0, *layout.cuts, len(costs.nodes))))
    computing = [0.0] * len(stages)
    for span in simulation.spans:
        if span.kind in ("forward", "backward"):
            computing[span.stage] += span.end - span.start
    plans = tuple(
        StagePlan(
            first=costs.nodes[start].name,
            last=costs.nodes[end - 1].name,
            replicas=layout.replicas[index],
            cost=stages[index],
            sent_bytes=sum(message.bytes for (source, _), message in passing.items() if source == index),
            memory=memory[index],
            busy=computing[index] / layout.replicas[index] / simulation.step_time,
        )
        for index, (start, end) in enumerate(bounds)
    )
    per_microbatch = sum(message.bytes + message.gradient_bytes for message in passing.values())
    reduced = sum(2 * (count - 1) * stage.parameter_bytes for count, stage in zip(layout.replicas, stages, strict=True))
    return Plan(
        layout=layout,
        request=request,
        stages=plans,
        placement=placement,
        step_time=simulation.step_time,
        samples=costs.microbatch_size * request.microbatches,
        sent_bytes=per_microbatch * request.microbatches + reduced,
        spans=tuple(simulation.spans),
    )
