"""What a role of the data plane has its driver do."""

from typing import Any, NamedTuple

from cnnstrategies.paramserver.core.node import End
from cnnstrategies.paramserver.messages import Header


class Parcel(NamedTuple):
    """Send a message, if the peer can be reached.

    Attributes:
        to: A server's id; or the route over which a worker was last heard.
        header: The message's.
        payload: Its memory is read later, when it leaves.
        wait: It may wait for the next ones to the same peer.
    """

    to: int | bytes
    header: Header
    payload: Any
    wait: bool


class Say(NamedTuple):
    """Tell whoever looks after the run.

    Attributes:
        text: What.
        urgent: Whether nobody may miss it.
    """

    text: str
    urgent: bool


Effects = list[Parcel | Say | End]
