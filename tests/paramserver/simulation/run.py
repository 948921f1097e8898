"""Simulate runs: `python -m tests.paramserver.simulation.run [--first N] [--seeds N]`, or `make simulate`."""

import argparse
import gc
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from tests.paramserver.simulation import control, traces
from tests.paramserver.simulation.data import run as data
from tests.paramserver.simulation.faults import Fault, Faults
from tests.paramserver.simulation.plane import Outcome
from tests.paramserver.simulation.traces import Cue, Script, Trace, as_text, changed_settings

Item = TypeVar("Item")


def shrink(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Return a smallest part of a sequence with which a run still fails: removing any single item hides the failure."""
    kept = list(items)
    size = max(1, len(kept) // 2)
    while kept:
        for start in range(0, len(kept), size):
            part = kept[:start] + kept[start + size :]
            if fails(part):
                kept = part
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    return kept


LINES = 60  # Number of lines of a trace that are printed.
TOGETHER = 10  # Number of seeds that a process runs before it reports their results.


class Plane(NamedTuple):
    """A part of the parameter server that can be simulated, under its name in traces."""

    name: str
    plan: Callable[..., Any]
    timeout: float
    drawn: Callable[..., tuple[Any, Faults]]
    run: Callable[..., Outcome]

    def __call__(self, seed: int, traced: bool = False) -> Outcome:
        """Simulate one seed."""
        return self.run(*self.drawn(seed), seed, traced)


PLANES = {
    "control": Plane("control", control.Plan, control.TIMEOUT, control.drawn, control.run),
    "data": Plane("data", data.Plan, data.TIMEOUT, data.drawn, data.run),
}


def play(trace: Trace, traced: bool = False) -> Outcome:
    """Simulate a trace and return the outcome.

    Raises:
        AssertionError: A moment that the trace names did not come.
    """
    plane = PLANES[trace.plane]
    script = Script(trace, plane.timeout)
    outcome = plane.run(traces.plan(plane.plan, trace.plan), script, trace.pace, traced)
    missed = [str(cue) for cue in script.cues.left]
    assert not missed, f"{trace}: these moments do not come: {missed}"
    return outcome


class Failure(NamedTuple):
    """A simulated run that violated an invariant or raised an exception.

    Attributes:
        outcome: The run's outcome, or the text of the traceback if the run raised an exception.
    """

    plane: str
    seed: int
    outcome: Outcome | str

    @property
    def brief(self) -> str:
        """The plane, the seed and the violation or traceback."""
        problem = self.outcome if isinstance(self.outcome, str) else self.outcome.violation
        return f"{self.plane} plane, seed {self.seed}: {problem}"


class Results(NamedTuple):
    """Results of some seeds.

    Attributes:
        seeds: Number of seeds.
        events: Number of events in the runs.
        worked: CPU time, in seconds.
        counts: By plane: number of injected faults of each kind.
    """

    seeds: int
    events: int
    worked: float
    counts: dict[str, Counter[str]]
    failures: list[Failure]


def explain(seed: int, outcome: Outcome, plane: Plane) -> str:
    """Return a trace with the fewest faults of a failing seed that violate the same invariant, and its last events."""
    assert outcome.violation is not None
    rule = outcome.violation.partition(":")[0]
    plan, faults = plane.drawn(seed)
    timed = list(faults.timed)  # Copied before the run, which adds the faults that happen when a message is sent.
    cues = plane.run(plan, faults, seed, True).cues

    def replay(kept: Sequence[Fault | Cue], traced: bool = False) -> Outcome:
        script = Script(Trace("", tcp=faults.tcp, pace=seed).having(kept), faults.timeout)
        return plane.run(plan, script, seed, traced)

    def fails(kept: Sequence[Fault | Cue]) -> bool:
        violation = replay(kept).violation
        return violation is not None and violation.startswith(f"{rule}:")

    everything: list[Fault | Cue] = [*timed, *cues]
    kept = shrink(everything, fails)
    smallest = replay(kept, traced=True)
    lines = smallest.trace
    shown = lines if len(lines) <= LINES else [*lines[: LINES // 4], "...", *lines[-3 * LINES // 4 :]]
    trace = Trace(f"seed {seed}: {smallest.violation}", plane.name, changed_settings(plan), seed, faults.tcp).having(
        kept
    )
    return f"{as_text(trace)}\n(of {len(everything)} faults)\n" + "\n".join(shown)


def simulate_all(planes: Sequence[str], seeds: range) -> Results:
    """Simulate some seeds in some planes and return the results."""
    counts, events, began = {plane: Counter[str]() for plane in planes}, 0, time.process_time()
    failures: list[Failure] = []
    gc.disable()  # A collection visits all of torch's objects: it would cost a tenth of the time.
    for seed in seeds:
        for plane in planes:
            try:
                outcome = PLANES[plane](seed)
            except Exception:
                failures.append(Failure(plane, seed, traceback.format_exc()))
                continue
            counts[plane] += outcome.counts
            events += outcome.events
            if outcome.violation is not None:
                failures.append(Failure(plane, seed, outcome))
    gc.collect()
    gc.freeze()  # Later collections skip the modules that torch has imported during the first seeds.
    return Results(len(seeds), events, time.process_time() - began, counts, failures)


@contextmanager
def results(seeds: range, planes: Sequence[str], processes: int) -> Iterator[Iterator[Results]]:
    """Simulate seeds in several processes; give an iterator over the results, in the order of the seeds."""
    parts = [seeds[start : start + TOGETHER] for start in range(0, len(seeds), TOGETHER)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield pool.imap(partial(simulate_all, planes), parts)


def main() -> None:
    """Simulate seeds until one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=300, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed; with --seeds 1 it repeats a single run")
    parser.add_argument("--processes", type=int, default=1, help="number of processes that share the seeds")
    parser.add_argument(
        "--planes", nargs="+", choices=PLANES, default=[*PLANES], help="planes to simulate; all by default"
    )
    arguments = parser.parse_args()
    counts = {plane: Counter[str]() for plane in arguments.planes}
    done, events, worked, reported, began = 0, 0, 0.0, 0.0, time.monotonic()
    gc.freeze()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    with results(seeds, arguments.planes, arguments.processes) as parts:
        for part in parts:
            done, events, worked = done + part.seeds, events + part.events, worked + part.worked
            for plane, injected in part.counts.items():
                counts[plane] += injected
            for failure in part.failures:
                print(f"\n{failure.brief}", flush=True)
                if isinstance(failure.outcome, Outcome):
                    print(explain(failure.seed, failure.outcome, PLANES[failure.plane]))
                sys.exit(1)
            if time.monotonic() - reported > 30.0 or done == len(seeds):
                reported = time.monotonic()
                rate = f"{events / worked:,.0f} events and {done / worked:,.1f} seeds per second of CPU time"
                print(f"{done:,} of {len(seeds):,} seeds, no violation, {rate}", flush=True)
    print(f"\n{time.monotonic() - began:,.0f} s, {worked:,.0f} s of CPU time")
    for plane, injected in counts.items():
        print(f"injected, {plane} plane: " + ", ".join(f"{kind} {n:,}" for kind, n in sorted(injected.items())))


if __name__ == "__main__":
    main()
