"""Search of a rank for its own rank 0, among several ports at which other runs may answer.

The search is a state machine without sockets and clocks.

Rank 0 listens at the first free port of a short list. The other ranks look through the same list. A rank that finds
only another run has two possible reasons: its own rank 0 has not started yet, or it has no rank 0 any more, or never
had one at this address. In the first case it has to wait, and in the second case it must leave within seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cnnstrategies.cluster.handshake import Refused
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.identity import Identity, StrangerError

GRACE = 3.0  # Seconds after the first refusal after which a rank without a rank 0 of its own leaves.
OTHERS_EVERY = 5  # Unless the first port is taken, the other ports are tried in one of this many rounds.
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5  # Seconds between two rounds. The pause becomes longer from round to round.


@dataclass(frozen=True)
class Failed:
    """Result of knocking at a port at which no door has answered.

    Attributes:
        kind: ``absent`` if the host has refused the connection, ``mute`` if the program at the port does not answer or
            is not a door, ``silent`` if the host does not answer, and ``other`` for another error.
        text: Description of the error; empty unless the kind is ``other``.
    """

    kind: Literal["absent", "mute", "silent", "other"]
    text: str = ""


Answer: TypeAlias = int | Refused | Failed  # The first is the port of the store of this rank's run.
REASONS = {
    "absent": "no process listens at the port; check that rank 0 was started with the same MASTER_PORT",
    "mute": "the program that listens at the port is not a run of cnnstrategies; choose another MASTER_PORT",
    "silent": "no answer; check that the machine is running and that no firewall blocks the port",
}


class RankZeroSearch:
    """Decides which ports a rank tries, how long it waits, and whether it gives up.

    Args:
        identity: Identity of the rank's run.
        since: Time at which the rank's process started, in seconds since the epoch.
        certain: Whether a launcher has started rank 0 together with this rank, and ends both if one of them fails.
            Otherwise users start each rank or each host, and may never start rank 0.
        where: Name of rank 0's host, for error messages.
        me: Name of this host, for error messages.
        now: The current time.
        seconds: Longest time to search.
    """

    def __init__(
        self, identity: Identity, since: int, certain: bool, where: str, me: str, now: float, seconds: float
    ) -> None:
        self._identity = identity
        self._since = since
        self._certain = certain
        self._where = where
        self._me = me
        self._seconds = seconds
        self._end = now + seconds
        self._rounds = 0
        self._answers: dict[int, Answer] = {}
        self._refused_since: dict[tuple[int, Refused], float] = {}

    def ports(self, candidates: Sequence[int]) -> list[int]:
        """Return the ports to try now.

        Args:
            candidates: The ports at which rank 0 may listen, the most likely port first.
        """
        first = self._answers.get(candidates[0]) if candidates else None
        taken = isinstance(first, Refused) or first == Failed("mute")
        self._rounds += 1
        return list(candidates if taken or self._rounds % OTHERS_EVERY == 0 else candidates[:1])

    @property
    def pause(self) -> float:
        """Seconds until the next round."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 1.5 ** min(self._rounds, 10))

    def decide(self, now: float, answers: dict[int, Answer]) -> int | None:
        """Return the port of the store if rank 0 was found. Return None if the rank has to try again after a pause.

        Args:
            now: The current time.
            answers: The answers of this round. The keys are ports.

        Raises:
            StrangerError: Only other runs have answered, and the rank need not wait for its own rank 0.
            ConfigurationError: Rank 0 was not found in time.
        """
        # Answers of earlier rounds are dropped: another program may use the port now.
        self._answers = answers
        for answer in answers.values():
            if isinstance(answer, int):
                return answer
        refusals = [(port, answer) for port, answer in answers.items() if isinstance(answer, Refused)]
        self._refused_since = {refusal: self._refused_since.get(refusal, now) for refusal in refusals}
        for (port, refused), since in self._refused_since.items():
            if now >= self._end or (now - since >= GRACE and not self.waits(refused)):
                raise StrangerError(self._stranger(port, refused))
        if now >= self._end:
            raise ConfigurationError(self._late())
        return None

    def waits(self, refused: Refused) -> bool:
        """Whether the rank has to wait for its own rank 0, although another run answers at a port of its list.

        Otherwise the rank has no rank 0: it is left over from an earlier launch of the run that answers, or its
        configuration differs from the configuration of the other ranks, or users have started it alone.
        """
        if not self._certain or refused.reason or refused.run.launch == self._identity.launch:
            return False
        is_left_over = bool(self._identity.name) and refused.run.name == self._identity.name
        return not (is_left_over and refused.since > self._since)

    def _stranger(self, port: int, refused: Refused) -> str:
        if refused.reason:
            why = f", but {refused.reason}"
        elif refused.run.launch and refused.run.launch == self._identity.launch:
            why = ": start all processes of a launch with the same configuration"
        elif self._identity.name and refused.run.name == self._identity.name:
            why = ": this process is left over from another launch of the run, or belongs to another run_name"
        else:
            why = ": set MASTER_PORT or MASTER_ADDR to the port or the address of its own run"
        return f"this process of {self._identity} has reached {refused.run} at {self._where}, port {port}{why}"

    def _late(self) -> str:
        port, answer = next(iter(self._answers.items()), (0, None))
        reason = "rank 0 has not published its port"
        if isinstance(answer, Failed):
            reason = REASONS.get(answer.kind, answer.text)
        return (
            f"{self._me} has not reached the main address {self._where}{f' on port {port}' if port else ''} for "
            f"{self._seconds:g} s: {reason}"
        )
