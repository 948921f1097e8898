"""Simulates runs: `python -m cnnstrategies.paramserver.simulation.run [--first N] [--seeds N]`, or `make simulate`."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from cnnstrategies.paramserver.simulation import control
from cnnstrategies.paramserver.simulation.data import run as data
from cnnstrategies.paramserver.simulation.faults import Fault, MessageFault
from cnnstrategies.paramserver.simulation.outcome import Outcome
from cnnstrategies.paramserver.simulation.shrink import shrink

LINES = 60  # of a trace
Simulate = Callable[..., Outcome]
PLANES: dict[str, Simulate] = {
    "control": control.simulate,
    "data": data.simulate,
    "data, with a successor of the coordinator,": partial(data.simulate, successor=True),
}


def explain(seed: int, outcome: Outcome, simulate: Simulate) -> str:
    """The smallest part of a failing seed's faults with which it fails in the same way, and what happens then.

    Args:
        seed: The seed.
        outcome: What came of it.
        simulate: Runs it.
    """
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
    counts = {plane: Counter[str]() for plane in PLANES}
    events, began, started, said = 0, time.monotonic(), time.process_time(), 0.0
    for done, seed in enumerate(range(arguments.first, arguments.first + arguments.seeds), 1):
        for plane, simulate in PLANES.items():
            outcome = simulate(seed)
            counts[plane] += outcome.counts
            events += outcome.events
            if outcome.violation is not None:
                print(f"\n{plane} plane, {explain(seed, outcome, simulate)}")
                sys.exit(1)
        passed = time.monotonic() - began
        if passed - said > 1.0 or done == arguments.seeds:
            said = passed
            worked = time.process_time() - started
            rate = f"{events / worked:,.0f} events and {done / worked:,.1f} seeds per second of processor time"
            print(f"\r{done:,} of {arguments.seeds:,} seeds, {rate}", end="", flush=True)
    print()
    for plane, injected in counts.items():
        print(f"injected, {plane} plane: " + ", ".join(f"{kind} {n:,}" for kind, n in sorted(injected.items())))


if __name__ == "__main__":
    main()
