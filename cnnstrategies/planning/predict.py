"""What a layout of a network takes, in time and memory, and which one takes least."""

from dataclasses import replace
from math import lcm

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.timetable import Layout, even_replicas, timetable
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.partition import Cost, best_layout
from cnnstrategies.planning.problem import Problem
from cnnstrategies.planning.simulate import Simulation, simulate
from cnnstrategies.planning.stage_costs import StageCost, messages, stage_costs

WORTH_RUNNING_AHEAD = 0.01  # of the step time, for the memory of one more microbatch
LONGEST = 5000  # tasks that are simulated; of a longer step parts are


class Predictor:
    """Predicts time and memory of layouts by the simulator."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.problem = Problem(job)
        self.costs = self.problem.costs
        self._known: dict[tuple[int, ...], list[StageCost]] = {}

    def fixed_layout(self) -> Layout | None:
        """The layout that the user named, if so."""
        cuts = self.job.cuts
        if cuts is None:
            return None
        return Layout(cuts, self.job.replicas or even_replicas(self.job.cluster.devices, len(cuts) + 1))

    def search(self) -> Layout | None:
        """The layout with the least predicted time that was found; where none fits into memory, that needs least."""
        return best_layout(self.problem, self._cost, self._model)

    def _model(self, layout: Layout) -> Cost:
        return self._excess(self.problem.memory(layout)), self.problem.model(layout)

    def time(self, layout: Layout) -> float:
        """Predicted step time in seconds, infinite where the layout does not fit into memory."""
        return self._cost(layout)[1]

    def _cost(self, layout: Layout) -> Cost:
        excess = self._excess(self.memory(layout))
        if excess:
            return excess, float("inf")
        return 0.0, self._time_of(layout, self._may_run_ahead(layout))

    def _excess(self, memory: float) -> float:
        """Bytes beyond those that a device may hold."""
        return 0.0 if self.job.memory is None else max(0.0, memory - self.job.memory)

    def memory(self, layout: Layout) -> float:
        """Bytes that the fullest device holds at least."""
        return max(self.stage_memory(layout, self.job.run_ahead or False))

    def runs_ahead(self, layout: Layout) -> bool:
        """Whether one more microbatch in flight fits into memory and gains time, unless that is given."""
        if self.job.run_ahead is not None or not self._may_run_ahead(layout):
            return self.job.run_ahead or False
        ahead, usual = (self._time_of(layout, run_ahead) for run_ahead in (True, False))
        return ahead <= (1 - WORTH_RUNNING_AHEAD) * usual

    def _may_run_ahead(self, layout: Layout) -> bool:
        if self.job.run_ahead is not None:
            return self.job.run_ahead
        return self.job.memory is None or max(self.stage_memory(layout, True)) <= self.job.memory

    def simulate(self, layout: Layout, run_ahead: bool, microbatches: int | None = None) -> Simulation:
        """The predicted step, with all of its tasks; that of so many microbatches, where they are given."""
        replicas, count = layout.replicas, microbatches or self.problem.microbatches
        tasks = timetable(replicas, count, self.job.schedule, run_ahead, self.problem.shares(replicas))
        return simulate(tasks, self.stages(layout), messages(self.costs, layout.cuts), self.job.cluster)

    def stage_memory(self, layout: Layout, run_ahead: bool) -> list[int]:
        """Bytes that a device of each stage holds at most: training state and activations in flight."""
        memory = []
        problem = self.problem
        for index, cost in enumerate(self._costs_of(layout.cuts)):
            state = self.job.state_copies * cost.parameter_bytes
            peak = problem.flights(layout.replicas, index, run_ahead)
            kept = 1 if problem.recomputes else peak
            memory.append(state + peak * cost.received_bytes + kept * cost.saved_bytes)
        return memory

    def _costs_of(self, cuts: tuple[int, ...]) -> list[StageCost]:
        if cuts not in self._known:
            self._known[cuts] = stage_costs(self.costs, cuts)
        return self._known[cuts]

    def stages(self, layout: Layout) -> list[StageCost]:
        """Their costs, with what they recompute."""
        stages = self._costs_of(layout.cuts)
        if self.job.activation_checkpointing == "never":
            return stages
        return [replace(stage, backward=stage.forward + stage.backward) for stage in stages]

    def _time_of(self, layout: Layout, run_ahead: bool) -> float:
        """Predicted step time in seconds, by simulation; of a long step two parts are, and the rest is a line.

        The parts are periods apart, and the pipeline is filled in both.
        """
        count, replicas = self.problem.microbatches, layout.replicas
        short = LONGEST // (2 * len(replicas))
        period = lcm(*replicas) if lcm(*replicas) <= short and not self.problem.shares(replicas) else short // 2
        most = max(short, sum(replicas) + 2 * period)
        if count <= most:
            return self.simulate(layout, run_ahead).step_time
        last = most - (most - count) % period
        first, second = (self.simulate(layout, run_ahead, part).step_time for part in (last - period, last))
        return second + (second - first) * (count - last) / period


def choose_layout(job: Job) -> tuple[Layout, bool]:
    """The layout with the least predicted step time that a job permits, and whether its stages run ahead.

    Since times vary, two profiles may lead to different ones: in a distributed run one rank chooses and tells the
    others.
    """
    predictor = Predictor(job)
    layout = predictor.fixed_layout() or predictor.search()
    assert layout is not None, "there are enough places to cut"
    if predictor.time(layout) == float("inf"):
        raise ConfigurationError(
            f"memory_limit={job.memory}: on {layout.devices} devices with {job.microbatches} microbatches a device "
            f"needs {predictor.memory(layout):.0f} bytes; raise the limit, use more stages or microbatches, or set "
            "activation_checkpointing='always'"
        )
    return layout, predictor.runs_ahead(layout)
