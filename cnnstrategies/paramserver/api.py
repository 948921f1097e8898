"""What a training loop calls: a worker's connection to the servers."""

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
    """A worker's side. Used by one thread (the one that runs backward on the CPU, or the caller of `push`).

    A step is::

        worker.begin_step(hyperparameters(optimizer), samples)   # before the backward that pushes
        worker.push(index, gradient)                             # as each gradient gets ready; does not block
        worker.end_step()                                        # after backward: asks for the new parameters
        worker.wait(index)                                       # before a parameter is used again

    In mode ``local`` what is given to `push` are the parameters themselves, after some steps of the worker's own
    optimizer; what it sends is their difference to the values that came last. The optimizer of the specification is the
    outer one then.

    Args:
        specification: What all processes of the run agree on.
        parameters: The parameters in the specification's order; pulled values are written into them, in place.
        views: Tells of the membership.
        id: This worker's number in the views.
        incarnation: Its incarnation in the views.
        keys: CURVE keys; None for no encryption.
        came: Called with the index of each parameter that has come, and its value in the host's memory.

    Attributes:
        leader: Who speaks for it: nobody else, other than for a worker of a node that pushes once.
        role: The role.
        chooser: Chooses the encodings of each step, where there are several to choose from.

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
        came: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        given = [(tuple(parameter.shape), parameter.dtype) for parameter in parameters]
        expected = [(parameter.shape, getattr(torch, parameter.dtype)) for parameter in specification.parameters]
        if given != expected:
            raise ConfigurationError(
                f"the parameters have the shapes and types {given}, the specification's are {expected}: give the "
                "parameters that it was made from, in its order"
            )
        allow_files(4 * specification.servers, f"worker {id}")
        reuse_freed_memory()
        self._specification = specification
        self._parameters = parameters
        slices = cut(specification)
        self._came = came
        # In mode local own steps move the parameters, on the device, while values are on their way, and what comes is
        # added to that there. It waits for two copies of each parameter, but once in `sync_every` steps alone, in which
        # it waits for the servers as well.
        self._staging = None if specification.mode == "local" else staging_for(parameters)
        self._values = parameters if self._staging is None else self._staging.values
        self.role = WorkerRole(specification, slices, self._values, id, incarnation, self._arrived)
        self._links = Links(specification, slices, views, self.role.connections.heard, keys)
        self._ladder = ladder(specification)
        followed = specification.aggregates and specification.workers > 1
        self.chooser = CodecChooser(len(self._ladder), followed) if len(self._ladder) > 1 else None
        self._began: float | None = None  # when the last step did
        self._follow()

    @property
    def codecs(self) -> Codecs:
        """The encodings of pushes and pulls: those of the specification, or what was chosen last where they are auto.

        Single steps may try others.
        """
        return self._ladder[self.chooser.chosen if self.chooser else 0]

    @property
    def step(self) -> int:
        """Number of the step that is or will be worked on next, counted from the start of the run for all workers."""
        return self.role.step

    @property
    def counters(self) -> Counters:
        """What was sent, received and waited."""
        return self.role.counters

    def initialise(self, optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Begin the run with the values of the parameters, and the optimizer's state if there is some.

        The workers of the run's start call it before their :meth:`join`. That of them with the lowest number gives the
        servers its values, or the next one, should it die before.

        Args:
            optimizer_state: A plain ``Optimizer.state_dict()`` over all parameters.
        """
        if self._staging is not None:
            self._staging.take_values()
        self.role.initialise(optimizer_state)

    def meet(self) -> None:
        """Let the servers know that this worker is there, if it takes no part in their steps yet: they wait to hear it.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        self._run(self.role.meet(time.monotonic()))

    def join(self, has: int | None = None) -> int:
        """Become a member at a step boundary: from the returned step on the others wait for this worker (in sync).

        Writes the servers' values into the parameters; waits until some worker has given them.

        Args:
            has: A step of which this worker has the gradients, if all who have begun that one may have died since.

        Returns:
            The step to begin with, also in :attr:`step`.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        return self._run(self.role.join(time.monotonic(), has))

    def leave(self) -> None:
        """Wait for the pulls that are under way, and no longer be waited for; :meth:`join` comes back."""
        self._run(self.role.leave())

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Start the step's pushes.

        Args:
            groups: The hyper-parameters of each parameter group now, as
                :func:`~cnnstrategies.paramserver.specification.hyperparameters` gives them.
            samples: How many samples the gradient is a mean of: the weight of this worker in sync and local.

        Raises:
            ConfigurationError: One of these is no finite number, or no number any more: it is named.
        """
        self.wait_all()
        self._choose()
        self.role.begin_step(groups, samples)
        self._send()

    def push(self, index: int, gradient: Tensor) -> None:
        """Send a parameter's gradient, without waiting, and if it is large without a copy of what lies in CPU memory.

        The tensor's memory must stay as it is until the parameter has been pulled (``zero_grad`` with its default
        ``set_to_none=True`` is no harm: a reference is kept).

        Args:
            index: Index of the parameter.
            gradient: Its gradient, of its shape and type; in mode ``local`` its value.

        Raises:
            ConfigurationError: It has another shape or type, or is sparse: servers would drop it, and the step never
                end. Or it is beyond the range of fp16, where that is its encoding.
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
        if self._staging is None or gradient.device != parameter.device:  # A node's sum is on the host already.
            self._push(index, gradient)
        else:
            self._staging.fetch(index, gradient)
            self._push_fetched()

    def end_step(self) -> None:
        """Finish the step: parameters that were not pushed have no gradient; ask for the new parameters.

        They are asked for in the order in which :meth:`wait` was called for them in the step before.
        """
        self._push_fetched(wait=True)
        self.role.end_step()
        self._send()

    def wait(self, index: int) -> None:
        """Wait until one parameter is up to date.

        Raises:
            ServersUnreachableError: Nothing came within the specification's time-out; names the servers.
            RemovedError: A newer view no longer contains this worker.
        """
        self.wait_for(self.role.here(index))
        if self._staging is not None:
            self._staging.before_use(index)

    def wait_all(self) -> None:
        """Wait until all parameters are up to date. Raises what :meth:`wait` raises."""
        self.wait_for(self.role.all_here())
        self._use_all()

    def refresh(self) -> None:
        """Write the servers' present values into all parameters, between two steps: in async others go on.

        Raises what :meth:`wait` raises.
        """
        self._run(self.role.refresh())

    def optimizer_state(self) -> dict[str, Any]:
        """The servers' optimizer state as a plain ``Optimizer.state_dict()`` over whole parameters.

        To be called between steps, by one worker while the others do not push, so that it is of one moment.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        return self._run(self.role.optimizer_state())

    def interrupt(self) -> None:
        """Between two steps there is more than training, such as a validation.

        What that takes does not count where the time of steps chooses the encodings.
        """
        self._began = None

    def close(self) -> None:
        """Close the sockets; nothing more is sent."""
        self._links.close()

    def _run(self, procedure: Generator[Wait, None, Result]) -> Result:
        """Do what a procedure waits for, to its end."""
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
        """Send the gradients that have come from the device."""
        if self._staging is not None:
            for index, gradient in self._staging.fetched(wait):
                self._push(index, gradient)

    def _use_all(self) -> None:
        if self._staging is not None:
            for index in range(len(self._parameters)):
                self._staging.before_use(index)

    def _choose(self) -> None:
        """Choose the encodings of the step that begins by the time of those before."""
        if self.chooser is not None:
            now = time.monotonic()
            if self.role.is_first:
                level = self.chooser.next(self.step, None if self._began is None else now - self._began)
            else:
                level = self.chooser.follow(self.step, self.role.first_level)
            self.role.encode_as(*self._ladder[level], level)
            self._began = now

    def wait_for(self, wait: Wait) -> None:
        """Handle messages and changes of the view while something is waited for."""
        if not wait.waiting():
            return
        begun = time.monotonic()
        for server, header, payload in self._links.arrived():  # Mostly enough, without a look at views and silence.
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
        view = self._links.news()
        if view is not None and view.number > self.role.view.number:
            self.role.follow(time.monotonic(), view)
            self._links.connect(view)

    def _arrived(self, index: int) -> None:
        if self._staging is not None:
            self._staging.bring(index)
        if self._came is not None:
            self._came(index, self._values[index])
