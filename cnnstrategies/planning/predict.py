"""Predict the step time and memory of a network's layout, and choose the layout with the least time."""

import itertools
from dataclasses import replace
from math import lcm

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.timetable import Layout, even_replicas, timetable
from cnnstrategies.planning.candidates import CHECKPOINTINGS, Job
from cnnstrategies.planning.memory import PeakMemory, largest
from cnnstrategies.planning.partition import SMALL, Cost, best_layout
from cnnstrategies.planning.problem import Problem
from cnnstrategies.planning.simulate import Simulation, simulate
from cnnstrategies.planning.stage_costs import StageCost, messages, sent_in_a_step, stage_costs

# A stage that runs ahead needs the memory of one more microbatch. Stages therefore only run ahead if this saves at
# least the following fraction of the step time.
WORTH_RUNNING_AHEAD = 0.01
# A layout that needs less memory is preferred if its step is longer by at most the following fraction. Without this
# preference, a step of one microbatch, which all layouts run in about the same time, would run in the first stage.
WORTH_LESS_MEMORY = 0.01
LONGEST = 5000  # Largest number of tasks in a simulation. The time of a step with more tasks is extrapolated.


class Predictor:
    """A predictor of the step time and the memory of layouts. It simulates steps to predict their time.

    Attributes:
        costs: Costs of the network for one microbatch.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.problem = Problem(job)
        self.costs = self.problem.costs
        self._known: dict[tuple[int, ...], list[StageCost]] = {}

    def fixed_layout(self) -> Layout | None:
        """Return the layout with the cuts that the user gave. Return None if the user gave no cuts."""
        cuts = self.job.cuts
        if cuts is None:
            return None
        return Layout(cuts, self.job.replicas or even_replicas(self.job.cluster.devices, len(cuts) + 1))

    def search(self) -> Layout | None:
        """Search for the layout with the least predicted step time.

        Returns:
            The best layout that the search simulated. If none of the simulated layouts fits into memory, this is the
            layout that exceeds the memory limit least. None if the network has too few cut positions for the requested
            number of stages.
        """
        return best_layout(self.problem, self._cost, self._model)

    def lighter(self, layout: Layout) -> Layout:
        """Return a layout in which the devices need less memory, and whose step is at most 1 % longer.

        The layout differs from the given one in at most one cut. With many devices, for which simulations take long,
        it is the given layout.
        """
        if self.job.cluster.devices > SMALL:
            return layout
        most = (1 + WORTH_LESS_MEMORY) * self.time(layout)
        lightest, least = layout, self._fullest(layout)
        bounds = (0, *layout.cuts, len(self.costs.nodes))
        for index, (before, after) in enumerate(zip(bounds, bounds[2:], strict=False)):
            for position in self.costs.cut_positions:
                if not before < position < after:
                    continue
                other = replace(layout, cuts=(*layout.cuts[:index], position, *layout.cuts[index + 1 :]))
                memory = self._fullest(other)
                if memory < least and self.problem.bound(other) <= most and self.time(other) <= most:
                    lightest, least = other, memory
        return lightest

    def _fullest(self, layout: Layout) -> float:
        """Return a number that is the larger, the fuller the fullest device is.

        The number is a fraction of the device's memory, or bytes if memory is not limited.
        """
        memory = self.device_memory(layout, self.job.run_ahead or False)
        if not self.job.is_limited:
            return max(memory)
        return max(held / limit for held, limit in zip(memory, self.job.limits, strict=False))

    def _model(self, layout: Layout) -> Cost:
        return self.problem.excess(layout), self.problem.model(layout)

    def time(self, layout: Layout) -> float:
        """Return the predicted step time in seconds, infinite if the layout does not fit into memory."""
        return self._cost(layout)[1]

    def _cost(self, layout: Layout) -> Cost:
        excess = self.problem.excess(layout)
        if excess:
            return excess, float("inf")
        return 0.0, self._time_of(layout, self._may_run_ahead(layout)) + self.values_time(layout)

    def values_time(self, layout: Layout) -> float:
        """Return the seconds in which the values of the step's own code are sent."""
        return self.job.values.seconds(self.job.cluster, layout.replicas)

    def sent_bytes(self, layout: Layout) -> int:
        """Return the bytes that all devices together send in a step."""
        of_stages = sent_in_a_step(self.costs, layout, self.problem.microbatches)
        return of_stages + self.job.values.sent_bytes(layout.replicas)

    def memory(self, layout: Layout) -> float:
        """Return the largest number of bytes that a device holds.

        A stage that runs ahead holds one additional microbatch. The memory of this microbatch is only counted if the
        job requires stages to run ahead.
        """
        return max(self.device_memory(layout, self.job.run_ahead or False))

    def runs_ahead(self, layout: Layout) -> bool:
        """Whether the stages of a layout should run ahead, that is, hold one additional microbatch.

        If the job sets ``run_ahead``, return this value. Otherwise stages should run ahead if the additional microbatch
        fits into memory and saves enough time.
        """
        if self.job.run_ahead is not None or not self._may_run_ahead(layout):
            return self.job.run_ahead or False
        ahead, usual = (self._time_of(layout, run_ahead) for run_ahead in (True, False))
        return ahead <= (1 - WORTH_RUNNING_AHEAD) * usual

    def _may_run_ahead(self, layout: Layout) -> bool:
        if self.job.run_ahead is not None:
            return self.job.run_ahead
        return not self.job.is_limited or not self.job.excess(self.device_memory(layout, True))

    def simulate(self, layout: Layout, run_ahead: bool, microbatches: int | None = None) -> Simulation:
        """Simulate a step with all its tasks, even if their number exceeds `LONGEST`.

        Args:
            layout: Cuts and replicas.
            run_ahead: Whether stages hold one additional microbatch.
            microbatches: Number of microbatches; None for the job's number.
        """
        replicas, count = layout.replicas, microbatches or self.problem.microbatches
        tasks = timetable(replicas, count, self.job.schedule, run_ahead, self.problem.shares(layout))
        return simulate(tasks, self.stages(layout), messages(self.costs, layout.cuts), self.job.cluster)

    def device_memory(self, layout: Layout, run_ahead: bool) -> list[int]:
        """Return the peak memory of each device in bytes; see :meth:`Problem.device_peaks`."""
        return [peak.total for peak in self.problem.device_peaks(layout, run_ahead)]

    def stage_peaks(self, layout: Layout, run_ahead: bool) -> list[PeakMemory]:
        """Return the peak memory of the fullest device of each stage.

        Args:
            layout: Cuts and replicas.
            run_ahead: Whether stages hold one additional microbatch.
        """
        peaks = iter(self.problem.device_peaks(layout, run_ahead))
        return [largest(itertools.islice(peaks, count)) for count in layout.replicas]

    def device_peaks(self, layout: Layout) -> tuple[PeakMemory, ...]:
        """Return the peak memory of each device, stage by stage."""
        return tuple(self.problem.device_peaks(layout, self.runs_ahead(layout)))

    def _costs_of(self, cuts: tuple[int, ...]) -> list[StageCost]:
        if cuts not in self._known:
            self._known[cuts] = stage_costs(self.costs, cuts)
        return self._known[cuts]

    def stages(self, layout: Layout) -> list[StageCost]:
        """Return the costs of the layout's stages.

        If the backward recomputes activations, the time of the forward is added to the time of the backward.
        """
        stages = self._costs_of(layout.cuts)
        if not self.problem.recomputes:
            return stages
        return [replace(stage, backward=stage.forward + stage.backward) for stage in stages]

    def _time_of(self, layout: Layout, run_ahead: bool) -> float:
        """Return the simulated step time in seconds.

        If the step has too many tasks, two steps with fewer microbatches are simulated, and the step time is
        extrapolated linearly. Both steps have enough microbatches to fill the pipeline. The timetable repeats after a
        number of microbatches, its period. If the period is short, the two steps differ by one period; otherwise they
        differ by a fixed number of microbatches.
        """
        count, replicas = self.problem.microbatches, layout.replicas
        short = LONGEST // (2 * len(replicas))
        period = lcm(*replicas) if lcm(*replicas) <= short and not self.problem.shares(layout) else short // 2
        most = max(short, sum(replicas) + 2 * period)
        if count <= most:
            return self.simulate(layout, run_ahead).step_time
        last = most - (most - count) % period
        first, second = (self.simulate(layout, run_ahead, part).step_time for part in (last - period, last))
        return second + (second - first) * (count - last) / period


