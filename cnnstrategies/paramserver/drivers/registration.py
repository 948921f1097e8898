"""Keys of members' own: under the run's key a process says whose key another one is, and then speaks with that alone.

Every process of a run has the run's key, so it proves only that who has it may take part. What a member says is
believed because it comes with the member's own key, which nobody else has.
"""

from collections import OrderedDict
from collections.abc import Callable

from cnnstrategies.paramserver.coordinator.window import WATCHER
from cnnstrategies.paramserver.core.node import ControlError, Message, Peer
from cnnstrategies.paramserver.drivers.control import ROLES
from cnnstrategies.paramserver.security import fingerprint

REGISTER, REGISTERED = "register", "registered"
DESK = Peer("coordinator", 0)  # Who answers.
MOST_KEYS = 1 << 16  # that are known at a time
MEMBERS = frozenset(ROLES) - {"coordinator", WATCHER}


class Bindings:
    """Whose keys are known at the coordinator.

    Args:
        run: The run's public key.
        members: Those whose keys are never forgotten.
        most: How many keys are known at a time.

    Attributes:
        bound: Whose each key is, the last registered last.
    """

    def __init__(self, run: str, members: Callable[[], set[Peer]], most: int = MOST_KEYS) -> None:
        self._run = run
        self._members = members
        self._most = most
        self.bound: OrderedDict[str, Peer] = OrderedDict()

    def admits(self, key: str) -> bool:
        """Whether who has a key may connect."""
        return key == self._run or key in self.bound

    def check(self, key: str, sender: Peer, message: Message) -> None:
        """Look whether a message comes from whom it says.

        Args:
            key: Of its connection.
            sender: As it says.
            message: The message.

        Raises:
            ControlError: It does not.
        """
        if message.kind == REGISTER:
            self._register(key, sender, message.string("public_key"))
        elif sender.role == WATCHER:
            if key != self._run:
                raise ControlError("who only watches has the run's key")
        elif self.bound.get(key) != sender:
            raise ControlError(f"{message.kind}: a key that is not its sender's")
        elif message.fields.get("public_key", key) != key:
            raise ControlError(f"{message.kind}: another one's key")

    def _register(self, key: str, sender: Peer, own: str) -> None:
        if key != self._run or sender.role not in MEMBERS or not own.isascii() or sender.process != fingerprint(own):
            raise ControlError("a key is registered in another one's name")
        if self.bound.setdefault(own, sender) != sender:
            raise ControlError("a key is one member's, for one life")
        self.bound.move_to_end(own)
        if len(self.bound) > self._most:
            members = self._members()
            del self.bound[next(key for key, peer in self.bound.items() if peer not in members)]
