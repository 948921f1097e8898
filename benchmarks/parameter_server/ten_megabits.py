"""Ten minutes over 10 Mbit/s and 20 ms with the default time-out of 10 s: is anybody missed who lives?

    python benchmarks/parameter_server/ten_megabits.py [--minutes 10]

The hosts are network namespaces with a worker, a server and a quarter of a core each, and a wire of 10 Mbit/s and 20 ms
there and back between them. All parameters take several times the time-out to cross it, and the signs of life of the
second host go the same way. The coordinator, on the first host, is asked four times in a second for how long it has not
heard each member. Target: nobody is missed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from across import sent, trainer_of  # First: it makes the pipeline's benchmarks importable.
from fits import data, sgd
from hosts import environment
from hosts import missing as no_hosts
from lightning.pytorch import seed_everything
from networks import vgg_like
from one_more import Notes, done, wait_for
from pieces import Pieces, parser
from quotas import missing as no_quotas
from quotas import quotas
from ranks import report
from wire import far_hosts

from cnnstrategies import ImageClassifier
from cnnstrategies.paramserver.places import Watcher
from cnnstrategies.strategies import ParameterServerStrategy

HERE = Path(__file__).parent
MEGABITS, MILLISECONDS = 10, 20.0
BATCH_SIZE, CORES = 16, 0.25
PAUSE = 0.25  # seconds between two questions
COORDINATOR = "tcp://10.77.0.1:7000"
VARIANTS: dict[str, dict[str, Any]] = {
    "local, 32 own steps": {"mode": "local", "sync_every": 32},
    "sync": {},
}


def train(folder: Path, name: str) -> None:
    """One host's part; it trains until it is killed."""
    strategy = ParameterServerStrategy(coordinator=COORDINATOR, security="none", **VARIANTS[name])
    trainer = trainer_of(strategy, folder, epochs=1000)
    trainer.callbacks.append(Notes())  # type: ignore[attr-defined]
    seed_everything(1, verbose=False)
    model = ImageClassifier(vgg_like(), 100, optimizer=sgd)
    trainer.fit(model, data(32, 100, 2 * 320 * BATCH_SIZE, BATCH_SIZE))


def watch() -> None:
    """Write down what the coordinator says, until this process is killed."""
    with Watcher(COORDINATOR) as watcher, Path("answers").open("a", buffering=1) as file:
        while True:
            answer = watcher.ask(1.0)
            if answer is not None:
                silent = {f"{member['role']} {member['id']}": member["silent"] for member in answer.fields["members"]}
                seen = {"silent": silent, "losses": answer.fields["losses"], "sent": sent(), "at": time.monotonic()}
                print(json.dumps(seen), file=file)
            time.sleep(PAUSE)


def measure(name: str, minutes: float) -> dict[str, Any]:
    """Train for some minutes; what the coordinator has said meanwhile."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        groups = stack.enter_context(quotas(2, "cnnten"))
        names = stack.enter_context(far_hosts(MEGABITS, MILLISECONDS))
        for group in groups:
            stack.callback(group.end)

        def start(host: int, *words: str) -> subprocess.Popen[bytes]:
            command = ["ip", "netns", "exec", names[host], sys.executable, str(Path(__file__).resolve()), *words]
            variables = environment(host, [HERE.parents[1]])
            with (folder / f"log-{host}").open("ab") as log:
                enter = groups[host].enter
                return subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log, preexec_fn=enter)

        processes = [start(host, "--folder", str(folder), "--variant", name) for host in range(2)]
        for host, process in enumerate(processes):
            wait_for(folder, host, 1, process)
        for group in groups:
            group.limit(CORES)
        begun = [len(done(folder, host)) for host in range(2)]
        began = time.monotonic()
        start(0, "--watch")
        while time.monotonic() < began + 60 * minutes:
            time.sleep(1)
            for host, process in enumerate(processes):
                if process.poll() is not None:
                    raise SystemExit(f"host {host} has ended:\n{(folder / f'log-{host}').read_text()[-2000:]}")
        text = (folder / "answers").read_text()
        batches = [len(done(folder, host)) - before for host, before in enumerate(begun)]
    answers = [json.loads(line) for line in text[: text.rfind("\n")].splitlines()]
    seconds = answers[-1]["at"] - answers[0]["at"]
    members = sorted({member for answer in answers for member in answer["silent"]})
    return {
        "batches": sum(batches),
        "losses": answers[-1]["losses"],
        "load": 8e-6 * (answers[-1]["sent"] - answers[0]["sent"]) / seconds / MEGABITS,
        "silent": {member: max(answer["silent"].get(member, 0.0) for answer in answers) for member in members},
    }


def main() -> None:
    """Measure what is missing; write the page when nothing is."""
    made = parser(__doc__)
    made.set_defaults(seconds=float("inf"))
    made.add_argument("--minutes", type=float, default=10, help="of each variant")
    for option in ("--folder", "--variant"):
        made.add_argument(option, help=argparse.SUPPRESS)
    made.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.watch:
        watch()
    if options.folder:
        train(Path(options.folder), options.variant)
        return
    for why in (no_hosts(), no_quotas()):
        if why is not None:
            print(f"skipped: {why}")
            return
    pieces = Pieces(options)
    if not pieces.measure(list(VARIANTS), lambda name: measure(name, options.minutes)):
        return
    members = sorted({member for name in VARIANTS for member in pieces.known[name]["silent"]})
    rows = [
        ("", "processes missed", "batches", "of the link used", *(f"{member}: longest silence" for member in members))
    ]
    for name in VARIANTS:
        result = pieces.known[name]
        silent = (f"{result['silent'][member]:.1f} s" for member in members)
        rows.append((name, f"**{result['losses']}**", str(result["batches"]), f"{result['load']:.0%}", *silent))
    parameters = sum(parameter.numel() for parameter in vgg_like().parameters())
    report(
        HERE / "ten_megabits.md",
        "Signs of life over 10 Mbit/s",
        f"{__doc__}\nVGG-11 with {parameters:,} parameters, batches of {BATCH_SIZE} for each of 2 workers, "
        f"{options.minutes:g} minutes of each.",
        rows,
    )


if __name__ == "__main__":
    main()
