"""A server: holds slices of the parameters, applies the optimizer to them, and answers pulls."""

from cnnstrategies.paramserver.security import KeyPair
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.paramserver.transport import Listener
from cnnstrategies.paramserver.view import ViewSource


class Server:
    """One server process of a run. Single-threaded; libzmq's own thread moves the bytes.

    Args:
        specification: What all processes of the run agree on.
        views: Tells of the membership; the server waits for the first view with itself in it.
        id: This server's place, 0 to `specification.servers` - 1.
        endpoint: Where to bind: ``ipc://path`` or ``tcp://address:port``, port ``*`` for any free one; or a
            :class:`~cnnstrategies.paramserver.transport.Listener` made before the specification was known.
        keys: CURVE keys; None for no encryption.
        insecure: Allow `keys` None on an endpoint that other machines reach.

    Attributes:
        endpoint: Where the socket is bound (with the real port), known before :meth:`run`: bind, register this with
            the coordinator, then run.

    Raises:
        ConfigurationError: The endpoint is open to other machines without encryption.
    """

    def __init__(
        self,
        specification: Specification,
        views: ViewSource,
        id: int,
        endpoint: str | Listener = "tcp://127.0.0.1:*",
        keys: KeyPair | None = None,
        insecure: bool = False,
    ) -> None:
        raise NotImplementedError

    def run(self) -> None:
        """Serve until :meth:`stop` is called.

        Raises:
            RunEnded: From the views: the run is over, cleanly or not; or a view came without this server.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Have :meth:`run` return soon; may be called from a signal handler or another thread."""
        raise NotImplementedError
