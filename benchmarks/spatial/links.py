"""Measure for which images and links two devices with half of an image each are faster than one, beside `plan`.

    python benchmarks/spatial/links.py [--seconds 1500]

Two hosts are network namespaces whose link is limited by `tc`. They have one image between them, as with a global batch
of one image, which data parallelism cannot divide. In each round the hosts make a step with divided images, and a step
in which each host trains a whole image by itself.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))

from hosts import hosts, missing, run_on
from pieces import Pieces, parser
from ranks import TIMEOUT, report

from cnnstrategies.networks import UNet
from cnnstrategies.pipeline.tracing import trace_open
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import Link, Profile
from cnnstrategies.planning.measure_links import measure_pair, prices
from cnnstrategies.planning.measure_nodes import profile
from cnnstrategies.planning.measure_parts import part_costs, rule_seconds
from cnnstrategies.planning.spatial import spatial
from cnnstrategies.spatial import GroupLink, SpatialParts

CLASSES, PARTS, ROUNDS, GOAL = 4, 2, 5, 0.15
CPU = torch.device("cpu")
WIDTHS = (16, 32, 64)
SIZES, RATES = (64, 128, 256, 512), (30, 100, 1000)  # Pixels of a side, and Mbit/s.
HEADING = (
    *("image", "Mbit/s", "one host", "predicted", "divided", "predicted"),
    *("divided / one", "predicted", "error"),
)
TEXT = """
A step is forward, loss and backward in float32 of the package's U-Net with {widths} channels ({megabytes:.1f} MB of
parameters) for a global batch of one image. One host is a step of a host that has the whole image; both hosts make it
at the same time. Divided is a step of both hosts with half of the rows each, with the exchanges of rows and the sums
of gradients and statistics. Predicted are the steps by `plan`, from a profile of the network on both hosts at once and
a measurement of the link. All times are in milliseconds, the shortest of {rounds} rounds, each with a profile, prices
of sums and exchanges, and two steps of each kind, because other work on the machine only adds time.

{verdict}

A step of this network has 20 sums of statistics and 29 exchanges of rows, whose number does not depend on the image.
Their prices are measured between computations, as they occur in a step: sleeping threads wake, and the hosts wait for
each other. Between messages that follow each other at once, gloo needs a tenth of this time.

Divided images pay where the computing of half an image takes longer than its messages. The bytes of an exchange grow
with the side of the image, the computing with the square of the side, and the bytes of gradients do not depend on the
image at all. A global batch with an image for each device is faster under [`ddp`](step.md), at any rate of the link,
because only gradients are sent.
"""


def worker() -> None:
    """Measure all sizes on this host; rank 0 prints the times as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    parts = SpatialParts(GroupLink(group))
    link = measure_pair(CPU)
    rule = rule_seconds()
    results = {}
    for size in SIZES:
        torch.manual_seed(0)
        network, images = UNet(CLASSES, widths=WIDTHS), torch.randn(1, 3, size, size)
        results[size] = _measure(network, images, parts, link, rule)
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


def _measure(
    network: torch.nn.Module, images: torch.Tensor, parts: SpatialParts, link: Link, rule: float
) -> dict[str, list[float]]:
    """Return the measured steps of one host and of divided images, and the predictions by each round's profile."""
    targets = torch.randint(CLASSES, (1, *images.shape[2:]))
    rows, labels = parts.scatter(images, -2), parts.scatter(targets, -2)

    def one_host() -> None:
        F.cross_entropy(network(images), targets).backward()

    def divided() -> None:
        with parts:
            F.cross_entropy(network(rows), labels).backward()

    traced = trace_open(network, True)
    costs = part_costs(traced, images, PARTS, -2, rule)
    times: dict[str, list[float]] = {"one": [], "divided": [], "predicted one": [], "predicted divided": []}
    for _ in range(ROUNDS):
        dist.barrier()
        of_nodes = profile(traced, images)
        sums, exchanges = prices(1 - dist.get_rank(), CPU)
        cluster = Cluster.flat(PARTS, replace(link, sum=sums, exchange=exchanges))
        (candidate,) = spatial(Job(Profile(of_nodes), cluster, 1, image_parts=(costs,)))
        times["predicted one"].append(of_nodes.time)
        times["predicted divided"].append(candidate.step)
        for name, step in (("one", one_host), ("divided", divided)):
            times[name].append(min(_seconds(network, step) for _ in range(2)))
    return times


def _seconds(network: torch.nn.Module, step: Callable[[], None]) -> float:
    network.zero_grad(set_to_none=True)
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def measured(rate: str) -> dict[str, Any]:
    """Return the times of all sizes, by size, with links of a number of Mbit/s."""
    with hosts(PARTS, int(rate)) as names:
        printed = run_on(names, [sys.executable, __file__, "--worker"], timeout=900)
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def main() -> None:
    """Measure what is missing, and write the page of what is known."""
    options = parser(__doc__)
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.worker:
        worker()
        return
    if (reason := missing()) is not None:
        print(f"skipped: {reason}")
        return
    pieces = Pieces(arguments)
    pieces.measure([str(rate) for rate in RATES], measured)
    rows: list[Sequence[str]] = [HEADING]
    errors, right = [], 0
    for size, rate in itertools.product(SIZES, RATES):
        times = pieces.known.get(str(rate), {}).get(str(size))
        if times is None:
            continue
        single, divided, of_single, of_divided = (min(values) for values in times.values())
        error = of_divided / of_single / (divided / single) - 1
        errors.append(abs(error))
        right += (of_divided < of_single) == (divided < single)
        shares = [
            f"{share:.2f}{' **faster**' if share < 1 else ''}" for share in (divided / single, of_divided / of_single)
        ]
        milliseconds = [f"{seconds * 1e3:.0f}" for seconds in (single, of_single, divided, of_divided)]
        rows.append([f"{size}", f"{rate}", *milliseconds, *shares, f"{error:+.0%}"])
    verdict = (
        f"`plan` says in {right} of {len(errors)} cases rightly which of the two is faster. The predicted ratio of the "
        f"two differs from the measured one by {statistics.fmean(errors):.0%} on average, and by at most "
        f"{max(errors):.0%}; it is within {GOAL:.0%} in {sum(error <= GOAL for error in errors)} cases."
    )
    network = UNet(CLASSES, widths=WIDTHS)
    text = TEXT.format(
        widths=", ".join(map(str, WIDTHS)), rounds=ROUNDS, goal=GOAL, verdict=verdict,
        megabytes=sum(parameter.nbytes for parameter in network.parameters()) / 1e6,
    )  # fmt: skip
    report(Path(__file__).with_suffix(".md"), "Where divided images begin to win", text, rows)


if __name__ == "__main__":
    main()
