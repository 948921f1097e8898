"""A supervision's side of the coordinator: it tells of ends until it is heard, and asks how the run goes."""

from cnnstrategies.paramserver.coordinator.participant import COORDINATOR
from cnnstrategies.paramserver.core.node import Call, Effects, Message, Peer, Return
from cnnstrategies.paramserver.core.requests import REPLIES, Asking


class Reporter:
    """A supervision: a role. Its calls are the coordinator's kinds of requests.

    Args:
        session: Of the coordinator.

    Attributes:
        asking: The open requests.
    """

    def __init__(self, session: int) -> None:
        self.asking = Asking(COORDINATOR, {"session": session})

    def start(self, now: float) -> Effects:
        """Ask again, on a new connection, what was not answered on the last."""
        return self.asking.again()

    def on_message(self, now: float, sender: Peer, message: Message) -> Effects:
        """Take a reply.

        Raises:
            ControlError: It has other fields than its kind.
        """
        if message.kind not in REPLIES:
            return []
        request, effects = self.asking.on_reply(now, message)
        return effects if request is None else [*effects, Return(request.call, message)]

    def on_timer(self, now: float, name: str) -> Effects:
        """Ask what became of the requests."""
        return self.asking.on_timer(now)

    def on_call(self, now: float, call: Call) -> Effects:
        """Tell or ask the coordinator; a question about the present takes the place of an older one."""
        if call.kind == "status":
            self.asking.drop("status")
        return self.asking.ask(now, call.kind, call.fields, call.frames, call.number)
