"""A worker for nodes on which one leader pushes and pulls for all workers of the node."""

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
from cnnstrategies.paramserver.worker.counters import Counters
from cnnstrategies.runtime.waiting import waiting


class CombinedWorker:
    """A worker with the interface of a :class:`~cnnstrategies.paramserver.api.Worker`, for ``mode: sync``.

    The node's leader is the live worker with the lowest rank. The leader pushes the mean of the node's gradients, and
    publishes the new values in shared memory, so the servers see one worker per node (hierarchical aggregation, as in
    BytePS: Jiang et al., OSDI 2020).

    If the leader dies, the live worker with the next higher rank becomes the leader. All gradients of the step are
    still in shared memory, so the new leader pushes their mean again if the servers have not finished the step. If the
    servers have made steps without this node, the node's workers skip the batches of these steps.

    Args:
        rank: Rank of this worker.
        states: By rank: the shared state of each worker of the node, including this worker.
        parameters: The parameters in the specification's order. New values are written into these tensors.
        connect: Function that creates the node's connection to the servers. Its argument is a callback, which the
            connection calls with the index and the new value of each parameter that arrives.
        alive: Function that returns the ranks of the live workers, as far as this process knows.
        pause: Function that is called repeatedly while this worker waits for other workers of the node. It should sleep
            for a short time.
        codecs: Value of the property :attr:`codecs` while this worker does not lead.

    Attributes:
        step: Number of the step that this worker works on, or will work on next.
        parameters: The tensors into which received values are written, in the order of the specification.
    """

    def __init__(
        self,
        rank: int,
        states: Mapping[int, SharedState],
        parameters: Sequence[Tensor],
        connect: Callable[[Callable[[int, Tensor], None]], Worker],
        alive: Callable[[], Collection[int]],
        pause: Callable[[], None],
        codecs: Codecs,
    ) -> None:
        self.step = 0
        self._rank = rank
        self._own_state = states[rank]
        self._states = states
        self.parameters = parameters
        self._connect = connect
        self._alive = alive
        self._pause = pause
        self._codecs = codecs
        self._engine: Worker | None = None
        # Rank of the leader whose published values this worker uses; None before a leader is known.
        self._leader: int | None = None
        self._value_marks = [NEVER] * len(parameters)  # By parameter index: mark of the parameter's value.
        self._exact = False  # whether to wait for the servers' exact values, which no compression has rounded
        self._first_state: tuple[Mapping[str, Any] | None] | None = None
        self._last_message = 0  # sequence number of the last message that this worker has sent before it leads
        self._batches_to_skip = 0  # number of batches to skip, because their steps were made without this node
        self._groups: Sequence[Mapping[str, Any]] = ()
        # By rank: number of samples in the current step; None until all workers of the node have begun the step.
        self._weights: dict[int, float] | None = None
        # Indices of the parameters whose mean gradients this leader still has to push, in the order of the pushes.
        self._open: dict[int, None] = {}
        # By parameter index: buffer for the mean gradient; None before the buffer is needed.
        self._sums: list[Tensor | None] = [None] * len(parameters)
        self._staging = staging_for(parameters)
        self._counters = Counters()
        self._waited = 0.0  # seconds spent waiting for other workers of the node

    @property
    def leader(self) -> int | None:
        """Rank of the leader whose published values this worker uses; None before a leader is known.

        After a change of the leader, the worker may have to skip some batches; see :meth:`catch_up`.
        """
        return self._leader

    @property
    def codecs(self) -> Codecs:
        """The current compressions of pushes and pulls."""
        return self._codecs if self._engine is None else self._engine.codecs

    @property
    def counters(self) -> Counters:
        """Counters of this worker's traffic, steps and waiting time. Only a leader has traffic with the servers."""
        counters = self._counters
        counters.seconds_waited = self._waited
        if self._engine is not None:
            node = self._engine.counters
            counters.bytes_sent, counters.bytes_received = node.bytes_sent, node.bytes_received
            counters.seconds_waited += node.seconds_waited
        return counters

    # Start of the run

    def initialise(self, optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Store the optimizer's state with which the run is to start.

        If this worker is its node's leader at the first step, it passes the state on to its connection with the
        servers. The parameters must not change before :meth:`join`.

        Args:
            optimizer_state: A plain ``Optimizer.state_dict()`` over all parameters; None if the optimizer has no state.
        """
        self._first_state = (optimizer_state,)

    def join(self) -> int:
        """Take part in the node's steps, and wait for the parameters.

        Returns:
            The step with which this worker begins, which is also in :attr:`step`.
        """
        self._follow_leader()
        if self._engine is None:
            # Servers wait some seconds for a HELLO from each worker, so this worker connects to the servers once and
            # sends HELLO. A worker that cannot reach the servers thus fails now, and not only when it becomes the
            # leader.
            visitor = self._connect(lambda index, value: None)
            visitor.meet()
            self._last_message = visitor.last_message
            visitor.close()
        self.wait_all()
        return self.step

    # Steps

    @property
    def late(self) -> bool:
        """Whether the next batch belongs to a step that the servers have already made without this node."""
        return self._batches_to_skip > 0

    def catch_up(self) -> int:
        """Return the number of batches that the caller must skip, because their steps were made without this node.

        If the caller does not call this method, :meth:`begin_step`, :meth:`push` and :meth:`end_step` skip these
        batches.
        """
        skipped, self._batches_to_skip = self._batches_to_skip, 0
        self._counters.dropped += skipped
        self._counters.steps += skipped
        return skipped

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Begin a step. The gradients that are pushed next belong to this step.

        Args:
            groups: Hyperparameters of each parameter group.
            samples: Number of samples in this worker's batch.
        """
        # This call raises an error if the coordinator counts this worker as dead. `wait_all` alone does not check this
        # if all parameters are up to date.
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
        """Publish a parameter's gradient in shared memory. The leader pushes the mean of the node's gradients.

        Args:
            index: Index of the parameter.
            gradient: The parameter's gradient, with the parameter's shape and dtype.
        """
        if self._batches_to_skip:
            return
        if self._staging is None:
            self._publish(index, gradient)
        else:
            self._staging.fetch(index, gradient)
            self._publish_fetched()

    def _publish(self, index: int, gradient: Tensor) -> None:
        self._own_state.publish_gradient(index, gradient, self.step)
        if self._engine is not None:
            self._open[index] = None
            self._push_means(self._engine)

    def _publish_fetched(self, wait: bool = False) -> None:
        """Publish the gradients that have been copied from the GPU to CPU memory.

        Args:
            wait: Whether to wait for all copies, and publish all gradients. Otherwise only gradients that have already
                been copied are published.
        """
        if self._staging is not None:
            for index, gradient in self._staging.fetched(wait):
                self._publish(index, gradient)

    def end_step(self) -> None:
        """End the step. Parameters whose gradients were not pushed have no gradient in this step."""
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

    # The node's mean gradients, which the leader pushes

    def _push_means(self, engine: Worker) -> bool:
        """Push the mean of each gradient that all workers of the node have published.

        Returns:
            Whether the leader has pushed the gradients of all parameters.
        """
        step = self._own_state.begun
        states = {rank: self._states[rank] for rank in self._alive() if rank in self._states}
        if self._weights is None:
            if any(state.begun < step for state in states.values()):
                return False
            self._weights = {rank: state.samples for rank, state in states.items()}
            engine.begin_step(self._groups, sum(self._weights.values()))
        unfinished = [state for state in states.values() if state.ended < step]
        for index in list(self._open):
            if all(state.has_gradient(index, step) for state in unfinished):
                del self._open[index]
                mean = self._mean(index, step, states.keys(), self._weights)
                if mean is not None:
                    engine.push(index, mean)
        return not self._open

    def _mean(self, index: int, step: int, alive: Collection[int], weights: Mapping[int, float]) -> Tensor | None:
        """Return the mean of the node's gradients of a parameter, weighted by the workers' numbers of samples.

        The mean contains the gradients that a worker published before it died. Return None if no worker has published a
        gradient of the parameter.

        Args:
            index: Index of the parameter.
            step: Number of the step.
            alive: Ranks of the node's live workers.
            weights: By rank: number of samples of the worker's batch.
        """
        published = {rank: weight for rank, weight in weights.items() if self._states[rank].has_gradient(index, step)}
        if not published:
            return None
        # A missing gradient of a live worker counts as zeros, as in the mean that the servers compute over the nodes.
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
        """Wait for the gradients of the node's other workers, push all remaining means, and end the leader's step."""
        step = self._own_state.begun
        missing = [index for index in range(len(self._sums)) if not self._own_state.has_gradient(index, step)]
        self._open.update(dict.fromkeys(missing))
        while not self._push_means(engine):
            self._follow_leader()
            self._pause_once()
        engine.end_step()

    # Waiting

    def wait(self, index: int) -> None:
        """Wait until one parameter is up to date.

        Raises:
            ServersUnreachableError: This worker leads and has received nothing from the servers within the time-out, or
                the servers have lost steps.
            RemovedError: The coordinator counts this worker as dead.
        """
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
        # If the leader changes during the wait, `_mark` may grow. The loop then waits for all values again.
        while self._engine is None and min(self._value_marks, default=self._mark) < self._mark:
            for index in range(len(self.parameters)):
                self.wait(index)
        if self._engine is not None:
            self._engine.wait_all()

    def refresh(self) -> None:
        """Write the servers' current values into the parameters. Call this between steps.

        Raises the same errors as :meth:`wait`.
        """
        self.wait_all()
        self._exact = True
        if self._engine is not None:
            self._engine.refresh()
        self.wait_all()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the servers' optimizer state. Only rank 0 may call this, because rank 0 always leads its node."""
        assert self._engine is not None, "the lowest rank leads"
        return self._engine.optimizer_state()

    def interrupt(self) -> None:
        """Report that something other than training happens before the next step, such as validation.

        The time between the last step and the next step is then not used to choose compressions under ``auto``.
        """
        if self._engine is not None:
            self._engine.interrupt()

    def close(self) -> None:
        """Close the connection to the servers. A worker that is not the leader has no connection."""
        if self._engine is not None:
            self._engine.close()

    @property
    def _mark(self) -> int:
        """Mark of the values for which this worker must wait.

        The mark of values that a compression may have rounded is twice the number of the values' step. The mark of the
        servers' exact values is twice the number of the step plus 1.
        """
        return 2 * self.step + self._exact

    def _take(self, index: int) -> bool:
        """Copy a parameter's value from the leader's shared state, if the leader has published it.

        Returns:
            Whether the value was copied.
        """
        if self._leader is None or not self._states[self._leader].has_value(index, self._mark):
            return False
        value = self._states[self._leader].values[index]
        if self._staging is None:
            self.parameters[index].copy_(value)
        else:
            self._staging.put(index, value)
        self._value_marks[index] = self._mark
        return True

    def _pause_once(self) -> None:
        began = time.monotonic()
        with waiting("servers"):
            self._pause()
        self._waited += time.monotonic() - began

    # Change of the node's leader

    def _follow_leader(self) -> None:
        """Determine the node's leader. If this worker must lead now, become the leader.

        Raises:
            RemovedError: The coordinator counts this worker as dead.
            ServersUnreachableError: The servers do not reply, or have lost steps.
        """
        alive = self._alive()
        if self._rank not in alive:
            raise RemovedError(f"worker {self._rank} counts as dead: start the worker again as a new incarnation")
        leader = min(rank for rank in self._states if rank in alive)
        if leader == self._leader:
            return
        if leader == self._rank:
            self._lead()
        elif self._states[leader].led != NEVER:
            self._leader = leader
            self._go_on_with(self._states[leader].led)

    def _lead(self) -> None:
        """Become the node's leader: connect to the servers.

        If the servers have not finished the previous leader's step, push the node's gradients of this step again.
        """
        self._leader, self._exact = self._rank, True
        if self._staging is not None:
            # From now on, the connection copies new values to the GPU, so finish this object's own copies first.
            self._staging.settle()
        self._engine = self._connect(self._on_arrival)
        # Servers drop messages whose numbers are not larger than those of this worker's earlier messages.
        self._engine.last_message = self._last_message
        if self._first_state is not None and not self.step:
            self._engine.initialise(*self._first_state)
        step = self._engine.join(self.step - 1 if self.step else None)
        self._own_state.lead(step)
        if self.step == step + 1:
            # The servers have not finished `step`, and this worker has already published its gradients of `step`. Push
            # the mean of the node's gradients of `step` again.
            self._weights, self._open = None, dict.fromkeys(range(len(self._sums)))
            self._finish(self._engine)
            self._exact = False
        else:
            self._go_on_with(step)

    def _go_on_with(self, step: int) -> None:
        """Continue at a new leader's first step. Skip the batches of steps that were made without this node.

        Args:
            step: Number of the new leader's first step.

        Raises:
            ServersUnreachableError: The servers have lost steps.
        """
        if step > self.step:
            self._batches_to_skip += step - self.step
            self.step = step
        elif step < self.step - 1:
            raise ServersUnreachableError(
                f"the servers have gone back to step {step}, but this node has already begun step {self.step}, and the "
                "gradients of the steps in between are lost: start the run from its last checkpoint"
            )

    def _on_arrival(self, index: int, value: Tensor) -> None:
        """Publish a parameter's new value, which has arrived from the servers, for the node's other workers."""
        assert self._engine is not None
        self._own_state.publish_value(index, value, 2 * self._engine.step + self._exact)
