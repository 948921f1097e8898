"""Simulates runs: `python -m simulation.run [--first N] [--seeds N]`, or `make simulate`."""

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

from simulation import control, traces
from simulation.data import run as data
from simulation.faults import Fault, Faults
from simulation.plane import Outcome
from simulation.traces import Cue, Script, Trace, given, written

One = TypeVar("One")


def shrink(ones: Sequence[One], fails: Callable[[Sequence[One]], bool]) -> list[One]:
    """A part of some things with which a run still fails, and without any one of which it does not."""
    kept = list(ones)
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


LINES = 60  # of a trace
TOGETHER = 10  # seeds that a process runs before it says what came of them


class Plane(NamedTuple):
    """What can be simulated, under its name in traces."""

    name: str
    plan: Callable[..., Any]
    timeout: float
    drawn: Callable[..., tuple[Any, Faults]]
    run: Callable[..., Outcome]

    def __call__(self, seed: int, traced: bool = False) -> Outcome:
        """Run one seed."""
        return self.run(*self.drawn(seed), seed, traced)


PLANES = {
    "control": Plane("control", control.Plan, control.TIMEOUT, control.drawn, control.run),
    "data": Plane("data", data.Plan, data.TIMEOUT, data.drawn, data.run),
}


def play(trace: Trace, traced: bool = False) -> Outcome:
    """What comes of a trace; each of its moments must come."""
    plane = PLANES[trace.plane]
    script = Script(trace, plane.timeout)
    outcome = plane.run(traces.plan(plane.plan, trace.plan), script, trace.pace, traced)
    missed = [str(cue) for cue in script.cues.left]
    assert not missed, f"{trace}: these moments do not come: {missed}"
    return outcome


class Failure(NamedTuple):
    """A run in which something was not as it should be: the traceback's text if a role could not go on at all."""

    plane: str
    seed: int
    outcome: Outcome | str

    @property
    def brief(self) -> str:
        """What is wrong, without a search for the fewest faults with which it is."""
        what = self.outcome if isinstance(self.outcome, str) else self.outcome.violation
        return f"{self.plane} plane, seed {self.seed}: {what}"


class Part(NamedTuple):
    """What came of some seeds: how many, the events in their runs, seconds of processor time, injected faults."""

    seeds: int
    events: int
    worked: float
    counts: dict[str, Counter[str]]
    failures: list[Failure]


def explain(seed: int, outcome: Outcome, plane: Plane) -> str:
    """The smallest part of a failing seed's faults with which it fails likewise, as a trace; and what happens."""
    assert outcome.violation is not None
    rule = outcome.violation.partition(":")[0]
    plan, faults = plane.drawn(seed)
    timed = list(faults.timed)  # Without those that happen when a message is sent.
    cues = plane.run(plan, faults, seed, True).cues

    def again(kept: Sequence[Fault | Cue], traced: bool = False) -> Outcome:
        script = Script(Trace("", tcp=faults.tcp, pace=seed).having(kept), faults.timeout)
        return plane.run(plan, script, seed, traced)

    def fails(kept: Sequence[Fault | Cue]) -> bool:
        violation = again(kept).violation
        return violation is not None and violation.startswith(f"{rule}:")

    everything: list[Fault | Cue] = [*timed, *cues]
    kept = shrink(everything, fails)
    smallest = again(kept, traced=True)
    lines = smallest.trace
    shown = lines if len(lines) <= LINES else [*lines[: LINES // 4], "...", *lines[-3 * LINES // 4 :]]
    trace = Trace(f"seed {seed}: {smallest.violation}", plane.name, given(plan), seed, faults.tcp).having(kept)
    return f"{written(trace)}\n(of {len(everything)} faults)\n" + "\n".join(shown)


def simulate_all(planes: Sequence[str], seeds: range) -> Part:
    """Run some seeds in some planes."""
    counts, events, began = {plane: Counter[str]() for plane in planes}, 0, time.process_time()
    failures: list[Failure] = []
    gc.disable()  # While seeds run: to look through all that torch has costs a tenth of the time.
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
    gc.freeze()  # What the first seeds have had torch import is not looked through again.
    return Part(len(seeds), events, time.process_time() - began, counts, failures)


@contextmanager
def results(seeds: range, planes: Sequence[str], processes: int) -> Iterator[Iterator[Part]]:
    """What comes of seeds in some planes, in their order, from so many processes."""
    parts = [seeds[start : start + TOGETHER] for start in range(0, len(seeds), TOGETHER)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield pool.imap(partial(simulate_all, planes), parts)


def main() -> None:
    """Run seeds; the first that fails ends it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=300, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first: to see one again")
    parser.add_argument("--processes", type=int, default=1, help="that share the seeds")
    parser.add_argument("--planes", nargs="+", choices=PLANES, default=[*PLANES], help="which; all by default")
    arguments = parser.parse_args()
    counts = {plane: Counter[str]() for plane in arguments.planes}
    done, events, worked, said, began = 0, 0, 0.0, 0.0, time.monotonic()
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
            if time.monotonic() - said > 30.0 or done == len(seeds):
                said = time.monotonic()
                rate = f"{events / worked:,.0f} events and {done / worked:,.1f} seeds per second of processor time"
                print(f"{done:,} of {len(seeds):,} seeds, no violation, {rate}", flush=True)
    print(f"\n{time.monotonic() - began:,.0f} s, of processor time {worked:,.0f} s")
    for plane, injected in counts.items():
        print(f"injected, {plane} plane: " + ", ".join(f"{kind} {n:,}" for kind, n in sorted(injected.items())))


if __name__ == "__main__":
    main()
