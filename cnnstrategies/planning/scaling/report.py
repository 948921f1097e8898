"""Show the measurements of a training on several devices as a table, in sentences and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from cnnstrategies.planning.costs import digits
from cnnstrategies.planning.scaling.figures import CALLBACK, COMPUTE, LOGGER, MeasuredRun, Measurements, Rank, ms
from cnnstrategies.planning.scaling.reasons import Reason
from cnnstrategies.planning.tune.race import interval
from cnnstrategies.runtime.whole_file import whole_file

ERROR = 0.1  # Probability that an interval misses the speed-up.
SLOWER = 1.15  # If the time per sample grows by more than this factor, the devices seem to share a resource.
SHOWN = 4  # Parts that alone are at least this many times as fast as the training are not drawn.
WAITS_FOR_OTHERS = "waiting for the slowest"
LINK = "communication in the open"
OTHER = "other"
# Kinds of a step's parts by the beginnings of the parts' names, in the order of the table. The two kinds of waits are
# computed from several parts.
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
    """Return the seconds of a mean rank's step by kind; the kinds add up to the step."""
    seconds_of = dict.fromkeys(KINDS.values(), 0.0)
    for rank in run.ranks:
        for name, seconds in rank.parts.items():
            if name not in rank.waiting:
                seconds_of[_kind(name)] += seconds / run.devices
    seconds_of[LINK], seconds_of[WAITS_FOR_OTHERS] = run.slowest.waits, run.waiting
    return seconds_of


def _kind(name: str) -> str:
    return next((kind for start, kind in KINDS.items() if name.startswith(start)), OTHER)


def speedup(measurements: Measurements, run: MeasuredRun) -> tuple[float, float, float]:
    """Return the speed-up of a run over the run with the fewest devices.

    Returns:
        The lower end of the speed-up's interval, the speed-up, and the upper end.
    """
    ratios = [rate / base for rate, base in zip(run.rates, measurements.runs[0].rates, strict=False)]
    low, middle, high = interval(ratios, ERROR)
    return max(low, min(ratios)), middle, min(high, max(ratios))


def table(measurements: Measurements) -> Table:
    """Return a table with a column for each number of devices.

    The rows are samples/s, speed-up, efficiency and the seconds of a step by kind.
    """
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("devices")
    for run in measurements.runs:
        shown.add_column(str(run.devices), justify="right")
    shown.add_row("samples/s", *(digits(run.rate, 4) for run in measurements.runs))
    base = measurements.runs[0].devices
    if len(measurements.runs) > 1:
        speeds = [speedup(measurements, run) for run in measurements.runs]
        texts = [f"{middle:.2f} [{low:.2f}, {high:.2f}]" for low, middle, high in speeds[1:]]
        shown.add_row("speed-up", "1", *texts)
        efficiencies = [
            middle * base / run.devices for (_, middle, _), run in zip(speeds, measurements.runs, strict=True)
        ]
        shown.add_row("efficiency", *(f"{efficiency:.0%}" for efficiency in efficiencies))
    shown.add_row("a step, ms", *(ms(run.step, 4) for run in measurements.runs))
    kinds = [by_kind(run) for run in measurements.runs]
    for name in kinds[0]:
        if any(kind[name] > 0.005 * run.step for kind, run in zip(kinds, measurements.runs, strict=True)):
            shown.add_row(f"  {name}", *(ms(kind[name]) for kind in kinds))
    return shown


