"""Simulates runs: `python -m cnnstrategies.paramserver.simulation.run [--first N] [--seeds N]`, or `make simulate`."""

import argparse
import sys
import time
from collections import Counter
from typing import NamedTuple

from cnnstrategies.paramserver.coordinator.settings import CoordinatorSettings
from cnnstrategies.paramserver.simulation.faults import Fault, Faults, MessageFault, draw
from cnnstrategies.paramserver.simulation.invariants import Invariants, ViolationError
from cnnstrategies.paramserver.simulation.shrink import shrink
from cnnstrategies.paramserver.simulation.toys import Toys
from cnnstrategies.paramserver.simulation.world import World

TIMEOUT = 1.0
BUSY = 1.5  # seconds in which faults begin
HORIZON = 100.0  # no run takes longer
LINES = 60  # of a trace


class Outcome(NamedTuple):
    """What came of a seed.

    Attributes:
        violation: The invariant that did not hold; None if all did.
        events: How many there were.
        seconds: Of virtual time.
        counts: Injected faults, by kind.
        faults: The same one by one.
        trace: A line for each event, if it was asked for.
    """

    violation: str | None
    events: int
    seconds: float
    counts: Counter[str]
    faults: list[Fault | MessageFault]
    trace: list[str]


def simulate(seed: int, removed: frozenset[Fault | MessageFault] = frozenset(), traced: bool = False) -> Outcome:
    """Run one seed.

    Args:
        seed: Decides everything.
        removed: Faults that do not happen.
        traced: Whether to write down what happens.
    """
    workers, servers = 1 + int(4 * draw(seed, 41)), int(4 * draw(seed, 42))
    survivable = int(draw(seed, 43) < 0.5 and servers > 1)
    restarts, epochs, nodes = int(3 * draw(seed, 44)), 2 + int(2 * draw(seed, 45)), 1 + int(3 * draw(seed, 46))
    settings = CoordinatorSettings(
        "sim", workers, servers, TIMEOUT, 3 * TIMEOUT, survivable, (0,), supervised=restarts > 0
    )
    places = [("worker", one) for one in range(workers)] + [("server", one) for one in range(servers)]
    places += [("coordinator", 0), *(("supervision", node) for node in range(nodes))]
    faults = Faults(seed, places, TIMEOUT, BUSY, removed)
    world = World(seed, faults)
    if traced:
        world.trace = []
    toys = Toys(world, settings, epochs, restarts, nodes, seed)
    invariants = Invariants(world, toys, settings, epochs)
    violation = None
    looked = 0.0
    try:
        toys.start()
        while not invariants.over and world.now < HORIZON and world.step():
            if world.now - looked > TIMEOUT / 4:
                looked = world.now
                invariants.look()
        if not invariants.over:
            raise ViolationError(f"17: the run is not over after {world.now:.1f} s")
        invariants.check()
    except ViolationError as error:
        violation = str(error)
    met: list[Fault | MessageFault] = [*faults.timed, *faults.met]
    return Outcome(violation, world.events, world.now, faults.counts, met, world.trace or [])


def explain(seed: int, outcome: Outcome) -> str:
    """The smallest part of a failing seed's faults with which it fails in the same way, and what happens then."""
    assert outcome.violation is not None
    rule = outcome.violation.partition(":")[0]
    everything = outcome.faults

    def fails(kept: "list[Fault | MessageFault]") -> bool:
        violation = simulate(seed, frozenset(everything) - frozenset(kept)).violation
        return violation is not None and violation.startswith(f"{rule}:")

    kept = shrink(everything, fails)  # type: ignore[arg-type]
    smallest = simulate(seed, frozenset(everything) - frozenset(kept), traced=True)
    lines = smallest.trace
    shown = lines if len(lines) <= LINES else [*lines[: LINES // 4], "...", *lines[-3 * LINES // 4 :]]
    faults = "\n".join(f"  {one}" if isinstance(one, Fault) else f"  message {one[1]} of link {one[0]}" for one in kept)
    return f"seed {seed}: {smallest.violation}\nwith these of {len(everything)} faults:\n{faults}\n" + "\n".join(shown)


def main() -> None:
    """Run seeds one after the other; the first that fails ends it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=300, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first: to see one again")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    events, began, started, said = 0, time.monotonic(), time.process_time(), 0.0
    for done, seed in enumerate(range(arguments.first, arguments.first + arguments.seeds), 1):
        outcome = simulate(seed)
        counts += outcome.counts
        events += outcome.events
        if outcome.violation is not None:
            print(f"\n{explain(seed, outcome)}")
            sys.exit(1)
        passed = time.monotonic() - began
        if passed - said > 1.0 or done == arguments.seeds:
            said = passed
            worked = time.process_time() - started
            rate = f"{events / worked:,.0f} events and {done / worked:,.1f} seeds per second of processor time"
            print(f"\r{done:,} of {arguments.seeds:,} seeds, {rate}", end="", flush=True)
    print("\ninjected: " + ", ".join(f"{kind} {count:,}" for kind, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
