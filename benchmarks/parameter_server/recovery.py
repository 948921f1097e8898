"""From the SIGKILL of a process until the run is whole again: median and worst, for each kind of process.

    python benchmarks/parameter_server/recovery.py [--kinds copies ...] [--kills 20] [--minutes 4]

One run of each kind takes all kills, the next when it is whole again. What was measured is kept in a file, and the same
command goes on from there, until there is enough of every kind. The page has what is there.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fits import data, sgd  # First: it makes the pipeline's benchmarks importable.
from lightning.pytorch import Callback, LightningModule, Trainer
from networks import vgg_like
from ranks import report

from cnnstrategies import ImageClassifier
from cnnstrategies.strategies import ParameterServerStrategy

RESTARTS = 1000
EPOCH = 30  # steps
BATCH = 4
PATIENCE = 120.0  # seconds: then it has failed


@dataclass(frozen=True)
class Kind:
    """A kind of kill, with the options of its run.

    Attributes:
        options: Of the strategy.
        kill: Kills, waits until the run is whole, and gives seconds by name.
        meets: Whether the workers agree on something through the coordinator in each step.
    """

    options: dict[str, Any]
    kill: Callable[["Run", int], dict[str, float]]
    meets: bool = False


class Steps(Callback):
    """Notes each step's begin and end, and the epoch, in a file of the rank.

    Args:
        folder: Where the files go.
        meets: Whether all ranks agree on something after each step.
    """

    def __init__(self, folder: Path, meets: bool) -> None:
        self.folder = folder
        self.meets = meets
        self.began = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock."""
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the step."""
        if self.meets:
            trainer.strategy.reduce_boolean_decision(True)
        with (self.folder / f"rank-{trainer.global_rank}").open("a") as file:
            file.write(f"{os.getpid()} {trainer.current_epoch} {self.began} {time.monotonic()}\n")


def train(folder: Path, options: dict[str, Any], meets: bool) -> None:
    """Train until the run is ended, as a user's script does."""
    (folder / f"imported-{os.getpid()}").write_text(str(time.monotonic()))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ParameterServerStrategy(max_restarts=RESTARTS, **options),
        max_epochs=-1,
        callbacks=[Steps(folder, meets)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(ImageClassifier(vgg_like(), 100, optimizer=sgd), data(32, 100, 2 * EPOCH * BATCH, BATCH))


@dataclass(frozen=True)
class Step:
    """One step of one rank."""

    process: int
    epoch: int
    began: float
    ended: float


@dataclass
class Run:
    """A run that is trained while its processes are killed."""

    kind: Kind
    folder: Path
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings = json.dumps([str(self.folder), self.kind.options, self.kind.meets])
        command = [sys.executable, __file__, "--train", settings]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        self.wait(lambda: all(len(self.steps(rank)) > 10 for rank in range(2)) or None)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def wait(self, look: Callable[[], Any]) -> Any:
        """Look until something is there.

        Raises:
            SystemExit: The run has ended, or nothing has come for long.
        """
        deadline = time.monotonic() + PATIENCE
        while (answer := look()) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("".join(line for _, line in self.lines[-30:]))
            time.sleep(0.02)
        return answer

    def close(self) -> None:
        """End the run."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    # What happens in it

    def steps(self, rank: int) -> list[Step]:
        """The last steps of a rank."""
        try:
            lines = (self.folder / f"rank-{rank}").read_text().splitlines()[-200:]
        except FileNotFoundError:
            return []
        words = [line.split() for line in lines]
        return [Step(int(first), int(second), float(third), float(fourth)) for first, second, third, fourth in words]

    def trains(self, after: float, ranks: tuple[int, ...] = (0, 1)) -> float:
        """When all ranks had ended two steps that they had begun later: the second has what the first has made."""

        def look() -> float | None:
            ends = [[step.ended for step in self.steps(rank) if step.began > after] for rank in ranks]
            return max(each[1] for each in ends) if all(len(each) > 1 for each in ends) else None

        return float(self.wait(look))

    def trains_again(self, rank: int, killed: int, after: float) -> float:
        """The same of the process that has a rank's place after the one that was killed."""

        def look() -> float | None:
            ends = [step.ended for step in self.steps(rank) if step.process != killed and step.began > after]
            return ends[1] if len(ends) > 1 else None

        return float(self.wait(look))

    def says(self, text: str, after: float) -> float:
        """When it said so."""

        def look() -> float | None:
            return next((at for at, line in self.lines if at > after and text in line), None)

        return float(self.wait(look))

    def find(self, name: str) -> int | None:
        """The process of a service."""
        return next((pid for pid, comm, _ in self._children() if comm == name), None)

    def _children(self) -> list[tuple[int, str, str]]:
        """Number, name and command of each."""
        children = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                _, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
                if int(rest.split()[1]) == self.process.pid:
                    name, command = (Path(f"/proc/{pid}/{field}").read_text() for field in ("comm", "cmdline"))
                    children.append((int(pid), name.strip(), command))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return children


def _kill(run: Run, name: str) -> float:
    pid = run.wait(lambda: run.find(name))
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at


def kill_server(run: Run, index: int) -> dict[str, float]:
    """One of two, in turn."""
    server = index % 2
    at = _kill(run, f"ps-server-{server}")
    seconds = {"steps": run.trains(at) - at, "noticed": run.says("is started again", at) - at}
    return {**seconds, "copies": run.says(f"has filled server {server}", at) - at}


def kill_coordinator(run: Run, index: int) -> dict[str, float]:
    """The coordinator; the next epoch begins with a collective."""
    epoch = run.steps(0)[-1].epoch
    at = _kill(run, "ps-coordinator")
    steps = run.trains(at) - at
    run.wait(lambda: run.steps(0)[-1].epoch > epoch + run.kind.meets or None)
    return {"steps": steps}


def kill_worker(rank: int) -> Callable[[Run, int], dict[str, float]]:
    """A rank."""

    def kill(run: Run, index: int) -> dict[str, float]:
        process = run.steps(rank)[-1].process
        at = time.monotonic()
        os.kill(process, signal.SIGKILL)
        seconds = {"steps": run.trains(at, (1 - rank,)) - at, "all": run.trains_again(rank, process, at) - at}
        imported = run.folder / f"imported-{run.steps(rank)[-1].process}"
        let_in = run.says(f"Rank {rank} was started again", at)
        return {**seconds, "imported": float(imported.read_text()) - at, "let in": let_in - at}

    return kill


KINDS = {
    "copies": Kind({"servers_per_node": 2, "replication": 2}, kill_server),
    "worker": Kind({}, kill_worker(1)),
    "rank 0": Kind({}, kill_worker(0)),
    "coordinator": Kind({}, kill_coordinator),
    "asked": Kind({}, kill_coordinator, meets=True),
}
# Title, kind, and what is shown of it.
ROWS = [
    ("a server, `replication: 2`", "copies", "steps", "copies"),
    ("a worker", "worker", "steps", "all"),
    ("rank 0", "rank 0", "steps", "all"),
    ("the coordinator", "coordinator", "steps", ""),
    ("the coordinator, which is asked in each step", "asked", "steps", "steps"),
]


def measure(kind: Kind, kills: int, deadline: float, keep: Callable[[dict[str, float]], None], done: int) -> None:
    """Kill until there is enough, or the time is over."""
    if done >= kills or time.monotonic() > deadline:
        return
    with tempfile.TemporaryDirectory() as folder:
        run = Run(kind, Path(folder))
        try:
            for index in range(done, kills):
                if time.monotonic() > deadline:
                    return
                usual = statistics.median(step.ended - step.began for step in run.steps(0)[-EPOCH:])
                keep({**kind.kill(run, index), "a step": usual})
                time.sleep(1)
        finally:
            run.close()


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60, help="stop then, and go on another time")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "recovery.json")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        folder, strategy, meets = json.loads(options.train)
        train(Path(folder), strategy, meets)
        return
    results: dict[str, list[dict[str, float]]] = {}
    if options.results.exists():
        results = json.loads(options.results.read_text())
    deadline = time.monotonic() + 60 * options.minutes
    for name in options.kinds:
        results_of_kind = results.setdefault(name, [])

        def keep(seconds: dict[str, float], results_of_kind: list[dict[str, float]] = results_of_kind) -> None:
            results_of_kind.append(seconds)
            options.results.write_text(json.dumps(results))
            print(name, len(results_of_kind), {key: round(value, 2) for key, value in seconds.items()}, flush=True)  # noqa: B023

        measure(KINDS[name], options.kills, deadline, keep, len(results_of_kind))
    if all(results.get(name) for name in KINDS):
        write(results, options.kills)


