"""A worker of a node whose workers push and pull as one."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.paramserver.api import Worker
from cnnstrategies.paramserver.combiner.shared_state import NEVER, SharedState
from cnnstrategies.paramserver.core.view import RemovedError, ServersUnreachableError
from cnnstrategies.paramserver.drivers.staging import staging_for
from cnnstrategies.paramserver.worker.codecs import Codecs
from cnnstrategies.paramserver.worker.connections import Counters


class CombinedWorker:
    """A worker with the interface of a :class:`~cnnstrategies.paramserver.api.Worker`, for ``mode: sync``.

    The live worker of the lowest rank leads the node: it pushes the mean of the node's gradients as one worker, and
    publishes the new values in shared memory (hierarchical aggregation, as in BytePS: Jiang et al., OSDI 2020). If the
    leader dies, the next worker takes its place. It pushes the step's gradients, which are still in shared memory, once
    more if the servers have not made the step. Steps that the servers have made meanwhile are skipped.

    Args:
        rank: Rank of this worker.
        boards: Shared state of the node's workers by rank, this worker included.
        parameters: The parameters in the specification's order; new values are written into them, in place.
        connect: Connects to the servers. Its argument is a function to call with the index and value of each parameter
            that arrives.
        alive: Returns the ranks of the live workers, as far as this process knows.
        pause: Called repeatedly while this worker waits.
        codecs: Compressions of pushes and pulls, reported by workers that do not lead.

    Attributes:
        step: Number of the step that is or will be worked on next.
    """

    def __init__(
        self,
        rank: int,
        boards: Mapping[int, SharedState],
        parameters: Sequence[Tensor],
        connect: Callable[[Callable[[int, Tensor], None]], Worker],
        alive: Callable[[], Collection[int]],
        pause: Callable[[], None],
        codecs: Codecs,
    ) -> None:
        self.step = 0
        self._rank = rank
        self._own_state = boards[rank]
        self._states = boards
        self._parameters = parameters
        self._connect = connect
        self._alive = alive
        self._pause = pause
        self._codecs = codecs
        self._engine: Worker | None = None
        self._leader: int | None = None  # rank of the worker whose published values are taken
        self._value_marks = [NEVER] * len(parameters)  # marks of this worker's values
        self._exact = False  # The values to wait for are the servers' own, without rounding.
        self._first_state: tuple[Mapping[str, Any] | None] | None = None
        self._batches_to_skip = 0  # of steps that were made without this node
        self._groups: Sequence[Mapping[str, Any]] = ()
        # By rank, samples of the step that is summed; None until all workers of the node have begun the step.
        self._weights: dict[int, float] | None = None
        self._open: dict[int, None] = {}  # parameters that this worker, as leader, still has to push, in order
        self._sums: list[Tensor | None] = [None] * len(parameters)  # memory that is reused in each step
        self._staging = staging_for(parameters)
        self._counters = Counters()
        self._waited = 0.0  # seconds of waiting for the node's other workers

    @property
    def leader(self) -> int | None:
        """Rank of the worker whose values are taken; a new leader's values may be those of a later step."""
        return self._leader

    @property
    def codecs(self) -> Codecs:
        """Compressions of pushes and pulls."""
        return self._codecs if self._engine is None else self._engine.codecs

    @property
    def counters(self) -> Counters:
        """Bytes, steps and times of this worker; only the leader sends and receives over the network."""
        counters = self._counters
        counters.seconds_waited = self._waited
        if self._engine is not None:
            node = self._engine.counters
            counters.bytes_sent, counters.bytes_received = node.bytes_sent, node.bytes_received
            counters.seconds_waited += node.seconds_waited
        return counters

    # Beginning

    def initialise(self, optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Begin the run with the values of the parameters, directly before :meth:`join`."""
        self._first_state = (optimizer_state,)

    def join(self) -> int:
        """Take part from the node's next step on, and take its parameters; return the step (:attr:`step`)."""
        self._follow_leader()
        if self._engine is None:
            # The servers wait some seconds for workers that have not greeted them. And if this worker cannot reach
            # them, the error should come now, and not when it has to lead.
            visitor = self._connect(lambda index, value: None)
            visitor.meet()
            visitor.close()
        self.wait_all()
        return self.step

    # Steps

    @property
    def late(self) -> bool:
        """Whether the next batch belongs to a step that was made without this node."""
        return self._batches_to_skip > 0

    def catch_up(self) -> int:
        """Return the number of late batches, which the caller must skip; this worker no longer skips them itself."""
        skipped, self._batches_to_skip = self._batches_to_skip, 0
        self._counters.dropped += skipped
        self._counters.steps += skipped
        return skipped

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Start a step, whose gradients follow."""
        # A worker that was taken for dead must find out in each step, even if it need not wait for anything.
        self._follow_leader()
        self.wait_all()
        if self._batches_to_skip:
            return
        self._groups = groups
        self._counters.samples += samples
        self._own_state.begin(self.step, samples)
        self._weights = None
        self._open.clear()
        if self._engine is not None:
            self._push_means(self._engine)

    def push(self, index: int, gradient: Tensor) -> None:
        """Publish a parameter's gradient for the node's leader."""
        if self._batches_to_skip:
            return
        if self._staging is None:
            self._publish(index, gradient)
        else:
            self._staging.fetch(index, gradient)
            self._publish_fetched()

    def _publish(self, index: int, gradient: Tensor) -> None:
        self._own_state.give(index, gradient, self.step)
        if self._engine is not None:
            self._open[index] = None
            self._push_means(self._engine)

    def _publish_fetched(self, wait: bool = False) -> None:
        """Publish the gradients that have arrived from the device."""
        if self._staging is not None:
            for index, gradient in self._staging.fetched(wait):
                self._publish(index, gradient)

    def end_step(self) -> None:
        """Finish the step: parameters that were not pushed have no gradient."""
        self._counters.steps += 1
        if self._batches_to_skip:
            self._batches_to_skip -= 1
            self._counters.dropped += 1
            return
        self._publish_fetched(wait=True)
        self._own_state.end(self.step)
        if self._engine is not None:
            self._finish(self._engine)
        self.step += 1
        self._exact = False

    # The step's mean gradients, if this worker leads

    def _push_means(self, engine: Worker) -> bool:
        """Push the gradients that all workers of the node have published, and return whether all are pushed."""
        step = self._own_state.begun
        states = {rank: self._states[rank] for rank in self._alive() if rank in self._states}
        if self._weights is None:
            if any(state.begun < step for state in states.values()):
                return False
            self._weights = {rank: state.samples for rank, state in states.items()}
            engine.begin_step(self._groups, sum(self._weights.values()))
        unfinished = [state for state in states.values() if state.ended < step]
        for index in list(self._open):
            if all(state.has_given(index, step) for state in unfinished):
                del self._open[index]
                mean = self._mean(index, step, states.keys(), self._weights)
                if mean is not None:
                    engine.push(index, mean)
        return not self._open

    def _mean(self, index: int, step: int, alive: Collection[int], weights: Mapping[int, float]) -> Tensor | None:
        """Return a parameter's mean gradient, weighted by samples; None if no worker has one.

        A worker that dies during the step takes part with the gradients that it has published.
        """
        published = {rank: weight for rank, weight in weights.items() if self._states[rank].has_given(index, step)}
        if not published:
            return None
        # A live worker without a gradient counts as zeros, as in the mean over a run's workers.
        total = sum(weight for rank, weight in weights.items() if rank in alive or rank in published)
        parts = [(weight, self._states[rank].gradients[index]) for rank, weight in sorted(published.items())]
        if parts[0][0] == total:
            return parts[0][1]
        mean = self._sums[index]
        if mean is None:
            mean = self._sums[index] = torch.empty_like(parts[0][1])
        torch.mul(parts[0][1], parts[0][0] / total, out=mean)
        for weight, gradient in parts[1:]:
            mean.add_(gradient, alpha=weight / total)
        return mean

    def _finish(self, engine: Worker) -> None:
        """Wait for the other workers' gradients, and push the rest, also of parameters without a gradient here."""
        step = self._own_state.begun
        missing = [index for index in range(len(self._sums)) if not self._own_state.has_given(index, step)]
        self._open.update(dict.fromkeys(missing))
        while not self._push_means(engine):
            self._follow_leader()
            self._pause_once()
        engine.end_step()

    # Waiting

    def wait(self, index: int) -> None:
        """Wait until one parameter is up to date."""
        while self._engine is None and self._value_marks[index] < self._mark:
            if not self._take(index):
                self._follow_leader()
                self._pause_once()
        if self._engine is not None:
            self._engine.wait(index)
        elif self._staging is not None:
            self._staging.before_use(index)

    def wait_all(self) -> None:
        """Wait until all parameters are up to date. Raises the same errors as :meth:`wait`."""
        # A new leader may have other values: then wait again.
        while self._engine is None and min(self._value_marks, default=self._mark) < self._mark:
            for index in range(len(self._parameters)):
                self.wait(index)
        if self._engine is not None:
            self._engine.wait_all()

    def refresh(self) -> None:
        """Take the servers' present values, which no step changes meanwhile. Raises the same errors as :meth:`wait`."""
        self.wait_all()
        self._exact = True
        if self._engine is not None:
            self._engine.refresh()
        self.wait_all()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the servers' optimizer state; only rank 0 may call this method, because it leads its node."""
        assert self._engine is not None, "the lowest rank leads"
        return self._engine.optimizer_state()

    def interrupt(self) -> None:
        """Note that the time to the next step contains more than training."""
        if self._engine is not None:
            self._engine.interrupt()

    def close(self) -> None:
        """Close the sockets; nothing is sent afterwards."""
        if self._engine is not None:
            self._engine.close()

    @property
    def _mark(self) -> int:
        """Mark of the values to wait for: even for values as steps use them, odd for the servers' own values."""
        return 2 * self.step + self._exact

    def _take(self, index: int) -> bool:
        """Take a parameter's value if the leader has published it, and return whether it has."""
        if self._leader is None or not self._states[self._leader].shows(index, self._mark):
            return False
        value = self._states[self._leader].values[index]
        if self._staging is None:
            self._parameters[index].copy_(value)
        else:
            self._staging.put(index, value)
        self._value_marks[index] = self._mark
        return True

    def _pause_once(self) -> None:
        began = time.monotonic()
        self._pause()
        self._waited += time.monotonic() - began

    # The leader

    def _follow_leader(self) -> None:
        """Find the node's leader, and begin to lead if it is this worker.

        Raises:
            RemovedError: This worker was taken for dead.
        """
        alive = self._alive()
        if self._rank not in alive:
            raise RemovedError(f"worker {self._rank} was taken for dead: it must join again as a new incarnation")
        leader = min(rank for rank in self._states if rank in alive)
        if leader == self._leader:
            return
        if leader == self._rank:
            self._lead()
        elif self._states[leader].led != NEVER:
            self._leader = leader
            self._go_on_with(self._states[leader].led)

    def _lead(self) -> None:
        """Connect to the servers as the node's leader, and finish the step that the last leader has not finished."""
        self._leader, self._exact = self._rank, True
        if self._staging is not None:
            self._staging.settle()  # From now on, values arrive over the connection.
        self._engine = self._connect(self._on_arrival)
        if self._first_state is not None and not self.step:
            self._engine.initialise(*self._first_state)
        step = self._engine.join(self.step - 1 if self.step else None)
        self._own_state.lead(step)
        if self.step == step + 1:
            # The servers have not finished the step whose gradients the node's workers have published, or will publish.
            self._weights, self._open = None, dict.fromkeys(range(len(self._sums)))
            self._finish(self._engine)
            self._exact = False
        else:
            self._go_on_with(step)

    def _go_on_with(self, step: int) -> None:
        """Go on with the leader's step, and skip the batches of steps that were made without this worker.

        Raises:
            ServersUnreachableError: The servers have lost steps.
        """
        if step > self.step:
            self._batches_to_skip += step - self.step
            self.step = step
        elif step < self.step - 1:
            raise ServersUnreachableError(
                f"the servers are at step {step} again, and this node had begun step {self.step}: the gradients of the "
                "steps between are gone; start the run from its last checkpoint"
            )

    def _on_arrival(self, index: int, value: Tensor) -> None:
        """Publish a value that has arrived from the servers."""
        assert self._engine is not None
        self._own_state.show(index, value, 2 * self._engine.step + self._exact)
