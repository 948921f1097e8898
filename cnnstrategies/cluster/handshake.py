"""Handshake by which the ranks of a run find their own rank 0, as state machines without sockets and clocks.

Rank 0 has a door: a port at which it answers. Every other rank knocks at the door. It sends a :class:`Hello` with the
identity of its run. The door answers with a :class:`Challenge`, the rank with a :class:`Proof`, and the door with a
:class:`Welcome`, which contains the port of the run's store. A process of another run gets a :class:`Refusal`, which
contains the identity of the run behind the door. If the processes of a run share a secret, then both sides prove with
it, by an HMAC over the other side's random number, that they know the secret. Otherwise the key of the HMAC is empty,
and the handshake guards against mistakes only.

A message is a magic number, a length of two bytes, and JSON. All bytes come from outside, so that :func:`read` accepts
only messages of a known kind whose fields have the right types and sizes.
"""

import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import TypeAlias

from cnnstrategies.identity import Identity
from cnnstrategies.runtime.records import parsed, record

MAGIC = b"cnnstr1\n"
LENGTH = 2  # Number of bytes of a message's length.
MOST_BYTES = 4096  # Largest length of a message's JSON.
LONGEST = 1024  # Largest number of characters of a text in a message.
LARGEST = 2**40  # First number in a message that is too large.


@dataclass(frozen=True)
class Hello:
    """First message of a rank that knocks.

    Attributes:
        run: Identity of the rank's run, as JSON.
        strategy: Name of the strategy's class.
        rank: The rank.
        world: Number of ranks of its run.
        number: Random number of the rank, in hexadecimal digits, which the door's proof must cover.
    """

    run: str
    strategy: str
    rank: int
    world: int
    number: str


@dataclass(frozen=True)
class Challenge:
    """The door's answer to a rank whose identity is right.

    Attributes:
        number: Random number of the door, in hexadecimal digits, which the rank's proof must cover.
        proof: Proof that the door knows the secret of the run.
    """

    number: str
    proof: str


@dataclass(frozen=True)
class Proof:
    """Proof that the rank knows the secret of the run."""

    proof: str


@dataclass(frozen=True)
class Welcome:
    """The door's last answer to a rank of its run.

    Attributes:
        port: Port of the run's store, on rank 0's host.
        proof: Proof that the port comes from a process that knows the secret.
    """

    port: int
    proof: str


@dataclass(frozen=True)
class Refusal:
    """The door's answer to a process that it does not let in.

    Attributes:
        run: Identity of the run behind the door, as JSON.
        since: Time at which rank 0's process started, in seconds since the epoch.
        reason: Why the process is refused, if the identities of both runs are equal; otherwise empty.
    """

    run: str
    since: int
    reason: str


Message: TypeAlias = Hello | Challenge | Proof | Welcome | Refusal
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Hello, Challenge, Proof, Welcome, Refusal)}


class WrongBytesError(ValueError):
    """The other side has sent bytes that are not a message of this protocol."""


def write(message: Message) -> bytes:
    """Return the bytes of a message."""
    content = json.dumps([type(message).__name__, vars(message)]).encode()
    assert len(content) <= MOST_BYTES, "the fields of a message have bounded lengths"
    return MAGIC + len(content).to_bytes(LENGTH, "big") + content


def read(buffer: bytearray) -> Message | None:
    """Remove the first message from received bytes, and return it. Return None if the message is not complete yet.

    Raises:
        WrongBytesError: The bytes are not the beginning of a message. Nothing more must be read from the connection.
    """
    head = len(MAGIC) + LENGTH
    if not MAGIC.startswith(bytes(buffer[: len(MAGIC)])):
        raise WrongBytesError("the bytes do not begin with the magic number")
    if len(buffer) < head:
        return None
    length = int.from_bytes(buffer[len(MAGIC) : head], "big")
    if length > MOST_BYTES:
        raise WrongBytesError(f"a message has {length} bytes, but at most {MOST_BYTES} are allowed")
    if len(buffer) < head + length:
        return None
    content = bytes(buffer[head : head + length])
    del buffer[: head + length]
    return _parsed(content)


def _parsed(content: bytes) -> Message:
    try:
        kind, values = parsed(content)
        return record(KINDS[kind], values, LONGEST, LARGEST)
    except (ValueError, TypeError, KeyError) as error:
        raise WrongBytesError("a message is not valid") from error


def proof(secret: bytes, purpose: str, *contents: object) -> str:
    """Return the proof, in hexadecimal digits, that a process knows the secret.

    Args:
        secret: The secret of the run; empty if the run has none.
        purpose: Name of the message that contains the proof. A proof of one kind cannot be used as another kind.
        contents: Values that the proof covers.
    """
    return hmac.new(secret, json.dumps([purpose, *contents]).encode(), hashlib.sha256).hexdigest()


def proves(claimed: str, secret: bytes, purpose: str, *contents: object) -> bool:
    """Whether `claimed` is the result of :func:`proof` for the other arguments."""
    return hmac.compare_digest(claimed.encode(), proof(secret, purpose, *contents).encode())


@dataclass(frozen=True)
class RankCredentials:
    """Description of a rank, by which rank 0 and the other ranks of its run recognise each other.

    Attributes:
        identity: Identity of the run.
        strategy: Name of the strategy's class.
        rank: The rank.
        world: Number of ranks.
        since: Time at which the process started, in seconds since the epoch.
        secret: Secret that the processes of the run share; empty if there is none.
    """

    identity: Identity
    strategy: str
    rank: int
    world: int
    since: int
    secret: bytes = b""