def sentences(measurements: Measurements, why: Sequence[Reason]) -> list[str]:
    """Return sentences about the measurements and the reasons, line by line."""
    run, first = measurements.largest, measurements.runs[0]
    lines = []
    if run is not first:
        lines.append(_batches(first, run))
    limits = measurements.limits()
    name = min(limits, key=lambda part: limits[part])
    allowed = ", ".join(f"{part} {digits(rate, 4)}" for part, rate in limits.items())
    lines.append(f"Samples/s that the parts allow on {run.devices}, each alone: {allowed}.")
    slower = _of_a_sample(run.slowest) / _of_a_sample(first.slowest)
    if run is not first and slower > SLOWER:
        lines.append(
            f"On {run.devices} a device computes {slower:.2f} times as long for a sample as on {first.devices}: the "
            "devices share cores, memory or power, or their batches are small."
        )
    if not why:
        reached = run.rate / limits[name]
        lines.append(f"No cause was found: training reaches {reached:.2f} of the rate of its slowest part, {name}.")
    for number, reason in enumerate(why, start=1):
        lines += [
            f"{number}. {reason.cause[0].upper()}{reason.cause[1:]}: about {reason.gain:.2f} times as fast without.",
            f"   Seen: {reason.evidence}.",
            f"   Do: {reason.remedy}.",
        ]
    epoch = measurements.facts.epoch
    if epoch.steps is not None and (epoch.validation or epoch.checkpoints):
        lines.append(
            f"An epoch: {digits(epoch.steps * run.step)} s of steps, {digits(epoch.validation)} s of validation, "
            f"{digits(epoch.checkpoints)} s of saving."
        )
    return lines


def _batches(first: MeasuredRun, run: MeasuredRun) -> str:
    """Return a sentence that says whether scaling is weak or strong."""
    here, there = first.samples / first.devices, run.samples / run.devices
    smaller, larger, per_device = digits(first.samples, 4), digits(run.samples, 4), digits(there, 4)
    if abs(here - there) < 0.05 * here:
        return (
            f"Each device keeps its batch of {per_device} samples, so a step has {smaller} on {first.devices} and "
            f"{larger} on {run.devices} (weak scaling)."
        )
    kept = "stays" if abs(first.samples - run.samples) < 0.05 * first.samples else f"is {larger} after"
    return (
        f"The global batch {kept} {smaller} samples, so each of {run.devices} devices sees {per_device} (strong "
        "scaling)."
    )


def _of_a_sample(rank: Rank) -> float:
    return sum(rank.parts.get(name, 0.0) for name in COMPUTE) / max(rank.samples, 1e-9)


def draw(measurements: Measurements, path: Path) -> None:
    """Draw samples/s and the parts of a step for each number of devices, as a PNG file."""
    from matplotlib.figure import Figure

    counts = [run.devices for run in measurements.runs]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = [run.rate for run in measurements.runs]
    spreads = [
        [max(run.rates) - run.rate for run in measurements.runs],
        [run.rate - min(run.rates) for run in measurements.runs],
    ]
    left.errorbar(counts, rates, yerr=spreads[::-1], marker="o", label="measured", capsize=3)
    ideal = [rates[0] * count / counts[0] for count in counts]
    left.plot(counts, ideal, "--", color="grey", label="as many times")
    for name, rate in measurements.limits().items():
        if rate < SHOWN * max(*rates, *ideal):  # Higher rates would press the measured ones to the bottom.
            left.plot(counts[-1], rate, "_", markersize=22, markeredgewidth=2, label=f"{name} alone")
    left.set(xlabel="devices", ylabel="samples/s", xticks=counts, ylim=(0, None), title="Speed")
    left.legend(frameon=False)
    kinds = [by_kind(run) for run in measurements.runs]
    bottoms = [0.0] * len(counts)
    names = [str(count) for count in counts]
    for name in kinds[0]:
        heights = [1e3 * kind[name] for kind in kinds]
        if max(heights) > 0.005e3 * max(run.step for run in measurements.runs):
            right.bar(names, heights, bottom=bottoms, label=name)
            bottoms = [bottom + more for bottom, more in zip(bottoms, heights, strict=True)]
    right.set(xlabel="devices", ylabel="ms of a step", title="Where a step's time goes")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", frameon=False)
    with whole_file(path, "give another path as --picture") as file:
        figure.savefig(file, dpi=120)
