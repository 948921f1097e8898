"""Show what was measured of a training on more devices as a table, in words and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from cnnstrategies.planning.costs import digits
from cnnstrategies.planning.scaling.figures import CALLBACK, COMPUTE, LOGGER, Found, MeasuredRun, Rank, ms
from cnnstrategies.planning.scaling.reasons import Reason
from cnnstrategies.planning.tune.race import interval
from cnnstrategies.runtime.whole_file import whole_file

ERROR = 0.1  # that an interval misses
SLOWER = 1.15  # times the time for a sample: what devices that share something differ by
SHOWN = 4  # times the speed: what could do more is no limit
WAITS_FOR_OTHERS = "waiting for the slowest"
LINK = "communication in the open"
OTHER = "other"
# By the beginnings of the parts' names, in the order in which they are shown; the waits are made of several parts.
KINDS = {
    "data": "waiting for data",
    "transfer": "copy, batch hooks",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    LINK: LINK,
    WAITS_FOR_OTHERS: WAITS_FOR_OTHERS,
    CALLBACK: "callbacks, hooks",
    LOGGER: "loggers",
    "other": OTHER,
}


def by_kind(run: MeasuredRun) -> dict[str, float]:
    """Seconds of a step of an average rank, by kinds that add up to it."""
    found = dict.fromkeys(KINDS.values(), 0.0)
    for rank in run.ranks:
        for name, seconds in rank.parts.items():
            if name not in rank.waiting:
                found[_kind(name)] += seconds / run.devices
    found[LINK], found[WAITS_FOR_OTHERS] = run.slowest.waits, run.waiting
    return found


def _kind(name: str) -> str:
    return next((said for start, said in KINDS.items() if name.startswith(start)), OTHER)


def speedup(found: Found, run: MeasuredRun) -> tuple[float, float, float]:
    """How many times as many samples/s as on the fewest devices, between the ends of an interval."""
    ratios = [one / base for one, base in zip(run.rates, found.runs[0].rates, strict=False)]
    low, middle, high = interval(ratios, ERROR)
    return max(low, min(ratios)), middle, min(high, max(ratios))


def table(found: Found) -> Table:
    """A column for each number of devices: samples/s, speed-up, efficiency, and where a step's time goes."""
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("devices")
    for run in found.runs:
        shown.add_column(str(run.devices), justify="right")
    shown.add_row("samples/s", *(digits(run.rate, 4) for run in found.runs))
    base = found.runs[0].devices
    if len(found.runs) > 1:
        speeds = [speedup(found, run) for run in found.runs]
        said = [f"{middle:.2f} [{low:.2f}, {high:.2f}]" for low, middle, high in speeds[1:]]
        shown.add_row("speed-up", "1", *said)
        efficiencies = [one[1] * base / run.devices for one, run in zip(speeds, found.runs, strict=True)]
        shown.add_row("efficiency", *(f"{one:.0%}" for one in efficiencies))
    shown.add_row("a step, ms", *(ms(run.step, 4) for run in found.runs))
    kinds = [by_kind(run) for run in found.runs]
    for name in kinds[0]:
        if any(kind[name] > 0.005 * run.step for kind, run in zip(kinds, found.runs, strict=True)):
            shown.add_row(f"  {name}", *(ms(kind[name]) for kind in kinds))
    return shown


def sentences(found: Found, why: Sequence[Reason]) -> list[str]:
    """What is to be said, line by line."""
    run, first = found.largest, found.runs[0]
    lines = []
    if run is not first:
        lines.append(_batches(first, run))
    limits = found.limits()
    name = min(limits, key=lambda one: limits[one])
    allowed = ", ".join(f"{part} {digits(rate, 4)}" for part, rate in limits.items())
    lines.append(f"Samples/s that the parts allow on {run.devices}, each alone: {allowed}.")
    slower = _of_a_sample(run.slowest) / _of_a_sample(first.slowest)
    if run is not first and slower > SLOWER:
        lines.append(
            f"On {run.devices} a device computes {slower:.2f} times as long for a sample as on {first.devices}: the "
            "devices share cores, memory or power, or their batches are small."
        )
    if not why:
        lines.append(f"Nothing found: {run.rate / limits[name]:.2f} of what the parts allow.")
    for number, reason in enumerate(why, start=1):
        lines += [
            f"{number}. {reason.cause[0].upper()}{reason.cause[1:]}: about {reason.gain:.2f} times as fast without.",
            f"   Seen: {reason.evidence}.",
            f"   Do: {reason.remedy}.",
        ]
    epoch = found.facts.epoch
    if epoch.steps is not None and (epoch.validation or epoch.checkpoints):
        lines.append(
            f"An epoch: {digits(epoch.steps * run.step)} s of steps, {digits(epoch.validation)} s of validation, "
            f"{digits(epoch.checkpoints)} s of saving."
        )
    return lines


def _batches(first: MeasuredRun, run: MeasuredRun) -> str:
    """Weak or strong scaling, in a sentence."""
    here, there = first.samples / first.devices, run.samples / run.devices
    smaller, larger, own = digits(first.samples, 4), digits(run.samples, 4), digits(there, 4)
    if abs(here - there) < 0.05 * here:
        return (
            f"Each device keeps its batch of {own} samples, so a step has {smaller} on {first.devices} and {larger} on "
            f"{run.devices} (weak scaling)."
        )
    kept = "stays" if abs(first.samples - run.samples) < 0.05 * first.samples else f"is {larger} after"
    return f"The global batch {kept} {smaller} samples, so each of {run.devices} devices sees {own} (strong scaling)."


def _of_a_sample(rank: Rank) -> float:
    return sum(rank.parts.get(name, 0.0) for name in COMPUTE) / max(rank.samples, 1e-9)


def draw(found: Found, path: Path) -> None:
    """Draw samples/s against what one device makes of them, and the parts of a step, as PNG."""
    from matplotlib.figure import Figure

    counts = [run.devices for run in found.runs]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = [run.rate for run in found.runs]
    spreads = [[max(run.rates) - run.rate for run in found.runs], [run.rate - min(run.rates) for run in found.runs]]
    left.errorbar(counts, rates, yerr=spreads[::-1], marker="o", label="measured", capsize=3)
    ideal = [rates[0] * count / counts[0] for count in counts]
    left.plot(counts, ideal, "--", color="grey", label="as many times")
    for name, rate in found.limits().items():
        if rate < SHOWN * max(*rates, *ideal):  # Else what was measured would be a line at the bottom.
            left.plot(counts[-1], rate, "_", markersize=22, markeredgewidth=2, label=f"{name} alone")
    left.set(xlabel="devices", ylabel="samples/s", xticks=counts, ylim=(0, None), title="Speed")
    left.legend(frameon=False)
    kinds = [by_kind(run) for run in found.runs]
    bottoms = [0.0] * len(counts)
    names = [str(count) for count in counts]
    for name in kinds[0]:
        heights = [1e3 * kind[name] for kind in kinds]
        if max(heights) > 0.005e3 * max(run.step for run in found.runs):
            right.bar(names, heights, bottom=bottoms, label=name)
            bottoms = [one + more for one, more in zip(bottoms, heights, strict=True)]
    right.set(xlabel="devices", ylabel="ms of a step", title="Where a step's time goes")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", frameon=False)
    with whole_file(path, "give another --picture") as file:
        figure.savefig(file, dpi=120)
