"""Run this rank's stage of a divided network: its tasks in order, its messages, buffers and stored values."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from cnnstrategies.pipeline.buffers import StageBuffers
from cnnstrategies.pipeline.channels import Channels
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.early_sums import EarlySums
from cnnstrategies.pipeline.interleaved_batch import InterleavedBatch, Interleaving
from cnnstrategies.pipeline.replicas import StageReplicas
from cnnstrategies.pipeline.stage import StageGraph, connections, put_module_at
from cnnstrategies.pipeline.stored_terms import StoredTerms
from cnnstrategies.pipeline.stored_watch import WatchState
from cnnstrategies.pipeline.storing_code import any_may_store, function_may_store
from cnnstrategies.pipeline.task_times import TaskTimes, run_tasks
from cnnstrategies.pipeline.timetable import KINDS, SCHEDULES, Checkpointing, Kind, Placement, Schedule, Task, turns
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.pipeline.whole_batch import CallArguments, WholeBatch
from cnnstrategies.placed import Places

SCHEDULE: Schedule = "gpipe"


class StageRunner:
    """Runs this rank's microbatches of a stage of a divided network.

    Args:
        division: Division of the network. Parameters and buffers of other stages are not used.
        transport: Connections of this rank. Its placement determines the replicas and the number of microbatches.
        ahead: Number of turns before a task at which the receive of the task's message begins; see
            :data:`~cnnstrategies.pipeline.channels.AHEAD`.
        replicas: The replicas of the stage, if the stage of another network has them already.

    Attributes:
        schedule: Order of the tasks in the last batch with a backward.
        run_ahead: Whether stages hold one additional microbatch in the order 1F1B; see `timetable.turns`.
        replicas: The replicas of the stage.
        times: Measures the spans of this rank's stage.
        sizes: Number of samples of each microbatch of the last batch.
        usual: Number of samples of a training batch of the usual size; 0 if it is not known. A smaller batch is divided
            into fewer microbatches, because BatchNorm needs several samples in each microbatch.
        microbatches: Number of microbatches into which batches are divided, at most the placement's number.
        activation_checkpointing: Which of this rank's forwards run again for the backward, so that only their inputs
            are kept: none (``never``), all except the last (``except_last``), or all (``always``). All ranks have the
            same value.
        changes_inputs: Whether the stage changes its arguments in place, so that forwards that run again need copies.
        compared_forms: Forms of batches for which the results of first and second forwards have been compared.
        ready_orders: By the form of a batch, the indices of :attr:`parameters` in the order in which a backward gives
            them their gradients.
        drawn: Names of the generators from which a stage has drawn in earlier calls, as all ranks know.
        early: Sums over the replicas that the next backwards to run begin; None if they begin none.
        terms: The watch over what the stage stores, after :meth:`watch`.
        unseen_draws: Number of calls in which this rank has drawn random numbers, but the generators have not advanced
            on all ranks. It enters the seeds, so that the next call does not draw the same numbers.
    """

    schedule: Schedule = SCHEDULE
    terms: StoredTerms

    def __init__(
        self, division: Division, transport: Transport, ahead: int, replicas: StageReplicas | None = None
    ) -> None:
        self.division, self.transport, self.ahead = division, transport, ahead
        placement = transport.placement
        self.stage = transport.place.stage
        self.last = self.stage == placement.stages - 1
        self.microbatches = placement.microbatches
        self.activation_checkpointing: Checkpointing = "never"
        self.changes_inputs = False
        self.compared_forms: set[Hashable] = set()
        self.ready_orders: dict[Hashable, list[int]] = {}
        self.early: EarlySums | None = None
        self.unseen_draws = 0
        self.drawn: set[str] = set()
        self.replicas = replicas or StageReplicas(transport)
        self.times = TaskTimes(transport)
        self.sizes: Sequence[int] = ()
        self.usual = 0
        self.run_ahead = False
        self._planned: tuple[Placement, bool] | None = None
        self._plan()
        graph = division.graphs()[self.stage]
        self.channels = Channels(graph, self._turns["gpipe"], transport, ask_for_all=True)
        module, calls = _modules_of(division, graph)
        self.buffers = StageBuffers(module, self.replicas.group, calls)
        # The graphs of all stages, the modules that they call, and whether their own operations may store something.
        self._called: tuple[Any, list[nn.Module], bool] = (None, [], True)

    @property
    def placement(self) -> Placement:
        """Numbering of the ranks."""
        return self.transport.placement

    @property
    def tasks(self) -> list[Task]:
        """Tasks of this rank for a batch, in order. They change with the shares of the placement."""
        self._plan()
        return self._tasks[self.schedule]

    def _plan(self) -> None:
        """Find the order of this rank's tasks, if the placement or :attr:`run_ahead` has changed."""
        placement = self.placement
        if self._planned == (placement, self.run_ahead):
            return
        self._planned = placement, self.run_ahead
        self._turns = {
            schedule: turns(placement.replicas, placement.microbatches, schedule, self.run_ahead and schedule == "1f1b")
            for schedule in SCHEDULES
        }
        microbatches = placement.microbatches_of(self.transport.rank)
        tasks = [Task(kind, self.stage, microbatch) for kind in KINDS for microbatch in microbatches]
        self._tasks = {schedule: sorted(tasks, key=turn) for schedule, turn in self._turns.items()}

    @property
    def connections(self) -> list[tuple[int, int]]:
        """Pairs of stages, the first of which sends its outputs to the second."""
        return connections(self.division.graphs())

    @contextmanager
    def under(self, placement: Placement) -> Iterator[None]:
        """Return a context for work with a placement that was current when a batch began."""
        current, self.transport.placement = self.placement, placement
        try:
            yield
        finally:
            self.transport.placement = current

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters of this stage that the network uses, in the order of the network."""
        division = self.division
        return [
            tensor
            for name, stage, tensor in division.parameters()
            if stage == self.stage and tensor.requires_grad and name in division.used
        ]

    def close(self) -> None:
        """Destroy the process group of the replicas, and drop references to it, so that its threads end.

        All ranks must call this, after the last step.
        """
        self.replicas.close()
        self.buffers.group = None

    def watch(self, owner: nn.Module, places: Places, ranks: Sequence[tuple[int, ...]]) -> None:
        """Take care of what forwards store on modules from now on. Call this before the first batch.

        Args:
            owner: The module in which forwards may store values: the network, or a module that contains it.
            places: The rules of this rank.
            ranks: For each stage, the ranks of its replicas.
        """
        self.terms = StoredTerms(self, owner, places, ranks)
        self.buffers.copies_others = False

    def run_stage(self, *arguments: Any) -> Any:
        """Return the result of this rank's stage."""
        return self.division.run(self.stage, *arguments)

    def run_for_probe(self, *arguments: Any) -> Any:
        """Return the result of this rank's stage for a probe, which BatchNorm layers must not count."""
        with self.buffers.microbatch(again=True):
            return self.run_stage(*arguments)

    def may_store(self, state: WatchState) -> bool:
        """Whether a forward of any stage may store something. The answer is the same on all ranks.

        Args:
            state: The state of the network.
        """
        graphs = self.division.graphs()
        if self._called[0] is not graphs:
            network = self.division.network
            nodes = [node for graph in graphs for node in graph.graph.nodes]
            modules = [network.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"]
            stores = any(function_may_store(node.target) for node in nodes if node.op == "call_function") or any(
                str(node.target).endswith("_") for node in nodes if node.op == "call_method"
            )
            self._called = graphs, list({id(m): m for root in modules for m in root.modules()}.values()), stores
        _, called, stores = self._called
        return stores or any_may_store(called, state)

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Replace gradients by their sums over the replicas. All replicas must call this."""
        with self.times.timed("reduce"):
            self.replicas.sum_in_place(gradients)

    @property
    def first_ranks(self) -> list[int]:
        """For each stage, the rank that runs the first microbatch."""
        return [self.placement.rank_of(stage, 0) for stage in range(self.placement.stages)]

    def begin(self, call: CallArguments, interleaving: Interleaving | None = None, whole: bool = False) -> WholeBatch:
        """Run all forwards of a batch. All ranks must call this.

        Args:
            call: The arguments of the call.
            interleaving: Functions with which all backwards run as well, in the order 1F1B.
            whole: Whether the batch is one microbatch.

        Raises:
            NeedsOneMicrobatchError: A stage needs the batch as one microbatch. All ranks raise this error.
        """
        graph = self.division.graphs()[self.stage]
        if graph is not self.channels.graph:
            # The state of an opened container has changed, on all ranks. Other values may cross the cuts now.
            self.channels.graph = graph
            self.channels.forget_headers()
        if call.needs_gradient:
            self.schedule = SCHEDULE if interleaving is None else "1f1b"
        if interleaving is not None:
            batch: WholeBatch = InterleavedBatch(self, call, interleaving)
        else:
            batch = WholeBatch(self, call, 1 if whole else self.microbatches)
        self.sizes = batch.sizes
        return batch

    def run_tasks(
        self,
        kinds: Sequence[Kind],
        schedule: Schedule,
        sizes: Sequence[int],
        key: Callable[[int], Hashable],
        run: Callable[[Task], None],
    ) -> None:
        """Run forwards, backwards, or both, of the microbatches that have samples. All ranks must call this.

        Args:
            kinds: Kinds of the tasks.
            schedule: Order of the tasks.
            sizes: Number of samples of each microbatch.
            key: Function that returns the size key of a microbatch; see `Channels.plan`.
            run: Function that runs a task.
        """
        self._plan()
        tasks = [task for task in self._tasks[schedule] if task.kind in kinds and sizes[task.microbatch]]
        self.channels.turn = self._turns[schedule]
        run_tasks(self.channels, tasks, key, self.ahead, run, self.times.timed)
        with self.times.timed("send"):
            self.channels.finish()


def _modules_of(division: Division, graph: StageGraph) -> tuple[nn.Module, Counter[str]]:
    """Return a module with the stage's modules, and the number of calls of each module in a forward of the stage."""
    module = nn.Module()
    calls = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_module")
    for path in calls:
        put_module_at(module, path, division.network.get_submodule(path))
    return module, calls
