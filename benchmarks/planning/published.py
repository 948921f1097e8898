"""The planner against PipeDream's published choices and measured speed-ups over data parallel (SOSP 2019, table 1)."""

import argparse
import datetime
import platform
from dataclasses import dataclass
from pathlib import Path

from cnnstrategies.pipeline.timetable import Layout
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.profile_csv import read_profile
from cnnstrategies.planning.rank import TIE, rank
from cnnstrategies.planning.stage_costs import all_reduce, messages, stage_costs

HERE = Path(__file__).parent
EFFICIENCY = 0.5  # of the network's line rate, the same for all
TOLERANCE = 0.3


@dataclass(frozen=True)
class Anchor:
    """Published result.

    Attributes:
        network: Name of the profile.
        measured_batch: Of the profile.
        hosts: Machines.
        devices: In each.
        gbit: Between them.
        inside_gbit: In them.
        batch: For each device.
        replicas: PipeDream's choice.
        gain: Its speed-up over data parallel; None where it chose that.
        ours: Where another layout is better for a step that sums gradients once, and not after each minibatch.
    """

    network: str
    measured_batch: int
    hosts: int
    devices: int
    gbit: float
    inside_gbit: float
    batch: int
    replicas: tuple[int, ...]
    gain: float | None
    ours: tuple[int, ...] | None = None

    @property
    def cluster(self) -> Cluster:
        """The machines."""
        network = Link(self.gbit / 8 * 1e9 * EFFICIENCY, 5e-5)
        return Cluster((Host(self.devices, network, Link(self.inside_gbit / 8 * 1e9, 1e-5)),) * self.hosts)


PCIE, NVLINK = (4, 4, 10, 96), (2, 8, 25, 1200)
ANCHORS = (
    Anchor("vgg16", 128, *PCIE, 64, (15, 1), 5.28),
    Anchor("vgg16", 128, *NVLINK, 64, (15, 1), 2.98),
    Anchor("alexnet", 256, *PCIE, 256, (15, 1), 4.92),
    Anchor("alexnet", 256, *NVLINK, 256, (15, 1), 2.04, ours=(14, 2)),
    Anchor("resnet50", 128, *PCIE, 128, (16,), None),
    Anchor("resnet50", 128, *NVLINK, 128, (16,), None),
)


@dataclass(frozen=True)
class Result:
    """Result of the planner.

    Attributes:
        replicas: Its choice.
        synchronous: Its speed-up over DDP, with fill and drain and the same samples in a step.
        asynchronous: That of the published layout without them, as PipeDream runs.
    """

    replicas: tuple[int, ...]
    synchronous: float
    asynchronous: float | None


def predict(anchor: Anchor, folder: Path) -> Result:
    """The planner's choice and speed-ups."""
    profile = read_profile(folder / f"{anchor.network}.csv", anchor.measured_batch)
    cluster = anchor.cluster
    # Of the first stage's 15 replicas each has as many samples as a device had.
    first = anchor.replicas[0]
    job = Job(profile, cluster, first * anchor.batch)
    ranking = rank(job)
    rows = {row.family: row for row in (*ranking.same, *ranking.changing)}
    ddp, hybrid = rows["ddp"], rows["hybrid"]
    gain = ddp.step / hybrid.step
    chosen = tuple(hybrid.options["replicas"]) if gain > 1 + TIE else (cluster.devices,)
    if anchor.gain is None:
        return Result(chosen, gain, None)
    assert ranking.hybrid is not None
    layout = Layout(ranking.hybrid.layout.cuts[:1], anchor.replicas)
    return Result(chosen, gain, _asynchronous(job, layout, anchor.batch) / ranking.rate(ddp))


def _asynchronous(job: Job, layout: Layout, batch: int) -> float:
    """Samples per second of a pipeline that never drains: by its slowest stage, port or reduction."""
    costs = job.profile.at(batch)
    stages = stage_costs(costs, layout.cuts)
    (passing,) = messages(costs, layout.cuts).values()
    slowest, first = 0.0, 0
    for stage, count in zip(stages, layout.replicas, strict=True):
        reduction = all_reduce(job.cluster, first, count)(stage.parameter_bytes)
        network = job.cluster.hosts[0].interconnect
        port = (
            max(passing.bytes, passing.gradient_bytes)
            / network.bandwidth
            / (1 if count == 1 else len(job.cluster.hosts))
        )
        slowest = max(slowest, stage.time / count, reduction / count, port)
        first += count
    return batch / slowest


def main() -> None:
    """Print all anchors, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=Path, default=HERE / "profiles", help="folder with the profiles as CSV")
    folder = parser.parse_args().profiles
    lines = [
        "| network | machines | published | planned | measured | asynchronous | off by | synchronous |",
        "|---" * 8 + "|",
    ]
    for anchor in ANCHORS:
        result = predict(anchor, folder)
        published = "-".join(map(str, anchor.replicas)) if anchor.gain else "data parallel"
        planned = "-".join(map(str, result.replicas)) if len(result.replicas) > 1 else "data parallel"
        numbers = ("-", "-", "-")
        if anchor.gain and result.asynchronous:
            off = result.asynchronous / anchor.gain - 1
            numbers = (f"{anchor.gain:.2f}", f"{result.asynchronous:.2f}", f"{off:+.0%}")
        machines = f"{anchor.hosts} x {anchor.devices}, {anchor.gbit} Gbit/s"
        row = (anchor.network, machines, published, planned, *numbers, f"{result.synchronous:.2f}")
        lines.append(f"| {' | '.join(row)} |")
    table = "\n".join(lines)
    print(table)
    HERE.joinpath("published.md").write_text(PAGE.format(table=table, python=platform.python_version(), today=_today()))


PAGE = """# The planner against published choices

PipeDream's authors published the profiles of their networks on a V100, and what they measured with them on two
clusters (Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, table 1; the
speed-ups are quoted from memory of that table). From the same [profiles](profiles/README.md) the planner chooses, with
one efficiency of the network for all: 0.5 of its line rate.

{table}

*Published* and *planned* are replicas of the stages. *Measured* is PipeDream's speed-up over data parallel,
*asynchronous* what our costs predict for such a pipeline, which never drains: the slowest of a stage's time, its port
and its all-reduce, each divided by its replicas, against DDP by the recurrence of its buckets. *Synchronous* is what
`plan` predicts for the pipeline that this package has, whose weights are those of DDP, which fills and drains in each
step. Batch per device: 64 for VGG-16, 256 for AlexNet, 128 for ResNet-50; both sides have the same samples in a step,
those of the first stage's replicas. Inside a machine 96 Gbit/s (PCIe) and 1200 Gbit/s (NVLink).

The speed-ups rest on the efficiency: at the full line rate DDP gains most, and so all of them fall. Nothing else was
fitted. The strategy is PipeDream's in all six cases and the replicas in five. AlexNet over NVLink is the other:
PipeDream sums the gradients of a replicated stage after each minibatch, this package once in a step, and so a second
replica of the classifier, beside the first in the same machine, costs next to nothing. ResNet-50's pipelines have
another result than DDP, since BatchNorm sees microbatches; they are compared here by time only.

Predicted, not measured by us; Python {python}, {today}. Command: `python published.py`, in `benchmarks/planning`.
"""


def _today() -> str:
    return f"{datetime.date.today():%-d %B %Y}"


if __name__ == "__main__":
    main()
