"""Workers that join a simulated run and leave it: nobody has started them, and nobody starts them again."""

from collections import deque
from collections.abc import Callable

from cnnstrategies.paramserver.coordinator.collective_rounds import MIDWAY
from cnnstrategies.paramserver.coordinator.participant import Participant
from cnnstrategies.paramserver.coordinator.settings import WORKER
from cnnstrategies.paramserver.coordinator.status import PLACE, WATCHER
from cnnstrategies.paramserver.core.node import Message, Peer, Send
from simulation.faults import draw
from simulation.toys import CHUNK, SAMPLES, Toys, contents, newer_view
from simulation.world import Ask, Program, Sleep, World

AHEAD = 2  # chunks that one takes before it has worked on the first
LATEST = 2.5  # seconds: when the first one comes


class Joiners:
    """Some of them, each of which comes at a moment of its own, and again after each epoch."""

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
        """Ask for a place, and take it."""
        process = self._world.processes["coordinator", 0]
        coordinator = self._toys.coordinator
        found = coordinator.on_message(self._world.now, Peer(WATCHER, 0), Message(PLACE)) if process.alive else []
        answers = [one.message.fields for one in found if isinstance(one, Send)]
        if process.ended is not None or any(one["ended"] for one in answers) or self._toys.is_over:
            return
        places = [(one["place"], one["incarnation"]) for one in answers if "place" in one]
        before = [self._world.processes.get((WORKER, place)) for place, _ in places]
        if not places or any(one and one.alive and not one.done and one.ended is None for one in before):
            self._again(self._join)  # None is free, or somebody was given the same just now.
            return
        self._toys.log.joined.add(self._toys.member(WORKER, *places[0], program=self._help).peer)

    def _again(self, what: Callable[[], None]) -> None:
        self._world.at(self._world.now + self._seconds(0.1, 0.4), what)

    def _help(self, participant: Participant) -> Program:
        """Take part until the epoch has no more chunks, or until told to go."""
        yield Sleep(self._seconds(0.0, 0.1))
        yield from newer_view(participant, -1)
        yield Ask("get")
        started = yield from self._toys.collect(participant, "start", seal=True)
        epoch = contents(started)[min(started.fields["ids"])][2]
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
