"""The parameter server's interface for training loops."""

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
from cnnstrategies.paramserver.worker.connections import Wait
from cnnstrategies.paramserver.worker.counters import Counters
from cnnstrategies.paramserver.worker.worker import WorkerRole
from cnnstrategies.runtime.allocation import reuse_freed_memory
from cnnstrategies.runtime.waiting import waiting

Result = TypeVar("Result")


class Worker:
    """A worker's connection to the servers, with which a training loop pushes gradients and pulls parameters.

    Only one thread may use a worker: the thread that calls :meth:`push`, for example the thread that runs backward.

    A step is::

        worker.begin_step(hyperparameters(optimizer), samples)   # before backward
        worker.push(index, gradient)                             # as soon as a gradient is ready; does not block
        worker.end_step()                                        # after backward: requests the new parameters
        worker.wait(index)                                       # before a parameter is used again

    In mode ``local``, call `push` with the parameter itself, after some steps of the worker's own optimizer. The worker
    then sends a difference: the values that arrived last minus the parameter's current values. The specification's
    optimizer is the outer optimizer, which the servers apply to these differences.

    Args:
        specification: The run's specification, the same in all processes.
        parameters: The parameters in the specification's order. Pulled values are written into these tensors.
        views: Source of the membership's views, for example from :meth:`.Membership.source`.
        id: This worker's id in the views.
        incarnation: This worker's incarnation in the views.
        keys: CURVE keys of this process; None for no encryption.
        on_arrival: Function that is called when a parameter's new value arrives, with the parameter's index and the
            value in CPU memory; None for no calls.

    Attributes:
        specification: The run's specification.
        parameters: The tensors into which received values are written, in the order of the specification.
        leader: None, because each worker of this class pushes its own gradients. In the class
            :class:`~cnnstrategies.paramserver.combiner.worker.CombinedWorker`, this attribute is the rank of the node's
            leader.
        role: State machine of the worker's protocol.
        chooser: Chooser of the compressions under ``auto``; None without ``auto``, or if there is only one compression
            to choose from.

    Raises:
        ConfigurationError: The shapes or dtypes of the parameters differ from the specification's.
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
                f"the parameters have the shapes and dtypes {actual}, but the specification has {expected}: pass the "
                "parameters from which the specification was made, in the same order"
            )
        allow_files(4 * specification.servers, f"worker {id}")
        reuse_freed_memory()
        self.specification = specification
        self.parameters = parameters
        slices = cut(specification)
        self._on_arrival = on_arrival
        # Staging would overwrite the parameters on the GPU with the pulled values. In mode local this is wrong, because
        # the worker's own steps change the parameters during the pull. Without staging the worker waits for the copies,
        # but only in one of `sync_every` steps, and in this step it waits for the servers anyway.
        self._staging = None if specification.mode == "local" else staging_for(parameters)
        self._values = parameters if self._staging is None else self._staging.values
        self.role = WorkerRole(specification, slices, self._values, id, incarnation, self._arrived)
        self._links = Links(specification, slices, views, self.role.connections.heard, keys)
        self._ladder = ladder(specification)
        followed = specification.aggregates and specification.workers > 1
        self.chooser = CodecChooser(len(self._ladder), followed) if len(self._ladder) > 1 else None
        self._step_began: float | None = None  # time at which the last step began; None if the time is not measured
        self._follow()

    @property
    def codecs(self) -> Codecs:
        """The current compressions of pushes and pulls.

        Without ``auto``, these are the specification's compressions. Under ``auto``, they are the last choice of
        :attr:`chooser`, although trial steps may use other compressions.
        """
        return self._ladder[self.chooser.chosen if self.chooser else 0]

    @property
    def step(self) -> int:
        """Number of the step that this worker works on, or will work on next, counted from the start of the run."""
        return self.role.step

    @property
    def counters(self) -> Counters:
        """Counters of this worker's traffic, steps and waiting time."""
        return self.role.counters

    @property
    def last_message(self) -> int:
        """Sequence number of the last message to the servers. The next message gets the next number.

        If an earlier connection of this process has sent messages with the same worker id, set this property to the
        earlier connection's last number.
        """
        return self.role.connections.sequence

    @last_message.setter
    def last_message(self, sequence: int) -> None:
        self.role.connections.sequence = sequence

    def initialise(self, optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Use the parameters' current values as the initial values of the run.

        Every worker that takes part from the start of the run calls this method before :meth:`join`. The worker with
        the lowest id sends its values to the servers. If the sender dies before it has sent all values, the live worker
        with the lowest id sends its own values.

        Args:
            optimizer_state: A plain ``Optimizer.state_dict()`` over all parameters; None if the optimizer has no state.
        """
        if self._staging is not None:
            self._staging.take_values()
        self.role.initialise(optimizer_state)

    def meet(self) -> None:
        """Register this worker with all servers, and wait for their replies.

        The servers wait for each worker's registration. The worker takes part in steps only after :meth:`join`.

        Raises:
            ServersUnreachableError: A server does not reply.
        """
        self._run(self.role.meet(time.monotonic()))

    def join(self, has: int | None = None) -> int:
        """Take part in all steps from the next step on, and wait for the parameters.

        In modes with common steps, the other workers wait for this worker from the returned step on. If the servers
        have no values yet, this method waits until a worker has sent them the initial values.

        Args:
            has: Number of a step whose gradients this worker already holds; None if it holds none. Give the number if
                all workers that began this step may have died: this worker may then begin with this step, and push
                those gradients in their place.

        Returns:
            The step with which this worker begins, which is also in :attr:`step`.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        return self._run(self.role.join(time.monotonic(), has))

    def leave(self) -> None:
        """Wait until all pulls have received replies, then leave the run.

        From then on, the other workers do not wait for this worker. Raises the same errors as :meth:`wait`.
        """
        self._run(self.role.leave())

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Begin a step. The gradients that are pushed next belong to this step.

        Args:
            groups: The current hyperparameters of each parameter group, as
                :func:`~cnnstrategies.paramserver.specification.hyperparameters` returns them.
            samples: Number of samples in this worker's batch. In modes with common steps, the mean gradient is weighted
                by these numbers.

        Raises:
            ConfigurationError: `samples` or a hyperparameter is not a finite number, or a hyperparameter has a
                different type from its value at the start of the run.
        """
        self.wait_all()
        self._choose()
        self.role.begin_step(groups, samples)
        self._send()

    def push(self, index: int, gradient: Tensor) -> None:
        """Send a parameter's gradient without waiting.

        A large gradient in CPU memory is sent without a copy. Do not change the tensor until the parameter's new value
        has arrived. The default ``zero_grad(set_to_none=True)`` is allowed, because it does not change the tensor, and
        the worker keeps a reference to the tensor.

        Args:
            index: Index of the parameter.
            gradient: The parameter's gradient, with the parameter's shape and dtype. In mode ``local``, the parameter's
                value.

        Raises:
            ConfigurationError: The gradient is sparse; or its shape or dtype differs from the parameter's; or an
                element of the gradient is outside the range of the compression, for example ``fp16``.
        """
        parameter = self.parameters[index]
        if gradient.layout != torch.strided:
            raise ConfigurationError(
                f"the gradient of {self.specification.parameters[index].name} is sparse, but parameter servers need "
                "dense gradients: construct the layer with sparse=False"
            )
        if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
            raise ConfigurationError(
                f"parameter {self.specification.parameters[index].name} is {parameter.dtype} of shape "
                f"{tuple(parameter.shape)}, but its gradient is {gradient.dtype} of shape {tuple(gradient.shape)}: "
                "push a gradient of the parameter's dtype and shape"
            )
        # A gradient in CPU memory, for example the mean that a node's leader pushes, needs no staging.
        if self._staging is None or gradient.device != parameter.device:
            self._push(index, gradient)
        else:
            self._staging.fetch(index, gradient)
            self._push_fetched()

    def end_step(self) -> None:
        """End the step, and request the new parameters.

        Parameters whose gradients were not pushed have no gradient in this step. If :meth:`wait` was called for every
        parameter since the end of the previous step, the parameters are requested in the order of these calls.
        """
        self._push_fetched(wait=True)
        self.role.end_step()
        self._send()

    def wait(self, index: int) -> None:
        """Wait until one parameter is up to date.

        Raises:
            ServersUnreachableError: Nothing has arrived within the specification's time-out. The error message names
                the servers.
            RemovedError: This worker is no longer a member.
        """
        self.wait_for(self.role.here(index))
        if self._staging is not None:
            self._staging.before_use(index)

    def wait_all(self) -> None:
        """Wait until all parameters are up to date. Raises the same errors as :meth:`wait`."""
        self.wait_for(self.role.all_here())
        self._use_all()

    def refresh(self) -> None:
        """Write the servers' current values into all parameters. Call this between two steps.

        In modes without common steps, other workers may change the servers' values during the call. Raises the same
        errors as :meth:`wait`.
        """
        self._run(self.role.refresh())

    def optimizer_state(self) -> dict[str, Any]:
        """Return the servers' optimizer state as a plain ``Optimizer.state_dict()`` over whole parameters.

        Call this between two steps, in one worker, while no worker pushes. Otherwise the slices' states would belong to
        different steps.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        return self._run(self.role.optimizer_state())

    def interrupt(self) -> None:
        """Report that something other than training happens between two steps, such as validation.

        The time between the last step and the next step is then not used to choose compressions under ``auto``.
        """
        self._step_began = None

    def close(self) -> None:
        """Close the connections to the servers."""
        self._links.close()

    def _run(self, procedure: Generator[Wait, None, Result]) -> Result:
        """Run a procedure of the role to its end, and return the procedure's result.

        Wherever the procedure yields a :class:`.Wait`, handle messages until the wait is over.
        """
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
        """Push the gradients that have been copied from the GPU to CPU memory.

        Args:
            wait: Whether to wait for all copies, and push all gradients. Otherwise only gradients that have already
                been copied are pushed.
        """
        if self._staging is not None:
            for index, gradient in self._staging.fetched(wait):
                self._push(index, gradient)

    def _use_all(self) -> None:
        if self._staging is not None:
            for index in range(len(self.parameters)):
                self._staging.before_use(index)

    def _choose(self) -> None:
        """Under ``auto``, choose the next step's compressions. The choice depends on the measured times of steps."""
        if self.chooser is not None:
            now = time.monotonic()
            if self.role.is_first:
                level = self.chooser.next(self.step, None if self._step_began is None else now - self._step_began)
            else:
                level = self.chooser.follow(self.step, self.role.first_level)
            self.role.encode_as(*self._ladder[level], level)
            self._step_began = now

    def wait_for(self, wait: Wait) -> None:
        """Handle messages and new views until a procedure's wait is over."""
        if not wait.waiting():
            return
        begun = time.monotonic()
        with waiting("servers"):
            # Earlier calls may already have read the messages that end the wait. So handle these messages before the
            # loop below, which checks views and sockets.
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
            self.role.follow(view)
            self._links.connect(view)

    def _arrived(self, index: int) -> None:
        if self._staging is not None:
            self._staging.bring(index)
        if self._on_arrival is not None:
            self._on_arrival(index, self._values[index])
