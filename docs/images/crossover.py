"""Makes the table and the plot of docs/plan.md anew: what `cnnstrategies plan` says of VGG-16 on four machines.

python docs/images/crossover.py
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cnnstrategies.commands.arguments.options import PlanOptions
from cnnstrategies.commands.plan.command import job_from_files
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.rank import Ranking, rank

ROOT = Path(__file__).resolve().parents[2]
PLANNING = ROOT / "benchmarks" / "planning"
PAGE = ROOT / "docs" / "plan.md"
PROFILE, CLUSTER = PLANNING / "profiles" / "vgg16.csv", PLANNING / "cluster.yaml"
WORDS = [
    *("--profile", str(PROFILE), "--profile_batch", "128", "--batch_per_device", "64"),
    *("--cluster", str(CLUSTER)),
]
RATES = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)  # of the network's
MOST = 64  # devices, or twice as many as there are
COLOURS = {
    "ddp": "#4C8BF5",
    "hybrid": "#F2994A",
    "parameter_server": "#27AE60",
    "ddp_bf16": "#9DBEF9",
    "ddp_powersgd": "#6F8FBF",
    "parameter_server_async": "#8FD3AC",
}


def main() -> None:
    """Plan, and put what is printed of the strategies into the page."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "cnnstrategies", "plan", *WORDS, "--write", "strategy.yaml"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
        made = subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    lines = [line.rstrip() for line in made.stdout.splitlines()]
    # Before the hybrid pipeline's stages: from the heading to the last note.
    last = max(index for index, line in enumerate(lines) if line.startswith("- "))
    table = "\n".join(line for line in lines[1 : last + 1])
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(r"```\n strategy .*?```\n", re.DOTALL)
    assert len(pattern.findall(page)) == 1, f"{PAGE} has not one table of strategies"
    PAGE.write_text(pattern.sub(lambda _: f"```\n{table}\n```\n", page), encoding="utf-8")
    print(table)
    job = job_from_files(PlanOptions(profile=PROFILE, profile_batch=128, batch_per_device=64, cluster=CLUSTER))
    draw_crossover(job, ROOT / "docs" / "images" / "crossover.png")


def draw_crossover(job: Job, file: Path) -> None:
    """Draw the rates of all strategies; the batch per device stays when the machines are more or fewer."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    best = rank(job).hybrid
    # One number of microbatches for each device, since a search for each point would take long.
    each = 1.0 if best is None else best.predictor.problem.microbatches / job.cluster.devices
    job = replace(job, microbatches=round(each * job.cluster.devices))
    network = job.cluster.hosts[0].interconnect.bandwidth * 8 / 1e9
    faster = [replace(job, cluster=_with_network(job.cluster, factor)) for factor in RATES]
    _draw(left, [factor * network for factor in RATES], faster)
    left.axvline(network, color="#999999", linewidth=0.8, linestyle=":")
    left.set_xlabel("Gbit/s that are reached between two machines")
    jobs = _with_more_hosts(job)
    _draw(right, [larger.cluster.devices for larger in jobs], jobs)
    right.axvline(job.cluster.devices, color="#999999", linewidth=0.8, linestyle=":")
    right.set_xlabel(f"devices, {job.samples / job.cluster.devices:g} samples each")
    left.set_ylabel("samples per second, predicted")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(file, dpi=120)


def _draw(axes: Axes, xs: Sequence[float], jobs: Sequence[Job]) -> None:
    rankings = [rank(job) for job in jobs]
    for family, colour in COLOURS.items():
        rates = [_rate(ranking, family) for ranking in rankings]
        if any(rate is not None for rate in rates):
            learns = any(row.family == family for row in rankings[0].changing)
            style = "--" if learns else "-"
            label = f"{family} (changes learning)" if learns else family
            known = [(x, rate) for x, rate in zip(xs, rates, strict=True) if rate is not None]
            axes.plot(*zip(*known, strict=True), style, color=colour, label=label, marker=".")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(list(xs), [f"{x:.3g}" for x in xs])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.grid(alpha=0.3)


def _rate(ranking: Ranking, family: str) -> float | None:
    rows = [row for row in (*ranking.same, *ranking.changing) if row.family == family]
    return rows[0].rate if rows else None


def _with_network(cluster: Cluster, factor: float) -> Cluster:
    hosts = []
    for host in cluster.hosts:
        hosts.append(
            replace(host, interconnect=replace(host.interconnect, bandwidth=factor * host.interconnect.bandwidth))
        )
    return replace(cluster, hosts=tuple(hosts))


def _with_more_hosts(job: Job) -> list[Job]:
    """The same machines, or as many of the first kind, with the same samples for each device."""
    host = job.cluster.hosts[0]
    each = job.samples / job.cluster.devices
    jobs: list[Job] = []
    count = 1
    while count * host.devices <= max(MOST, 2 * job.cluster.devices) and len(jobs) < 8:
        cluster = replace(job.cluster, hosts=(host,) * count)
        if cluster.devices > 1 and (not job.replicas or cluster.devices == job.cluster.devices):
            microbatches = round((job.microbatches or 1) / job.cluster.devices * cluster.devices)
            samples = round(each * cluster.devices)
            jobs.append(replace(job, cluster=cluster, samples=samples, microbatches=microbatches))
        count *= 2
    return jobs or [job]


if __name__ == "__main__":
    main()
