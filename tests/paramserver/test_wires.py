"""A run whose every connection is a wire that changes bytes, breaks, falls silent or is slow ends as if it were not.

More runs, some seconds each: ``make faults RUNS=200``; ``FIRST`` is the seed of the first.
"""

import contextlib
import itertools
import multiprocessing
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port
from replay import Places, Plan, replay
from rough_wires import FAR, HERE, Wires
from test_replay import the_weights_are_those_of_one_process

from cnnstrategies.paramserver.places import Watcher
from cnnstrategies.paramserver.security import KeyPair

RUNS = int(os.environ.get("CNNSTRATEGIES_FAULTS", "2"))
FIRST = int(os.environ.get("CNNSTRATEGIES_FAULTS_FROM", "0"))
TIMEOUT = 10.0  # seconds
_context = multiprocessing.get_context("fork")


class Wired(Places):
    """Where the processes of a run listen that reach each other over wires only."""

    timeout = TIMEOUT
    limit = 12 * TIMEOUT
    known_as = FAR

    def __init__(self, directory: Path, wires: Wires) -> None:
        super().__init__(directory)
        self._wires = wires
        self._ports: dict[str, int] = {}
        KeyPair.create().save(directory / "keys")
        self.key_file = str(directory / "keys")

    def lay(self, who: str) -> None:
        """Lay a wire to a process that is to be started."""
        self._ports[who] = free_port()
        self._wires.lay(self._ports[who])

    def listens(self, who: str) -> str:
        """The endpoint of a process."""
        return f"tcp://{HERE}:{self._ports[who]}"

    def reached(self, endpoint: str) -> str:
        """How others reach it."""
        return endpoint.replace(HERE, FAR)


@contextlib.contextmanager
def watching(places: Wired) -> Iterator[None]:
    """Someone asks how the run goes, again and again, and is answered in good time.

    In a process: a thread may hold a lock of OpenSSL's just when a process of the run is forked, which then hangs.
    """

    def watch() -> None:
        with Watcher(places.reached(places.listens("coordinator")), KeyPair.load(str(places.key_file))) as watcher:
            heard = time.monotonic()
            while not over.wait(0.1):
                if watcher.ask(2.0) is not None:
                    heard = time.monotonic()
                assert time.monotonic() - heard < 2 * TIMEOUT, "who watches is not answered"

    over = _context.Event()
    process = _context.Process(target=watch, daemon=True)
    process.start()
    try:
        yield
        over.set()
        process.join(2 * TIMEOUT)
        assert process.exitcode == 0, "who watches waits for ever, or is not answered"
    finally:
        process.kill()


def run(seed: int, wires: Wires, directory: Path) -> None:
    chance = random.Random(seed)
    mode, replication = chance.choice(["sync", "async"]), chance.choice([1, 2])
    plan = Plan(mode=mode, replication=replication, joins=mode == "async")
    places = Wired(directory, wires)
    for who in ("coordinator", *(f"server-{number}-0" for number in range(plan.servers))):
        places.lay(who)
    wires.start()
    try:
        with watching(places):
            outcome = replay(plan, [], places)
    finally:
        wires.end()
        print(plan, wires.met)
    stalls = [fault for fault, _ in wires.met].count("stall")
    if outcome.errors and stalls > 1:  # On one wire they are a link that is down for too long.
        named = r"(heard nothing|no answer) from server|was silent"
        assert all(re.search(named, error) for error in outcome.errors.values()), outcome
        return
    the_weights_are_those_of_one_process(plan, outcome, None)
    for times in outcome.times.values():
        events = sorted([*times, *(when for _, when in wires.met)])
        longest = max(after - at for at, after in itertools.pairwise(events))
        assert longest < 2 * TIMEOUT + wires.starved, (events, wires.met, wires.starved)


@pytest.mark.cluster
@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
def test_any_harm_that_wires_do(seed: int, tmp_path: Path) -> None:
    run(seed, Wires(seed), tmp_path)


@pytest.mark.cluster
@pytest.mark.parametrize("seed", range(FIRST, FIRST + RUNS))
def test_one_in_a_hundred_pieces_is_lost(seed: int, tmp_path: Path) -> None:
    run(seed, Wires(seed, ("nothing",), lost=0.01), tmp_path)


def test_bytes_that_change_and_connections_that_break(tmp_path: Path) -> None:
    """The same in some seconds."""
    run(0, Wires(0, ("byte", "drop", "half"), faulty=2), tmp_path)