def choose_layout(job: Job) -> tuple[Layout, Predictor]:
    """Return the layout with the least predicted step time, and its predictor; see also :meth:`Predictor.lighter`.

    The predictor's job says whether activations are recomputed: if the given job does not say it, they are recomputed
    only if no layout fits into memory without.

    In a distributed run only one rank may call this function. The other ranks must use the result of that rank, because
    measured times vary, and the profiles of two ranks may lead to different layouts.

    Raises:
        ConfigurationError: No layout fits into memory.
    """
    for checkpointing in job.checkpointings:
        predictor = Predictor(replace(job, activation_checkpointing=checkpointing))
        possible = predictor.fixed_layout() or predictor.search()
        assert possible is not None, "the network has enough cut positions"
        layout = possible
        if predictor.time(layout) < float("inf"):
            return layout if job.cuts is not None else predictor.lighter(layout), predictor
    advice = "raise the limit, use more stages or microbatches"
    if checkpointing != CHECKPOINTINGS[-1]:
        advice += ", or set activation_checkpointing='always'"
    memory = predictor.device_memory(layout, job.run_ahead or False)
    device = job.tightest(memory)
    place = f"device {device}" if len(set(job.limits)) > 1 else "one device"
    raise ConfigurationError(
        f"memory_limit={job.limits[device]:.0f}: with {layout.devices} devices and {job.microbatches} microbatches, "
        f"{place} needs {memory[device]} bytes; {advice}"
    )
