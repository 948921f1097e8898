"""Predict time and memory of a layout."""

import functools
from collections.abc import Callable
from dataclasses import replace

from cnnstrategies.pipeline.layout import Layout, even_replicas
from cnnstrategies.pipeline.timetable import timetable
from cnnstrategies.planning.costs import GraphCosts, Link
from cnnstrategies.planning.partition import best_layout
from cnnstrategies.planning.programme import Problem
from cnnstrategies.planning.request import Request
from cnnstrategies.planning.simulate import Simulation, peak_in_flight, simulate
from cnnstrategies.planning.stage_costs import StageCost, messages, stage_costs

WORTH_RUNNING_AHEAD = 0.01  # of the step time, for the memory of one more microbatch


class Predictor:
    """Predicts time and memory of layouts by the simulator.

    Args:
        costs: Costs of the nodes for one microbatch.
        link: The connection between any two devices.
        request: Devices, schedule and what the user has fixed.
    """

    def __init__(self, costs: GraphCosts, link: Link, request: Request) -> None:
        self.costs = costs
        self.link = link
        self.request = request
        self.tasks = functools.cache(
            lambda replicas, run_ahead: timetable(replicas, request.microbatches, request.schedule, run_ahead)
        )

    def fixed_layout(self) -> Layout | None:
        """The layout that the user named, if so."""
        cuts = self.request.cuts
        if cuts is None:
            return None
        return Layout(cuts, self.request.replicas or even_replicas(self.request.devices, len(cuts) + 1))

    def search(self, objective: Callable[[Layout], float], memory_limit: int | None) -> Layout | None:
        """The layout with the least objective that was found."""
        request = self.request
        return best_layout(self.problem(memory_limit), objective, request.devices, request.stages, request.replicas)

    def problem(self, memory_limit: int | None) -> Problem:
        """The same question for the dynamic programme."""
        request = self.request
        return Problem(self.costs, self.link, request.microbatches, self.in_flight, request.state_copies, memory_limit)

    def in_flight(self, devices: int, replicas: int) -> int:
        """Most microbatches that a replica holds with so many devices in its stage and behind it: by the timetable."""
        tasks = self.tasks((replicas, *[1] * (devices - replicas)), self.request.run_ahead or False)
        return max(peak_in_flight(tasks[0]).values())

    def time(self, layout: Layout) -> float:
        """Predicted step time in seconds, infinite where the layout does not fit into memory."""
        limit = self.request.memory_limit
        if limit is not None and self.memory(layout) > limit:
            return float("inf")
        return self.simulate(layout, self._may_run_ahead(layout)).step_time

    def memory(self, layout: Layout) -> float:
        """Bytes that the fullest device holds at least."""
        return max(self.stage_memory(layout, self.request.run_ahead or False))

    def runs_ahead(self, layout: Layout) -> bool:
        """Whether one more microbatch in flight fits into memory and gains time, unless that is given."""
        if self.request.run_ahead is not None or not self._may_run_ahead(layout):
            return self.request.run_ahead or False
        least = (1 - WORTH_RUNNING_AHEAD) * self.simulate(layout, False).step_time
        return self.simulate(layout, True).step_time <= least

    def _may_run_ahead(self, layout: Layout) -> bool:
        if self.request.run_ahead is not None:
            return self.request.run_ahead
        limit = self.request.memory_limit
        return limit is None or max(self.stage_memory(layout, True)) <= limit

    def simulate(self, layout: Layout, run_ahead: bool) -> Simulation:
        """The predicted step."""
        stages = [self._with_recomputation(stage) for stage in stage_costs(self.costs, layout.cuts)]
        return simulate(self.tasks(layout.replicas, run_ahead), stages, messages(self.costs, layout.cuts), self.link)

    def _with_recomputation(self, stage: StageCost) -> StageCost:
        if self.request.activation_checkpointing == "never":
            return stage
        return replace(stage, backward=stage.forward + stage.backward)

    def stage_memory(self, layout: Layout, run_ahead: bool) -> list[int]:
        """Bytes that a device of each stage holds at most: training state and activations in flight."""
        stages = stage_costs(self.costs, layout.cuts)
        peaks: dict[int, int] = {}
        for tasks in self.tasks(layout.replicas, run_ahead):
            for stage, peak in peak_in_flight(tasks).items():
                peaks[stage] = max(peaks.get(stage, 0), peak)
        memory = []
        for index, cost in enumerate(stages):
            state = self.request.state_copies * cost.parameter_bytes
            kept = peaks[index] if self.request.activation_checkpointing == "never" else 1
            memory.append(state + peaks[index] * cost.received_bytes + kept * cost.saved_bytes)
        return memory
