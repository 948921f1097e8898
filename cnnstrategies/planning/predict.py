"""What a layout of a network takes, in time and memory, and which one takes least."""

from dataclasses import replace
from math import gcd, lcm

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.layout import Layout, even_replicas
from cnnstrategies.pipeline.timetable import Order, timetable
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import GraphCosts, Link
from cnnstrategies.planning.partition import best_layout
from cnnstrategies.planning.places import one_machine, one_of_equal, orders, placed
from cnnstrategies.planning.problem import Problem, Request
from cnnstrategies.planning.propose import propose
from cnnstrategies.planning.simulate import Simulation, simulate
from cnnstrategies.planning.stage_costs import StageCost, all_reduce, messages, stage_costs

WORTH_RUNNING_AHEAD = 0.01  # of the step time, for the memory of one more microbatch
WORTH_RENUMBERING = 0.01  # of the step time, for ranks that are not numbered stage by stage
JOINED = 8  # proposals for pipelines beside each other that are simulated
LONGEST = 3000  # tasks that are simulated; of a longer step a part is, and the rest follows from its period


def check_request(costs: GraphCosts, request: Request) -> None:
    """Refuse a request that no layout fulfils.

    Raises:
        ConfigurationError: Stages, replicas, cuts and devices do not add up, there are fewer places to cut than
            cuts, or fewer microbatches than replicas of a stage.
    """
    stages = request.stages
    for name, given in (("replicas", request.replicas), ("cuts", request.cuts)):
        if given is not None:
            count = len(given) + (name == "cuts")
            if stages is not None and stages != count:
                raise ConfigurationError(f"{name} makes {count} stages, but stages={stages}: leave one of them out")
            stages = count
    if request.replicas is not None and sum(request.replicas) != request.devices:
        raise ConfigurationError(
            f"replicas={list(request.replicas)} need {sum(request.replicas)} devices, but there are "
            f"{request.devices}: change replicas or the number of devices"
        )
    if stages is not None and stages > min(request.devices, len(costs.cut_positions) + 1):
        raise ConfigurationError(
            f"stages={stages}: there are {request.devices} devices, and the network has {len(costs.cut_positions)} "
            f"places to cut; use at most {min(request.devices, len(costs.cut_positions) + 1)} stages"
        )
    if stages is not None and request.devices > stages * request.microbatches:
        raise ConfigurationError(
            f"microbatches={request.microbatches} keep at most {stages * request.microbatches} devices busy with "
            f"{stages} stages, but there are {request.devices}: use more microbatches or more stages"
        )
    if request.microbatches < max(request.replicas or (1,)):
        raise ConfigurationError(
            f"microbatches={request.microbatches} are fewer than the {max(request.replicas or ())} replicas of a "
            "stage, some of which would idle: use at least as many microbatches"
        )


