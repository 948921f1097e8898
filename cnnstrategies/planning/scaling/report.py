"""Show the measurements of a training with different numbers of devices as a table, as sentences and as a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from cnnstrategies.planning.costs import digits
from cnnstrategies.planning.scaling.figures import COMPUTE, ERROR, MeasuredRun, Measurements, Rank, ms
from cnnstrategies.planning.scaling.reason import Reason
from cnnstrategies.planning.scaling.timeline import BATCH, ROWS, SUMS, WAITING
from cnnstrategies.planning.tune.race import interval
from cnnstrategies.recording.actions import CALLBACK, LOGGER
from cnnstrategies.runtime.whole_file import whole_file

# If a sample's computing time with the most devices is more than this multiple of the time with the fewest devices, the
# devices seem to share a resource.
SLOWER = 1.15
# The diagram shows the samples/s that a step with only computation, only data loading or only the all-reduce would
# reach. A rate is left out if it is at least this multiple of the training's samples/s.
SHOWN = 4
WAITS_FOR_OTHERS = "waiting for the slowest"
LINK = "communication in the open"
OTHER = "other"
# Waits of ranks that have parts of the same images, as in `KINDS`.
FROM_GROUP = {WAITING + ROWS: "rows of other devices", WAITING + SUMS: "sums over the parts"}
# The activities of a step, in the order of the table. Values are the names of the activities in the table. Each key is
# a prefix: measured parts whose names begin with the prefix belong to the activity. The keys of FROM_GROUP, LINK and
# WAITS_FOR_OTHERS are not prefixes, because these activities are computed from several parts.
KINDS = {
    "data": "waiting for data",
    WAITING + BATCH: "waiting for the batch",
    "transfer": "copy, batch hooks",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    **FROM_GROUP,
    LINK: LINK,
    WAITS_FOR_OTHERS: WAITS_FOR_OTHERS,
    CALLBACK: "callbacks, hooks",
    LOGGER: "loggers",
    "other": OTHER,
}


def by_kind(run: MeasuredRun) -> dict[str, float]:
    """Return the seconds that a rank spends on each activity of `KINDS` in a step, as a mean over the ranks.

    The seconds add up to the mean step time. Keys are the names of the activities.
    """
    seconds_of = dict.fromkeys(KINDS.values(), 0.0)
    for rank in run.ranks:
        for name, seconds in rank.parts.items():
            if not name.startswith(WAITING) or name == WAITING + BATCH:
                seconds_of[_kind(name)] += seconds / run.devices
    seconds_of |= {text: run.slowest.parts.get(name, 0.0) for name, text in FROM_GROUP.items()}
    seconds_of[LINK] = run.slowest.waits_in_step - sum(seconds_of[text] for text in FROM_GROUP.values())
    seconds_of[WAITS_FOR_OTHERS] = run.waiting
    return seconds_of


def _kind(name: str) -> str:
    return next((kind for start, kind in KINDS.items() if name.startswith(start)), OTHER)


def speedup(measurements: Measurements, run: MeasuredRun) -> tuple[float, float, float]:
    """Return the speed-up of a run compared with the run with the fewest devices.

    Returns:
        The lower end of the speed-up's confidence interval, the speed-up, and the upper end of the interval.
    """
    ratios = [rate / base for rate, base in zip(run.rates, measurements.runs[0].rates, strict=False)]
    low, middle, high = interval(ratios, ERROR)
    return max(low, min(ratios)), middle, min(high, max(ratios))


def table(measurements: Measurements) -> Table:
    """Return a table with a column for each number of devices.

    The first rows are samples/s, speed-up and efficiency. The next rows are the step time in milliseconds, and the
    activities that make up the step time (waiting for data, forward, backward, ...). An activity is left out if it
    takes at most 0.5 % of the step in every run.
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
    """Return the lines of a text that explains the measurements.

    Args:
        measurements: All measurements.
        why: Reasons why more devices do not train faster.
    """
    run, first = measurements.largest, measurements.runs[0]
    lines = []
    if run is not first:
        lines.append(_batches(first, run))
    limits = measurements.limits()
    name = min(limits, key=lambda part: limits[part])
    allowed = ", ".join(f"{part} {digits(rate, 4)}" for part, rate in limits.items())
    lines.append(f"Samples/s that each part could reach alone on {run.devices} devices: {allowed}.")
    slower = _of_a_sample(run.slowest) / _of_a_sample(first.slowest)
    if run is not first and slower > SLOWER:
        lines.append(
            f"With {run.devices} devices the computation of a sample takes {slower:.2f} times as long as with "
            f"{first.devices}: the devices share cores, memory or power, or their batches are small."
        )
    if not why:
        reached = run.rate / limits[name]
        lines.append(
            f"No cause was found: training reaches {reached:.0%} of the samples/s of its slowest part, {name}."
        )
    for number, reason in enumerate(why, start=1):
        lines += [
            f"{number}. {reason.cause[0].upper()}{reason.cause[1:]}: without this cause, training would be about "
            f"{reason.gain:.2f} times as fast.",
            f"   Measured: {reason.evidence}.",
            f"   Remedy: {reason.remedy}.",
        ]
    epoch = measurements.facts.epoch
    if epoch.steps is not None and (epoch.validation or epoch.checkpoints):
        lines.append(
            f"An epoch has {digits(epoch.steps * run.step)} s of training, {digits(epoch.validation)} s of validation "
            f"and {digits(epoch.checkpoints)} s of saving checkpoints."
        )
    return lines


def _batches(first: MeasuredRun, run: MeasuredRun) -> str:
    """Return a sentence that compares the batch sizes of two runs, and says whether they show weak or strong scaling.

    Args:
        first: The run with the fewest devices.
        run: The run with the most devices.
    """
    here, there = first.samples / first.devices, run.samples / run.devices
    smaller, larger, per_device = map(_samples, (first.samples, run.samples, there))
    if abs(here - there) < 0.05 * here:
        return (
            f"Each device has {per_device}, so a step has {smaller} on {first.devices} and {larger} on {run.devices} "
            "(weak scaling)."
        )
    is_equal = abs(first.samples - run.samples) < 0.05 * first.samples
    batch = f"stays at {smaller}" if is_equal else f"changes from {smaller} to {larger}"
    return f"The global batch {batch}, so each of {run.devices} devices has {per_device} (strong scaling)."


def _samples(count: float) -> str:
    """Return a number of samples as text, such as "1 sample" or "2.5 samples"."""
    number = digits(count, 4)
    return f"{number} sample{'s' * (number != '1')}"


def _of_a_sample(rank: Rank) -> float:
    return sum(rank.parts.get(name, 0.0) for name in COMPUTE) / max(rank.samples, 1e-9)


def draw(measurements: Measurements, path: Path) -> None:
    """Write a PNG file with two diagrams.

    The diagrams show the samples/s, and the time of each activity in a step, for each number of devices.
    """
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
    left.plot(counts, ideal, "--", color="grey", label="linear speed-up")
    for name, rate in measurements.limits().items():
        # A much higher rate would compress the measured rates at the bottom of the diagram, so it is not drawn.
        if rate < SHOWN * max(*rates, *ideal):
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
