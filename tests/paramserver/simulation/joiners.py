"""Workers that join a simulated run and leave it. No supervision starts them or starts them again."""

from collections import deque
from collections.abc import Callable

from cnnstrategies.paramserver.coordinator.collective_rounds import MIDWAY
from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.coordinator.settings import WORKER
from cnnstrategies.paramserver.coordinator.status import PLACE, WATCHER
from cnnstrategies.paramserver.core.node import Message, Peer, Send
from tests.paramserver.simulation.faults import draw
from tests.paramserver.simulation.toys import CHUNK, SAMPLES, Toys, first_value, newer_view
from tests.paramserver.simulation.world import Ask, Program, Sleep, World

AHEAD = 2  # Number of chunks that a joiner holds at once.
LATEST = 2.5  # Latest time, in seconds, at which a joiner first asks for a place.


class Joiners:
    """Some joiners. Each comes at a time of its own, and most come again after each epoch."""

    def __init__(self, seed: int, world: World, toys: Toys, max_joiners: int) -> None:
        self._seed = seed
        self._world = world
        self._toys = toys
        self._draws = 0
        for number in range(max_joiners + int(2 * draw(seed, 52))):
            world.at(LATEST * draw(seed, 53, number) ** 2, self._join)

    def _seconds(self, least: float, most: float) -> float:
        self._draws += 1
        return least + (most - least) * draw(self._seed, 54, self._draws)

    def _join(self) -> None:
        """Ask the coordinator for a place, and start a joiner there."""
        process = self._world.processes["coordinator", 0]
        coordinator = self._toys.coordinator
        effects = coordinator.on_message(self._world.now, Peer(WATCHER, 0), Message(PLACE)) if process.alive else []
        answers = [effect.message.fields for effect in effects if isinstance(effect, Send)]
        if process.ended is not None or any(answer["ended"] for answer in answers) or self._toys.is_over:
            return
        places = [(answer["place"], answer["incarnation"]) for answer in answers if "place" in answer]
        others = [self._world.processes.get((WORKER, place)) for place, _ in places]
        if not places or any(other and other.alive and not other.done and other.ended is None for other in others):
            self._again(self._join)  # No place is free, or another joiner was just given the same place.
            return
        self._toys.log.joined.add(self._toys.member(WORKER, *places[0], program=self._help).peer)

    def _again(self, action: Callable[[], None]) -> None:
        self._world.at(self._world.now + self._seconds(0.1, 0.4), action)

    def _help(self, participant: Participant) -> Program:
        """Program of a joiner: wait to be let in, then work until the epoch has no more chunks."""
        yield Sleep(self._seconds(0.0, 0.1))
        yield from newer_view(participant, -1)
        yield Ask("get", {"number": 0})
        started = yield from self._toys.collect(participant, "start", seal=True)
        epoch = first_value(started)[2]
        self._world.faults.counts["join" + " after a boundary" * (MIDWAY in started.fields)] += 1
        if MIDWAY not in started.fields:
            yield from self._toys.collect(participant, "admitted")
        yield from self._work(participant, epoch)

    def _work(self, participant: Participant, epoch: int) -> Program:
        yield Ask("epoch", {"epoch": epoch, "samples": SAMPLES, "chunk": CHUNK})
        leaves = self._seconds(0.0, 1.0) < 0.3
        limit = int(self._seconds(0.0, 5.0)) if leaves else SAMPLES
        taken, processed, held = 0, 0, deque[Message]()
        while True:
            while len(held) < AHEAD and taken < limit:
                chunk = yield Ask("take", {"epoch": epoch, "processed": processed})
                if chunk.integer("start") == chunk.integer("stop"):
                    limit = taken
                else:
                    held.append(chunk)
                    taken += 1
            if not held:
                break
            yield Sleep(self._seconds(0.005, 0.08))
            processed += self._toys.process(participant, held.popleft())
        yield Ask("leave", {"epoch": epoch, "processed": processed})
        self._toys.log.helped.add(participant.peer)
        if not leaves:
            self._again(self._join)
