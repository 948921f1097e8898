"""The two cases that made people write such strategies, on two hosts: less time for the same CNN at the same accuracy.

1. Data parallel over two machines against one machine ("30 % less time").
2. DDP's place taken by dynamic dispatch of batches and mixed precision, where one of two machines is half as fast
   ("25 % less time").

The hosts are network namespaces with a processor quota each and links of 1 Gbit/s. ResNet-20 on the digits, enlarged to
24 x 24 pixels, until the validation accuracy is 95 %.
"""

import base64
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import HERE, ROOT
from hosts import environment, hosts
from hosts import missing as no_hosts
from pieces import Pieces, parser
from quotas import missing as no_quotas
from quotas import quotas
from ranks import report

from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster, Host
from cnnstrategies.planning.costs import Link, Profile
from cnnstrategies.planning.rank import rank

MEGABITS = 1000
BATCH = 64  # of all hosts
SIZE = 24  # pixels to which the digits are enlarged
TARGET = 0.95
SEEDS = 3


@dataclass(frozen=True)
class Run:
    """One way to train.

    Attributes:
        title: For the page.
        quotas: Cores of each host.
        kind: Of the strategy.
        precision: The trainer's.
    """

    title: str
    quotas: tuple[float, ...]
    kind: str
    precision: str = "32-true"


RUNS = {
    "one": Run("one machine", (0.8,), "auto"),
    "two": Run("DDP on two machines", (0.8, 0.8), "ddp"),
    "plain": Run("DDP, one machine half as fast", (0.8, 0.4), "ddp"),
    "dynamic": Run("async, dynamic dispatch, bf16-mixed, one machine half as fast", (0.8, 0.4), "async", "bf16-mixed"),
}
CASES = (("one", "two"), ("plain", "dynamic"))


def train(name: str) -> dict[str, Any]:
    """Seconds until the accuracy is reached, and of an epoch."""
    key, seed = name.split("/")
    run = RUNS[key]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        groups = stack.enter_context(quotas(len(run.quotas)))
        names = stack.enter_context(hosts(len(run.quotas), MEGABITS))
        command = [sys.executable, str(HERE / "sources_host.py"), key, seed, str(folder)]
        processes = []
        for number, (host, group) in enumerate(zip(names, groups, strict=True)):
            variables = environment(number, [ROOT, HERE, HERE.parent / "pipeline"], GLOO_SOCKET_IFNAME="eth0")
            words = ["ip", "netns", "exec", host, *command]
            processes.append(subprocess.Popen(words, env=variables, preexec_fn=group.enter))
        while len(list(folder.glob("ready*"))) < len(names):
            time.sleep(0.05)
            if any(process.poll() for process in processes):
                raise SystemExit(f"{name}: a host has failed; its message is above")
        for group, cores in zip(groups, run.quotas, strict=True):
            group.limit(cores)
        (folder / "go").touch()
        for process in processes:
            if process.wait(150):
                raise SystemExit(f"{name}: a host has failed; its message is above")
        result: dict[str, Any] = json.loads((folder / "result").read_text())
        if (folder / "profile").exists():
            result["profile"] = (folder / "profile").read_text()
        for group in groups:  # What the strategy has started ends with it.
            while (group.folder / "cgroup.procs").read_text():
                time.sleep(0.05)
    return result


def predicted(pieces: Pieces, key: str) -> float:
    """Seconds for a batch of all hosts, as `plan` says."""
    run = RUNS[key]
    profile: Profile = pickle.loads(base64.b64decode(pieces.known[f"profile/{run.precision}"]["profile"]))
    link = Link(MEGABITS * 1e6 / 8, 1e-4)
    cluster = Cluster(tuple(Host(1, link, link, speed=cores / RUNS["one"].quotas[0]) for cores in run.quotas))
    if len(run.quotas) == 1:
        costs = profile.at(BATCH)
        return costs.time
    family = {"ddp": "ddp", "async": "parameter_server_async"}[run.kind]
    ranking = rank(Job(profile, cluster, BATCH))
    return next(row.step for row in (*ranking.same, *ranking.changing) if row.family == family)


def main() -> None:
    """Train what is missing; write the page when nothing is."""
    pieces = Pieces(parser(__doc__).parse_args())
    for why in (no_hosts(), no_quotas()):
        if why is not None:
            print(f"skipped: {why}")
            return
    profiles = [f"profile/{precision}" for precision in ("32-true", "bf16-mixed")]
    RUNS.update({"profile": Run("", (0.8,), "profile")})
    names = [f"{key}/{seed}" for seed in range(1, SEEDS + 1) for case in CASES for key in case]
    if pieces.measure([*profiles, *names], train):
        page(pieces)


def page(pieces: Pieces) -> None:
    """Write the page."""
    rows = [
        (
            "case",
            "training",
            f"seconds to {TARGET:.0%}: median (all)",
            "less time",
            "ms a batch, all seeds",
            "less",
            "predicted ms",
            "less, predicted",
        )
    ]
    for number, case in enumerate(CASES, start=1):
        base: list[float] = []
        for key in case:
            runs = [pieces.known[f"{key}/{seed}"] for seed in range(1, SEEDS + 1)]
            reached, batch = ([result[field] for result in runs] for field in ("seconds", "batch"))
            now = [statistics.median(reached), statistics.median(batch), predicted(pieces, key)]
            less = (
                ["", "", ""]
                if not base
                else [f"{1 - value / base_value:.0%}" for value, base_value in zip(now, base, strict=True)]
            )
            base = base or now
            rows.append(
                (
                    str(number),
                    RUNS[key].title,
                    f"{now[0]:.1f} ({', '.join(f'{seconds:.1f}' for seconds in reached)})",
                    less[0],
                    f"{now[1] * 1e3:.0f} ({', '.join(f'{seconds * 1e3:.0f}' for seconds in batch)})",
                    less[1],
                    f"{now[2] * 1e3:.0f}",
                    less[2],
                )
            )
    report(
        HERE / "sources.md",
        "Less time for the same accuracy",
        f"{__doc__}\n{SEEDS} seeds, batches of {BATCH} images over all hosts, SGD with momentum 0.9 and learning rate "
        "0.05; the asynchronous workers each make steps of their own on half a batch, with half the rate and momentum "
        "0.5. "
        "0.8 cores for a machine, 0.4 for one half as fast. Times are those of training and validation, without the "
        "start. *Predicted* is what `plan` says of a step, from profiles under the quota of 0.8; Lightning's own work, "
        "the metrics and validation are not part of that.",
        rows,
    )


if __name__ == "__main__":
    main()