class Door:
    """Rank 0's side of the handshake: who is let in.

    Args:
        host: Rank 0.
        port: Port of the run's store.
        exclusive: Whether each rank is let in once, as the ranks of a process group. The place of a rank is free again
            if the rank's process ends before all ranks have been let in. False for a run that replaces lost processes.

    Attributes:
        complete: Whether all ranks have been let in.
    """

    def __init__(self, host: RankCredentials, port: int, exclusive: bool = True) -> None:
        self.host = host
        self.port = port
        self._exclusive = exclusive
        self._present: set[int] = set()
        self.complete = False

    def refusal(self, hello: Hello) -> Refusal | None:
        """Return the refusal of a process, or None if the process belongs to the run, unless its proof is wrong."""
        host = self.host
        try:
            run = Identity.read(hello.run)
        except ValueError:
            return self.refuse("its version of cnnstrategies is different")
        if run != host.identity:
            return self.refuse("")
        if hello.strategy != host.strategy:
            return self.refuse(f"its strategy is {host.strategy}, and not {hello.strategy[:64]}")
        if hello.world != host.world:
            return self.refuse(f"it has {host.world} processes, and not {hello.world}")
        if not 0 < hello.rank < host.world:
            return self.refuse(f"it has no place for a second process with rank {hello.rank}")
        if self._exclusive and (self.complete or hello.rank in self._present):
            return self.refuse(f"its rank {hello.rank} is another process, which has arrived earlier")
        return None

    def refuse(self, reason: str) -> Refusal:
        """Return a refusal."""
        return Refusal(self.host.identity.text(), self.host.since, reason)

    def enter(self, rank: int) -> None:
        """Record that a rank has been let in."""
        self._present.add(rank)
        self.complete = self.complete or len(self._present) == self.host.world - 1

    def leave(self, rank: int) -> None:
        """Record that the process of a rank that was let in has closed its connection."""
        if not self.complete:
            self._present.discard(rank)


class Visit:
    """The door's side of one connection.

    Args:
        door: The door.
        number: Random number in hexadecimal digits, a new one for each connection.

    Attributes:
        rank: Rank of the process, once it has been let in; None before.
    """

    def __init__(self, door: Door, number: str) -> None:
        self.rank: int | None = None
        self._door = door
        self._number = number
        self._hello: Hello | None = None

    def receive(self, message: Message) -> Message:
        """Return the answer to a message. After a :class:`Refusal`, the connection must be closed.

        Raises:
            WrongBytesError: The message is not the next message of the handshake.
        """
        door, secret = self._door, self._door.host.secret
        if self._hello is None and isinstance(message, Hello):
            if (refusal := door.refusal(message)) is not None:
                return refusal
            self._hello = message
            return Challenge(self._number, proof(secret, "door", message.number, self._number))
        if self._hello is not None and self.rank is None and isinstance(message, Proof):
            hello = self._hello
            if not proves(message.proof, secret, "rank", self._number, hello.number, hello.rank):
                return door.refuse("the secret of its launch is different")
            if (refusal := door.refusal(hello)) is not None:
                return refusal  # Another process has taken the place since the first message.
            door.enter(hello.rank)
            self.rank = hello.rank
            return Welcome(door.port, proof(secret, "port", hello.number, door.port))
        raise WrongBytesError(f"{type(message).__name__} is not the next message")

    def end(self) -> None:
        """Record that the connection is closed."""
        if self.rank is not None:
            self._door.leave(self.rank)


@dataclass(frozen=True)
class Refused:
    """Result of knocking at the door of another run.

    Attributes:
        run: Identity of the run behind the door.
        since: Time at which that run's rank 0 started, in seconds since the epoch.
        reason: Why the door refuses the rank, if the identities are equal; otherwise empty.
    """

    run: Identity
    since: int
    reason: str


class Knock:
    """The side of a rank that knocks at a door.

    Args:
        guest: The rank.
        number: Random number in hexadecimal digits, a new one for each connection.
    """

    def __init__(self, guest: RankCredentials, number: str) -> None:
        self._guest = guest
        self._number = number
        self._challenged = False

    def hello(self) -> Hello:
        """Return the first message."""
        guest = self._guest
        return Hello(guest.identity.text(), guest.strategy, guest.rank, guest.world, self._number)

    def receive(self, message: Message) -> Proof | int | Refused:
        """Return the answer to the door's message, or else the result: the port of the store, or a refusal.

        Raises:
            WrongBytesError: The message is not the next message of the handshake.
        """
        secret, number = self._guest.secret, self._number
        if isinstance(message, Refusal):
            try:
                return Refused(Identity.read(message.run), message.since, message.reason)
            except ValueError as error:
                raise WrongBytesError("a refusal does not name a run") from error
        if isinstance(message, Challenge) and not self._challenged:
            if not proves(message.proof, secret, "door", number, message.number):
                return Refused(self._guest.identity, 0, "the secret of its launch is different")
            self._challenged = True
            return Proof(proof(secret, "rank", message.number, number, self._guest.rank))
        if isinstance(message, Welcome) and self._challenged and self._is_right(message):
            return message.port
        raise WrongBytesError(f"{type(message).__name__} is not the next message")

    def _is_right(self, welcome: Welcome) -> bool:
        right = proves(welcome.proof, self._guest.secret, "port", self._number, welcome.port)
        return right and 0 < welcome.port < 2**16
