"""A worker's connection to the servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.view import ViewSource


class ServersUnreachableError(RuntimeError):
    """Servers did not answer within the time-out, or a slice has no live server; the message names them."""


class RemovedError(RuntimeError):
    """This worker is no longer in the view (it was taken for dead): it must rejoin as a new incarnation."""


@dataclass
class Counters:
    """What a worker has sent, received and waited since it was made.

    Attributes:
        bytes_sent: Bytes of pushes, headers included.
        bytes_received: Bytes of pulls, headers included.
        seconds_waited: Time in :meth:`Worker.wait` and in :meth:`Worker.wait_all`.
        steps: Steps finished.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waited: float = 0.0
    steps: int = 0


class Worker:
    """A worker's side. Used by one thread (the one that runs backward on the CPU, or the caller of `push`).

    A step is::

        worker.begin_step(hyperparameters(optimizer), samples)   # before the backward that pushes
        worker.push(index, gradient)                             # as each gradient gets ready; does not block
        worker.end_step()                                        # after backward: asks for the new parameters
        worker.wait(index)                                       # before a parameter is used again

    In mode ``local`` what is pushed are the parameters themselves, every k-th step of the worker's own optimizer.

    Args:
        specification: What all processes of the run agree on.
        parameters: The parameters in the specification's order; pulled values are written into them, in place.
        views: Tells of the membership.
        id: This worker's number in the views.
        incarnation: Its incarnation in the views.
        keys: CURVE keys; None for no encryption.
        insecure: Allow `keys` None with servers on other machines.

    Attributes:
        step: Number of the step that is or will be worked on next, counted from the start of the run; a worker that
            joins later starts with that of the others.
        counters: What was sent, received and waited.

    Raises:
        ConfigurationError: The parameters are not those of the specification.
    """

    step: int
    counters: Counters

    def __init__(
        self,
        specification: Specification,
        parameters: Sequence[Tensor],
        views: ViewSource,
        id: int,
        incarnation: int = 0,
        keys: KeyPair | None = None,
        insecure: bool = False,
    ) -> None:
        raise NotImplementedError

    def initialise(self, optimizer_state: Mapping[str, Any] | None = None) -> None:
        """Give the servers the values of the parameters, and the optimizer's state if there is some.

        One worker calls it before its :meth:`join` (any number may: servers take the first values that come, and a
        server that has some ignores it).

        Args:
            optimizer_state: A plain ``Optimizer.state_dict()`` over all parameters.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        raise NotImplementedError

    def join(self) -> int:
        """Become a member at a step boundary: from the returned step on the others wait for this worker (in sync).

        Writes the servers' values into the parameters. Waits until some worker has called :meth:`initialise`.

        Returns:
            The step to begin with, also in :attr:`step`.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Wait for the pulls that are under way, and no longer be waited for; :meth:`join` comes back."""
        raise NotImplementedError

    def begin_step(self, groups: Sequence[Mapping[str, Any]], samples: float) -> None:
        """Start the step's pushes.

        Args:
            groups: The hyper-parameters of each parameter group now, as
                :func:`~cnnstrategies.paramserver.specification.hyperparameters` gives them.
            samples: How many samples the gradient is a mean of: the weight of this worker in sync and local.
        """
        raise NotImplementedError

    def push(self, index: int, gradient: Tensor) -> None:
        """Send a parameter's gradient, without waiting and without a copy of what lies in CPU memory.

        The tensor's memory must stay as it is until the parameter has been pulled (``zero_grad`` with its default
        ``set_to_none=True`` is no harm: a reference is kept).

        Args:
            index: Index of the parameter.
            gradient: Its gradient, of its shape; in mode ``local`` its value.
        """
        raise NotImplementedError

    def end_step(self) -> None:
        """Finish the step: parameters that were not pushed have no gradient; ask for the new parameters.

        They are asked for in the order in which :meth:`wait` was called for them in the step before.
        """
        raise NotImplementedError

    def wait(self, index: int) -> None:
        """Wait until one parameter is up to date.

        Raises:
            ServersUnreachableError: Nothing came within the specification's time-out; names the servers.
            RemovedError: A newer view no longer contains this worker.
        """
        raise NotImplementedError

    def wait_all(self) -> None:
        """Wait until all parameters are up to date. Raises what :meth:`wait` raises."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Write the servers' present values into all parameters, between two steps: in async others go on.

        Raises what :meth:`wait` raises.
        """
        raise NotImplementedError

    def optimizer_state(self) -> dict[str, Any]:
        """The servers' optimizer state as a plain ``Optimizer.state_dict()`` over whole parameters.

        To be called between steps, by one worker while the others do not push, so that it is of one moment.

        Raises:
            ServersUnreachableError: A server does not answer.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the sockets; nothing more is sent."""
        raise NotImplementedError