class Predictor:
    """Predicts time and memory of layouts by the simulator.

    Args:
        costs: Costs of the nodes for one microbatch.
        network: The devices, or the connection between any two of them where they are equal.
        request: Devices, schedule and what the user has fixed.
    """

    def __init__(self, costs: GraphCosts, network: Link | Cluster, request: Request) -> None:
        self.costs = costs
        self.cluster = network if isinstance(network, Cluster) else Cluster.flat(request.devices, network)
        self.request = request
        self.problem = Problem(costs, self.cluster, request)
        self._placements: dict[Layout, Order] = {}

    def fixed_layout(self) -> Layout | None:
        """The layout that the user named, if so."""
        cuts = self.request.cuts
        if cuts is None:
            return None
        return Layout(cuts, self.request.replicas or even_replicas(self.request.devices, len(cuts) + 1))

    def search(self) -> Layout | None:
        """The layout with the least predicted time that was found and fits into memory."""
        request = self.request
        problem = replace(self.problem, memory_limit=request.memory_limit)
        found = best_layout(problem, self.time, problem.bound, request.stages, request.replicas)
        joined = one_machine(self.cluster)
        if joined is None:
            return found
        # What pays where each pipeline has its stages on one machine is not what pays where each stage has.
        others = propose(replace(problem, cluster=joined), request.stages, request.replicas)
        likely = [one for one in sorted(others, key=lambda one: others[one]) if orders(self.cluster, one)[1:]][:JOINED]
        best = min([*likely, *([found] if found else [])], key=self.time, default=None)
        return best if best is not None and self.time(best) < float("inf") else None

    def lightest(self) -> Layout | None:
        """The layout with the least memory that was found."""
        request = self.request
        return best_layout(self.problem, self.memory, self.memory, request.stages, request.replicas)

    def time(self, layout: Layout) -> float:
        """Predicted step time in seconds, infinite where the layout does not fit into memory."""
        limit = self.request.memory_limit
        if limit is not None and self.memory(layout) > limit:
            return float("inf")
        return self._time_of(layout, self._may_run_ahead(layout), self.placement(layout))

    def memory(self, layout: Layout) -> float:
        """Bytes that the fullest device holds at least."""
        return max(self.stage_memory(layout, self.request.run_ahead or False))

    def runs_ahead(self, layout: Layout) -> bool:
        """Whether one more microbatch in flight fits into memory and gains time, unless that is given."""
        if self.request.run_ahead is not None or not self._may_run_ahead(layout):
            return self.request.run_ahead or False
        order = self.placement(layout)
        ahead, usual = (self._time_of(layout, run_ahead, order) for run_ahead in (True, False))
        return ahead <= (1 - WORTH_RUNNING_AHEAD) * usual

    def placement(self, layout: Layout) -> Order:
        """How to number the ranks, and so which are on one machine: stage by stage, unless the other way gains time."""
        if self.request.placement is not None:
            return self.request.placement
        if layout not in self._placements:
            run_ahead = self._may_run_ahead(layout)
            found = {order: self._time_of(layout, run_ahead, order) for order in orders(self.cluster, layout)}
            pays = found.get("replicas", float("inf")) <= (1 - WORTH_RENUMBERING) * found["stages"]
            self._placements[layout] = "replicas" if pays else "stages"
        return self._placements[layout]

    def _may_run_ahead(self, layout: Layout) -> bool:
        if self.request.run_ahead is not None:
            return self.request.run_ahead
        limit = self.request.memory_limit
        return limit is None or max(self.stage_memory(layout, True)) <= limit

    def simulate(self, layout: Layout, run_ahead: bool, order: Order = "stages") -> Simulation:
        """The predicted step, with all of its tasks."""
        request = self.request
        tasks = timetable(layout.replicas, request.microbatches, request.schedule, run_ahead)
        passing = messages(self.costs, layout.cuts)
        return simulate(tasks, self._stages(layout), passing, placed(self.cluster, layout, order))

    def stage_memory(self, layout: Layout, run_ahead: bool) -> list[int]:
        """Bytes that a device of each stage holds at most: training state and activations in flight."""
        memory = []
        problem = self.problem
        for index, cost in enumerate(stage_costs(self.costs, layout.cuts)):
            state = self.request.state_copies * cost.parameter_bytes
            peak = problem.flights(layout.replicas, index, run_ahead)
            kept = 1 if problem.recomputes else peak
            memory.append(state + peak * cost.received_bytes + kept * cost.saved_bytes)
        return memory

    def _stages(self, layout: Layout) -> list[StageCost]:
        stages = stage_costs(self.costs, layout.cuts)
        if self.request.activation_checkpointing == "never":
            return stages
        return [replace(stage, backward=stage.forward + stage.backward) for stage in stages]

    def _time_of(self, layout: Layout, run_ahead: bool, order: Order) -> float:
        """Predicted step time in seconds, by simulation.

        Where that is long, of one of several equal pipelines beside each other, and of fewer microbatches, from which
        the period is known.
        """
        request = self.request
        if 2 * request.microbatches * len(layout.replicas) <= LONGEST:
            return self.simulate(layout, run_ahead, order).step_time
        beside = gcd(*layout.replicas)
        replicas = tuple(count // beside for count in layout.replicas)
        microbatches = -(-request.microbatches // beside)
        stages, passing = self._stages(layout), messages(self.costs, layout.cuts)
        cluster = placed(self.cluster, layout, order)
        firsts = [sum(layout.replicas[:stage]) for stage in range(len(replicas))]
        reductions = [all_reduce(cluster, first, count) for first, count in zip(firsts, layout.replicas, strict=True)]
        one = one_of_equal(cluster, layout.replicas, beside)

        def time(count: int) -> float:
            tasks = timetable(replicas, count, request.schedule, run_ahead)
            return simulate(tasks, stages, passing, one, reductions=reductions).step_time

        most = LONGEST // (2 * len(replicas))
        if microbatches <= most:
            return time(microbatches)
        period = lcm(*replicas)
        if 2 * period + sum(replicas) <= most:
            # Filled, and with the same remainder as the whole step.
            warm = sum(replicas) + (microbatches - sum(replicas)) % period
            first, second = time(warm), time(warm + period)
            return second + (second - first) * (microbatches - warm - period) / period
        problem = self.problem
        shorter = replace(problem, request=replace(request, microbatches=most * beside))
        return time(most) * problem.model(layout) / shorter.model(layout)


def find_layout(predictor: Predictor) -> Layout:
    """The layout with the least predicted step time, or the one that the request names.

    Raises:
        ConfigurationError: No layout fits into memory.
    """
    request = predictor.request
    layout = predictor.fixed_layout() or predictor.search()
    if layout is not None and predictor.time(layout) < float("inf"):
        return layout
    smallest = predictor.fixed_layout() or predictor.lightest()
    assert smallest is not None, "without a limit some layout exists, since there are enough places to cut"
    raise ConfigurationError(
        f"memory_limit={request.memory_limit}: on {request.devices} devices with {request.microbatches} "
        f"microbatches a device needs {predictor.memory(smallest):.0f} bytes; raise the limit, use more stages "
        "or microbatches, or set activation_checkpointing='always'"
    )


def predictor_for(job: Job, microbatches: int, stages: int | None = None, placement: Order | None = None) -> Predictor:
    """What predicts the layouts of a job, in ``plan`` and in ``fit``.

    Args:
        job: What is planned for.
        microbatches: Of a step.
        stages: Their number; chosen when None.
        placement: How ranks are numbered; chosen when None.
    """
    request = Request(
        devices=job.cluster.devices,
        microbatches=microbatches,
        schedule=job.schedule,
        stages=stages,
        replicas=job.replicas,
        cuts=job.cuts,
        memory_limit=job.memory,
        activation_checkpointing=job.activation_checkpointing,
        run_ahead=job.run_ahead,
        state_copies=job.state_copies,
        placement=placement,
    )
    return Predictor(job.profile.at(job.samples / microbatches), job.cluster, request)


def choose_layout(
    job: Job, microbatches: int, stages: int | None = None, placement: Order | None = None
) -> tuple[Layout, bool]:
    """The layout with the least predicted step time that a job permits, and whether its stages run ahead.

    Since times vary, two profiles may lead to different ones: in a distributed run one rank chooses and tells the
    others.

    Args:
        job: The network, the machines and what the user has fixed.
        microbatches: Of a step.
        stages: Their number; chosen when None.
        placement: How ranks are numbered; chosen when None.

    Raises:
        ConfigurationError: No layout fulfils the request.
    """
    predictor = predictor_for(job, microbatches, stages, placement)
    check_request(predictor.costs, predictor.request)
    layout = find_layout(predictor)
    return layout, predictor.runs_ahead(layout)
