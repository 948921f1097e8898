"""A training loop's interface to the servers."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import ViewSource
from cnnstrategies.paramserver.drivers.links import POLL_SECONDS, Links
from cnnstrategies.paramserver.drivers.sockets import allow_files
from cnnstrategies.paramserver.drivers.staging import staging_for
from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.slicing import cut
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.worker.codecs import CodecChooser, Codecs, ladder
from cnnstrategies.paramserver.worker.connections import Counters
from cnnstrategies.paramserver.worker.worker import Wait, WorkerRole
from cnnstrategies.runtime.allocation import reuse_freed_memory

Result = TypeVar("Result")


class Worker:
    """A worker's connection to the servers.

    Only one thread may use it: the thread that runs backward on the CPU, or the caller of `push`.

    A step is::

        worker.begin_step(hyperparameters(optimizer), samples)   # before the backward that pushes
        worker.push(index, gradient)                             # as soon as a gradient is ready; does not block
        worker.end_step()                                        # after backward: requests the new parameters
        worker.wait(index)                                       # before a parameter is used again

    In mode ``local`` the argument of `push` is the parameter itself, after some steps of the worker's own optimizer;
    the worker sends its difference to the values that arrived last. The specification's optimizer is then the outer
    optimizer.

    Args:
        specification: The run's specification, the same in all processes.
        parameters: The parameters in the specification's order; pulled values are written into them, in place.
        views: Source of the membership's views.
        id: This worker's id in the views.
        incarnation: This worker's incarnation in the views.
        keys: CURVE keys; None for no encryption.
        on_arrival: Called with the index of each parameter that has arrived, and its value in the host's memory.

    Attributes:
        leader: Rank of the worker that pushes for this worker's node; None here, because this worker pushes itself.
        role: The worker's part of the protocol.
        chooser: The choice of each step's compressions; None if there is nothing to choose.

    Raises:
        ConfigurationError: The parameters are not those of the specification.
    """

    leader: int | None = None

    def __init__(
        self,
        specification: Specification,
        parameters: Sequence[Tensor],
        views: ViewSource,
        id: int,
        incarnation: int = 0,
        keys: KeyPair | None = None,
        on_arrival: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        actual = [(tuple(parameter.shape), parameter.dtype) for parameter in parameters]
        expected = [(parameter.shape, getattr(torch, parameter.dtype)) for parameter in specification.parameters]
        if actual != expected:
            raise ConfigurationError(
                f"the parameters have the shapes and types {actual}, the specification's are {expected}: pass the "
                "parameters from which the specification was made, in its order"
            )
        allow_files(4 * specification.servers, f"worker {id}")
        reuse_freed_memory()
        self._specification = specification
        self._parameters = parameters
        slices = cut(specification)
        self._on_arrival = on_arrival
        # In mode local, the worker's own steps change the parameters on the device while values are on their way, and
        # arriving values are combined with these changes on the device. Without staging this waits for two copies of
        # each parameter, but only once in `sync_every` steps, in which the worker waits for the servers anyway.
        self._staging = None if specification.mode == "local" else staging_for(parameters)
        self._values = parameters if self._staging is None else self._staging.values
        self.role = WorkerRole(specification, slices, self._values, id, incarnation, self._arrived)
        self._links = Links(specification, slices, views, self.role.connections.heard, keys)
        self._ladder = ladder(specification)
        followed = specification.aggregates and specification.workers > 1
        self.chooser = CodecChooser(len(self._ladder), followed) if len(self._ladder) > 1 else None
        self._step_began: float | None = None  # time at which the last step began
        self._follow()

    @property
    def codecs(self) -> Codecs:
        """Compressions of pushes and pulls: the specification's, or with ``auto`` those that were chosen last.

        Single steps may try other compressions.
        """
        return self._ladder[self.chooser.chosen if self.chooser else 0]

    @property
    def step(self) -> int:
        """Number of the step that is or will be worked on next, counted by all workers from the start of the run."""
        return self.role.step

    @property
    def counters(self) -> Counters:
        """Bytes sent and received, steps, and times of waiting."""
        return self.role.counters

    def initialise(self, optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Begin the run with the parameters' present values, and the optimizer's state if it has one.

        The workers with which the run starts call this method before :meth:`join`. The worker with the lowest id sends
        its values to the servers; if it dies before, the next worker does.

        Args:
            optimizer_state: A plain ``Optimizer.state_dict()`` over all parameters.
        """
        if self._staging is not None:
            self._staging.take_values()
        self.role.initialise(optimizer_state)

    def meet(self) -> None:
        """Greet the servers, which wait for a message of each worker, without taking part in steps yet.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        self._run(self.role.meet(time.monotonic()))

    def join(self, has: int | None = None) -> int:
        """Become a member at a step boundary: from the returned step on the other workers wait for this one (in sync).

        The servers' values are written into the parameters, as soon as some worker has sent them to the servers.

        Args:
            has: A step whose gradients this worker already has, if all workers that began the step may have died.

        Returns:
            The step to begin with, which is also in :attr:`step`.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        return self._run(self.role.join(time.monotonic(), has))

    def leave(self) -> None:
        """Wait for the pulls that are under way, then leave: no worker waits for this one until it joins again."""
        self._run(self.role.leave())

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Start the step's pushes.

        Args:
            groups: The present hyper-parameters of each parameter group, as
                :func:`~cnnstrategies.paramserver.specification.hyperparameters` returns them.
            samples: Number of samples of which the gradient is a mean: this worker's weight in sync and local.

        Raises:
            ConfigurationError: One of these is not a finite number, or has another type than at the start; the message
                names it.
        """
        self.wait_all()
        self._choose()
        self.role.begin_step(groups, samples)
        self._send()

    def push(self, index: int, gradient: Tensor) -> None:
        """Send a parameter's gradient without waiting. A large gradient in CPU memory is sent without a copy.

        The tensor's memory must not be changed until the parameter has been pulled. (``zero_grad`` with its default
        ``set_to_none=True`` does not change it: the worker keeps a reference.)

        Args:
            index: Index of the parameter.
            gradient: The parameter's gradient, of its shape and type; in mode ``local`` its value.

        Raises:
            ConfigurationError: The gradient is sparse or has another shape or type: servers would drop it, and the step
                would never end. Or it is beyond the range of its compression, such as ``fp16``.
        """
        parameter = self._parameters[index]
        if gradient.layout != torch.strided:
            raise ConfigurationError(
                f"the gradient of {self._specification.parameters[index].name} is sparse, and the servers take dense "
                "ones: use sparse=False where it is computed"
            )
        if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
            raise ConfigurationError(
                f"parameter {self._specification.parameters[index].name} is {parameter.dtype} of shape "
                f"{tuple(parameter.shape)}, its gradient {gradient.dtype} of shape {tuple(gradient.shape)}: push a "
                "gradient of the same type and shape"
            )
        if self._staging is None or gradient.device != parameter.device:  # A node's mean is on the host already.
            self._push(index, gradient)
        else:
            self._staging.fetch(index, gradient)
            self._push_fetched()

    def end_step(self) -> None:
        """Finish the step, and request the new parameters. Parameters that were not pushed do not have a gradient.

        The request follows the order in which :meth:`wait` was called for the parameters in the step before.
        """
        self._push_fetched(wait=True)
        self.role.end_step()
        self._send()

    def wait(self, index: int) -> None:
        """Wait until one parameter is up to date.

        Raises:
            ServersUnreachableError: Nothing arrived within the specification's time-out; the message names the servers.
            RemovedError: A newer view does not contain this worker.
        """
        self.wait_for(self.role.here(index))
        if self._staging is not None:
            self._staging.before_use(index)

    def wait_all(self) -> None:
        """Wait until all parameters are up to date. Raises the same errors as :meth:`wait`."""
        self.wait_for(self.role.all_here())
        self._use_all()

    def refresh(self) -> None:
        """Write the servers' present values into all parameters, between two steps; in async other workers go on.

        Raises the same errors as :meth:`wait`.
        """
        self._run(self.role.refresh())

    def optimizer_state(self) -> dict[str, Any]:
        """Return the servers' optimizer state as a plain ``Optimizer.state_dict()`` over whole parameters.

        One worker calls it between steps, while the other workers do not push; otherwise the parts of the state would
        be of different steps.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        return self._run(self.role.optimizer_state())

    def interrupt(self) -> None:
        """Note that something else than training happens between two steps, such as a validation.

        Its time does not count for the choice of compressions under ``auto``.
        """
        self._step_began = None

    def close(self) -> None:
        """Close the sockets; nothing is sent afterwards."""
        self._links.close()

    def _run(self, procedure: Generator[Wait, None, Result]) -> Result:
        """Run a procedure to its end, and return its result."""
        self.interrupt()
        self._follow()
        try:
            while True:
                self.wait_for(next(procedure))
        except StopIteration as end:
            result: Result = end.value
        self._send()
        self._use_all()
        return result

    def _send(self) -> None:
        self._links.send(self.role.connections.take())

    def _push(self, index: int, gradient: Tensor) -> None:
        self.role.push(index, gradient)
        self._send()

    def _push_fetched(self, wait: bool = False) -> None:
        """Send the gradients that have arrived from the device."""
        if self._staging is not None:
            for index, gradient in self._staging.fetched(wait):
                self._push(index, gradient)

    def _use_all(self) -> None:
        if self._staging is not None:
            for index in range(len(self._parameters)):
                self._staging.before_use(index)

    def _choose(self) -> None:
        """Choose the compressions of the step that begins by the time of earlier steps."""
        if self.chooser is not None:
            now = time.monotonic()
            if self.role.is_first:
                level = self.chooser.next(self.step, None if self._step_began is None else now - self._step_began)
            else:
                level = self.chooser.follow(self.step, self.role.first_level)
            self.role.encode_as(*self._ladder[level], level)
            self._step_began = now

    def wait_for(self, wait: Wait) -> None:
        """Handle messages and new views until a wait is over."""
        if not wait.waiting():
            return
        begun = time.monotonic()
        # Messages that were read already often end the wait; views and silent servers need not be checked then.
        for server, header, payload in self._links.arrived():
            self.role.on_message(server, header, payload)
            if not wait.waiting():
                break
        if wait.waiting():
            self.role.begin_waiting(begun, wait)
        while wait.waiting():
            self._follow()
            self.role.on_time(time.monotonic())
            self._send()
            for server, header, payload in self._links.receive(POLL_SECONDS):
                self.role.on_message(server, header, payload)
                if not wait.waiting():
                    break
        self._send()
        self.counters.seconds_waited += time.monotonic() - begun

    def _follow(self) -> None:
        view = self._links.new_view()
        if view is not None and view.number > self.role.view.number:
            self.role.follow(time.monotonic(), view)
            self._links.connect(view)

    def _arrived(self, index: int) -> None:
        if self._staging is not None:
            self._staging.bring(index)
        if self._on_arrival is not None:
            self._on_arrival(index, self._values[index])
