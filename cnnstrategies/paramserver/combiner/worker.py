"""A worker of a node of which only one speaks with the servers."""

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
    """Has the interface of a :class:`~cnnstrategies.paramserver.api.Worker`; for common steps that wait for all.

    The live worker of the lowest rank leads the node: it adds up what all of them give, pushes that as one worker, and
    shows the others the new values (hierarchical aggregation, as in BytePS: Jiang et al., OSDI 2020). If it dies the
    next one takes its place, and pushes the step's gradients once more if the servers have not made it, since all are
    still on the boards. Steps that the servers have made meanwhile are left out.

    Args:
        boards: Of the node's workers, by rank; its own among them.
        parameters: The parameters in the specification's order; new values are written into them, in place.
        connect: Connects to the servers; given what to call with each parameter that has come, and its value.
        alive: Gives the ranks of the workers that live, as far as is known here.
        pause: Called again and again while something is waited for.
        codecs: The encodings, for who does not lead.
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
        self._own = boards[rank]
        self._boards = boards
        self._parameters = parameters
        self._connect = connect
        self._alive = alive
        self._pause = pause
        self._codecs = codecs
        self._engine: Worker | None = None
        self._leader: int | None = None  # whose values are taken
        self._has = [NEVER] * len(parameters)  # marks of the values
        self._exact = False  # Values that come are those that the servers have, not rounded.
        self._first_state: tuple[Mapping[str, Any] | None] | None = None
        self._left_out = 0  # batches, of steps that were made without this node
        self._groups: Sequence[Mapping[str, Any]] = ()
        self._weights: dict[int, float] | None = None  # of all in the step that is summed, once they have begun it
        self._open: dict[int, None] = {}  # what one that leads is to push, in the order in which it came
        self._sums: list[Tensor | None] = [None] * len(parameters)  # memory, kept from step to step
        self._staging = staging_for(parameters)
        self._counters = Counters()
        self._waited = 0.0  # seconds, for the node's other workers

    @property
    def leader(self) -> int | None:
        """The rank of the worker whose values are taken; with another one they may be those of a later step."""
        return self._leader

    @property
    def codecs(self) -> Codecs:
        """The encodings of pushes and pulls."""
        return self._codecs if self._engine is None else self._engine.codecs

    @property
    def counters(self) -> Counters:
        """What was sent, received and waited: over the network by the leader alone."""
        own = self._counters
        own.seconds_waited = self._waited
        if self._engine is not None:
            node = self._engine.counters
            own.bytes_sent, own.bytes_received = node.bytes_sent, node.bytes_received
            own.seconds_waited += node.seconds_waited
        return own

    # Beginning

    def initialise(self, optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Begin the run with the values of the parameters, right before :meth:`join`."""
        self._first_state = (optimizer_state,)

    def join(self) -> int:
        """Take part from the step on that the node begins with, in :attr:`step`; the parameters are those of it."""
        self._look()
        if self._engine is None:
            # The servers wait some seconds for whoever they do not know. And who cannot reach them should say so now.
            visitor = self._connect(lambda index, value: None)
            visitor.meet()
            visitor.close()
        self.wait_all()
        return self.step

    # Steps

    @property
    def late(self) -> bool:
        """Whether the batch that comes is of a step that was made without this node."""
        return self._left_out > 0

    def catch_up(self) -> int:
        """Leave such batches to the caller; how many there are."""
        left_out, self._left_out = self._left_out, 0
        self._counters.dropped += left_out
        self._counters.steps += left_out
        return left_out

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Start the step's gradients."""
        self._look()  # Who was taken for dead must hear of it, also where all that it waits for is there.
        self.wait_all()
        if self._left_out:
            return
        self._groups = groups
        self._counters.samples += samples
        self._own.begin(self.step, samples)
        self._weights = None
        self._open.clear()
        if self._engine is not None:
            self._push_sums(self._engine)

    def push(self, index: int, gradient: Tensor) -> None:
        """Give a parameter's gradient."""
        if self._left_out:
            return
        if self._staging is None:
            self._give(index, gradient)
        else:
            self._staging.fetch(index, gradient)
            self._give_fetched()

    def _give(self, index: int, gradient: Tensor) -> None:
        self._own.give(index, gradient, self.step)
        if self._engine is not None:
            self._open[index] = None
            self._push_sums(self._engine)

    def _give_fetched(self, wait: bool = False) -> None:
        """Give the gradients that have come from the device."""
        if self._staging is not None:
            for index, gradient in self._staging.fetched(wait):
                self._give(index, gradient)

    def end_step(self) -> None:
        """Finish the step: parameters that were not pushed have no gradient."""
        self._counters.steps += 1
        if self._left_out:
            self._left_out -= 1
            self._counters.dropped += 1
            return
        self._give_fetched(wait=True)
        self._own.end(self.step)
        if self._engine is not None:
            self._finish(self._engine)
        self.step += 1
        self._exact = False

    # The sum of a step, of one that leads

    def _push_sums(self, engine: Worker) -> bool:
        """Push what all have given by now; whether nothing is open."""
        step = self._own.begun
        boards = {rank: self._boards[rank] for rank in self._alive() if rank in self._boards}
        if self._weights is None:
            if any(board.begun < step for board in boards.values()):
                return False
            self._weights = {rank: board.samples for rank, board in boards.items()}
            engine.begin_step(self._groups, sum(self._weights.values()))
        give_more = [board for board in boards.values() if board.ended < step]
        for index in list(self._open):
            if all(board.has_given(index, step) for board in give_more):
                del self._open[index]
                mean = self._mean(index, step, boards.keys(), self._weights)
                if mean is not None:
                    engine.push(index, mean)
        return not self._open

    def _mean(self, index: int, step: int, alive: Collection[int], weights: Mapping[int, float]) -> Tensor | None:
        """The mean gradient of a parameter, weighted by samples; None if nobody has one.

        A worker that dies in the step takes part with the gradients that it has given.
        """
        given = {rank: own for rank, own in weights.items() if self._boards[rank].has_given(index, step)}
        if not given:
            return None
        # Who lives and has no gradient counts as one of zeros, as in the mean over the workers of a run.
        total = sum(weight for rank, weight in weights.items() if rank in alive or rank in given)
        parts = [(weight, self._boards[rank].gradients[index]) for rank, weight in sorted(given.items())]
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
        """Wait for the others' gradients, and push the rest: also those that only others have."""
        step = self._own.begun
        self._open.update((index, None) for index in range(len(self._sums)) if not self._own.has_given(index, step))
        while not self._push_sums(engine):
            self._look()
            self._rest()
        engine.end_step()

    # Waiting

    def wait(self, index: int) -> None:
        """Wait until one parameter is up to date."""
        while self._engine is None and self._has[index] < self._mark:
            if not self._take(index):
                self._look()
                self._rest()
        if self._engine is not None:
            self._engine.wait(index)
        elif self._staging is not None:
            self._staging.before_use(index)

    def wait_all(self) -> None:
        """Wait until all parameters are up to date. Raises what :meth:`wait` raises."""
        # Again if another leads by now.
        while self._engine is None and min(self._has, default=self._mark) < self._mark:
            for index in range(len(self._parameters)):
                self.wait(index)
        if self._engine is not None:
            self._engine.wait_all()

    def refresh(self) -> None:
        """Take the servers' present values, which no step changes meanwhile. Raises what :meth:`wait` raises."""
        self.wait_all()
        self._exact = True
        if self._engine is not None:
            self._engine.refresh()
        self.wait_all()

    def optimizer_state(self) -> dict[str, Any]:
        """The servers' optimizer state; for rank 0, which leads its node."""
        assert self._engine is not None, "the lowest rank leads"
        return self._engine.optimizer_state()

    def interrupt(self) -> None:
        """Between two steps there is more than training."""
        if self._engine is not None:
            self._engine.interrupt()

    def close(self) -> None:
        """Close the sockets; nothing more is sent."""
        if self._engine is not None:
            self._engine.close()

    @property
    def _mark(self) -> int:
        """Of the values that are waited for: rounded, as steps use them, or exact ones, too."""
        return 2 * self.step + self._exact

    def _take(self, index: int) -> bool:
        """Take a value if it is shown."""
        if self._leader is None or not self._boards[self._leader].shows(index, self._mark):
            return False
        value = self._boards[self._leader].values[index]
        if self._staging is None:
            self._parameters[index].copy_(value)
        else:
            self._staging.put(index, value)
        self._has[index] = self._mark
        return True

    def _rest(self) -> None:
        began = time.monotonic()
        self._pause()
        self._waited += time.monotonic() - began

    # Who leads

    def _look(self) -> None:
        """Follow who leads the node, and begin to if it is this worker."""
        alive = self._alive()
        if self._rank not in alive:
            raise RemovedError(f"worker {self._rank} was taken for dead: it must join again as a new incarnation")
        leader = min(rank for rank in self._boards if rank in alive)
        if leader == self._leader:
            return
        if leader == self._rank:
            self._lead()
        elif self._boards[leader].led != NEVER:
            self._leader = leader
            self._go_on_with(self._boards[leader].led)

    def _lead(self) -> None:
        self._leader, self._exact = self._rank, True
        if self._staging is not None:
            self._staging.settle()  # From here on values come over the connection.
        self._engine = self._connect(self._came)
        if self._first_state is not None and not self.step:
            self._engine.initialise(*self._first_state)
        step = self._engine.join(self.step - 1 if self.step else None)
        self._own.lead(step)
        if self.step == step + 1:
            # The servers have not made all of the step whose gradients all workers of the node have given, or will.
            self._weights, self._open = None, dict.fromkeys(range(len(self._sums)))
            self._finish(self._engine)
            self._exact = False
        else:
            self._go_on_with(step)

    def _go_on_with(self, step: int) -> None:
        """The node goes on with a step that may be another one than this worker is at."""
        if step > self.step:
            self._left_out += step - self.step
            self.step = step
        elif step < self.step - 1:
            raise ServersUnreachableError(
                f"the servers are at step {step} again, and this node had begun step {self.step}: the gradients of the "
                "steps between are gone; start the run from its last checkpoint"
            )

    def _came(self, index: int, value: Tensor) -> None:
        """The servers have sent a value."""
        assert self._engine is not None
        self._own.show(index, value, 2 * self._engine.step + self._exact)