def write(results: dict[str, list[dict[str, float]]], kills: int) -> None:
    """Write the page."""

    def numbers(kind: str, key: str) -> list[str]:
        values = [seconds[key] for seconds in results[kind][:kills] if key in seconds]
        return [f"{statistics.median(values):.2f}", f"{max(values):.2f}"] if values else ["", ""]

    rows = [["killed", "kills", "steps go on, s: median", "worst", "whole again, s: median", "worst"]]
    for title, kind, steps, whole in ROWS:
        count = str(len(results[kind][:kills]))
        rows.append([title, count, *numbers(kind, steps), *numbers(kind, whole)])
    usual = statistics.median(seconds["a step"] for name in KINDS for seconds in results[name][:kills])
    noticed = statistics.median(seconds["noticed"] for seconds in results["copies"][:kills])
    imported, let_in = (
        statistics.median(seconds[key] for seconds in results["worker"]) for key in ("imported", "let in")
    )
    report(
        Path(__file__).with_suffix(".md"),
        "How long until a run is whole again",
        f"""{(__doc__ or "").splitlines()[0]}

*Steps go on*: from the SIGKILL until every worker that is left has ended two steps that it has begun after the kill.
The second of them has used what the first has made. A step without a fault takes {usual:.2f} s.

*Whole again*: for servers with copies until the run says that every slice has all its copies again, for workers until
the one that was started again has ended two steps. It joins at the next epoch; an epoch has {EPOCH} steps here.

One run of each kind, with 2 workers and VGG-11 (9.5 million parameters) in batches of {BATCH} for each, takes all the
kills, each when it is whole again from the last. It is a program that calls `Trainer.fit`, with
`ParameterServerStrategy(max_restarts={RESTARTS})` and otherwise the defaults. That a server is killed is noticed
after {1000 * noticed:.0f} ms. A worker's program has imported torch and Lightning {imported:.1f} s after
the kill, and is let in after {let_in:.1f} s, the wait for the next epoch included.""",
        rows,
        "one thread per process",
    )


if __name__ == "__main__":
    main()
