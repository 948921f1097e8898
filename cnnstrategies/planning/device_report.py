"""Tables of the best plans for unequal devices: each device's work and peak memory, and what limits the device."""

from collections.abc import Iterator
from math import inf

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cnnstrategies.planning.candidates import Candidate, Effect
from cnnstrategies.planning.costs import digits, format_bytes
from cnnstrategies.planning.rank import Ranking

SHOWN = 3  # Number of plans that are shown.
BUSY = 0.9  # A device that computes for at least this fraction of a step is limited by its own speed.


def best_plans(ranking: Ranking) -> list[Candidate]:
    """Return the best plans, at most `SHOWN`. Plans that change the training result come last."""
    return [*ranking.same, *ranking.changing][:SHOWN]


def plans_report(ranking: Ranking) -> Group:
    """Return a heading and a table for each of the best plans, followed by the notes."""
    parts: list[Table | Text] = []
    for number, row in enumerate(best_plans(ranking), start=1):
        learning = "; changes learning" if row.effect == Effect.LEARNING else ""
        heading = f"{number}. {row}: {digits(row.step * 1e3, 4)} ms/step, {digits(ranking.rate(row), 4)} samples/s"
        parts += [Text(heading + learning), _devices_table(ranking, row)]
    notes = [
        "mostly: the largest part of the peak memory",
        "work: samples of a step, in pipelines microbatches",
        "limited by memory: one more sample or microbatch would not fit",
        *ranking.notes,
    ]
    return Group(*parts, Text("\n".join(f"- {note}" for note in notes)))


def _devices_table(ranking: Ranking, row: Candidate) -> Table:
    job = ranking.job
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    for name in ("rank", "device", "speed", "memory", "peak", "mostly", "work", "busy", "limited by"):
        is_text = name in ("mostly", "limited by")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    reasons = limits(ranking, row)
    for rank, load in enumerate(row.loads):
        limit = job.limits[rank]
        table.add_row(
            str(rank),
            str(ranking.device_of(rank)),
            f"{job.cluster.speeds[rank]:g}",
            "any" if limit == inf else format_bytes(limit),
            format_bytes(load.peak.total),
            next(iter(load.peak.parts()), ""),
            str(load.units),
            f"{min(1.0, load.seconds / row.step):.0%}",
            next(reasons),
        )
    return table


def limits(ranking: Ranking, row: Candidate) -> Iterator[str]:
    """Yield what limits the device of each rank: its memory, its speed, a slower device, or the network.

    A device is limited by its memory if one more sample or microbatch would not fit.
    """
    busy = [load.seconds / row.step for load in row.loads]
    slowest = busy.index(max(busy))
    for rank, load in enumerate(row.loads):
        if load.peak.total + load.unit_memory > ranking.job.limits[rank]:
            yield "memory"
        elif busy[rank] >= BUSY:
            yield "compute"
        elif busy[rank] < BUSY * busy[slowest] and (busy[slowest] >= BUSY or row.bottleneck == "compute"):
            yield f"wait for rank {slowest}"
        else:
            yield row.bottleneck
