"""Steps and transport of this code against those of another checkout of it. Target: at most 1.02 times its time.

    git worktree add /tmp/before COMMIT
    python benchmarks/parameter_server/against.py /tmp/before --name COMMIT

Both run at the same time and take turns of one step or exchange, in an order that changes, while the others wait: what
else happens on the machine hits all. The other checkout runs twice: its ratio to itself says what noise there is. A
step is what step_time.py measures, push and pull what transport.py does.

The turns are kept in a file, and the same command adds more.
"""

import argparse
import contextlib
import json
import math
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "AGAINST_FOLDER"
WORKERS = 2
MEGABYTES = 100
WARM_UP = 3  # turns
BATCH = 32
# What takes turns, how often.
TRAININGS = {"ResNet-20": 120, "VGG-11": 45}
TRANSPORTS = {
    "tcp": (("tcp", False), 110),
    "Unix sockets": (("ipc", False), 160),
    "tcp, encrypted": (("tcp", True), 30),
}


class Turns:
    """A worker's side: waits for its turns.

    Args:
        rank: The worker.
    """

    def __init__(self, rank: int) -> None:
        folder = Path(os.environ[FOLDER])
        self._go = os.open(folder / f"go-{rank}", os.O_RDWR)
        self._done = os.open(folder / f"done-{rank}", os.O_RDWR)

    def take(self) -> None:
        """The last turn is over; wait for the next."""
        os.write(self._done, b"x")
        os.read(self._go, 1)


def serve(root: Path, name: str) -> None:
    """Run the benchmark of a checkout, turn by turn, until killed."""
    sys.path[0] = str(root / "benchmarks" / "parameter_server")
    import cnnstrategies

    assert Path(cnnstrategies.__file__).is_relative_to(root), "another checkout comes first"
    (train if name in TRAININGS else exchange)(name)


def train(name: str) -> None:
    """Steps of a fit."""
    import fits
    import step_time
    from lightning.pytorch import Callback

    from cnnstrategies.strategies import ParameterServerStrategy

    class Wait(Callback):
        turns: Turns | None = None

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.turns = self.turns or Turns(trainer.global_rank)
            self.turns.take()

    make, classes = next(network for title, network in step_time.NETWORKS.items() if title.startswith(name))
    samples = WORKERS * BATCH * (TRAININGS[name] + WARM_UP + 2)
    fits.fit(
        lambda: ParameterServerStrategy(start_method="fork"),
        make,
        classes,
        lambda: fits.data(32, classes, samples, BATCH),
        callbacks=[Wait()],
    )


def exchange(name: str) -> None:
    """Push and pull."""
    import peers
    import transport

    worker = transport.our_worker
    turns: list[Turns] = []

    def our_worker(id: int, *args: Any) -> Any:
        turns.append(Turns(id))
        return worker(id, *args)

    def timed(rounds: int, function: Callable[[], None]) -> list[float]:
        while True:
            turns[0].take()
            function()

    transport.our_worker, peers.timed = our_worker, timed
    numel = int(MEGABYTES * 1e6 / 4 / 20) * 20
    transport.ours(numel, 1, *TRANSPORTS[name][0])


class Contestant:
    """A program that runs a benchmark turn by turn.

    Args:
        command: Starts it.
        environment: Beside this process's.
        folder: For the pipes to its workers.
        workers: How many take turns; others wait for these.
        options: Of the process.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], folder: Path, workers: int = WORKERS, **options: Any
    ) -> None:
        folder.mkdir()
        self._pipes = []
        for rank in range(workers):
            for path in (folder / f"go-{rank}", folder / f"done-{rank}"):
                os.mkfifo(path)
                self._pipes.append(os.open(path, os.O_RDWR))
        self._process = subprocess.Popen(
            command, env={**os.environ, **environment, FOLDER: str(folder)}, start_new_session=True, **options
        )

    def wait(self) -> None:
        """Until all workers are through with their turn."""
        for done in self._pipes[1::2]:
            while not select.select([done], [], [], 1)[0]:
                if self._process.poll() is not None:
                    raise RuntimeError(f"{self._process.args} ended by {self._process.returncode} before its turns")
            os.read(done, 1)

    def take(self) -> float:
        """Seconds of a turn."""
        began = time.perf_counter()
        for go in self._pipes[::2]:
            os.write(go, b"x")
        self.wait()
        return time.perf_counter() - began

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):  # It has ended by itself.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def race(name: str, other: Path) -> list[list[float]]:
    """Seconds of the turns of this code, of the other's, and of the other's again."""
    turns = TRAININGS[name] if name in TRAININGS else TRANSPORTS[name][1]
    with tempfile.TemporaryDirectory() as folder:
        return take_turns(
            [
                Contestant(
                    [sys.executable, __file__, "--serve", str(root), name],
                    {"PYTHONPATH": str(root)},
                    Path(folder) / str(place),
                )
                for place, root in enumerate((ROOT, other, other))
            ],
            turns,
        )


def take_turns(contestants: Sequence[Contestant], turns: int) -> list[list[float]]:
    """Seconds of the turns of each, in an order that changes; they are ended."""
    chance = random.Random(0)
    try:
        for contestant in contestants:
            contestant.wait()
        times: list[list[float]] = [[] for _ in contestants]
        for index in range(WARM_UP + turns):
            for place in chance.sample(range(len(contestants)), len(contestants)):
                seconds = contestants[place].take()
                if index >= WARM_UP:
                    times[place].append(seconds)
    finally:
        for contestant in contestants:
            contestant.close()
    return times


def ratio(ours: list[float], theirs: list[float]) -> str:
    """The median ratio of turns next to each other, and the 95 % interval of that median."""
    ratios = sorted(our_time / their_time for our_time, their_time in zip(ours, theirs, strict=True))
    margin = math.ceil(0.98 * math.sqrt(len(ratios)))  # of the ranks between which the median lies
    low, high = (ratios[len(ratios) // 2 + way * margin] for way in (-1, 1))
    return f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """Race, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("what", nargs="*", help=f"of {', '.join((*TRAININGS, *TRANSPORTS))}; by default all")
    parser.add_argument("--name", default="the other", help="what the page calls it")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "against.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.other, options.what[0])
        return
    results: dict[str, list[list[float]]] = json.loads(options.results.read_text()) if options.results.exists() else {}
    for name in options.what or [*TRAININGS, *TRANSPORTS]:
        times = race(name, options.other.resolve())
        results[name] = [before + new for before, new in zip(results.get(name, [[], [], []]), times, strict=True)]
        options.results.write_text(json.dumps(results))
        print(name, ratio(*results[name][:2]), ratio(*results[name][1:]), flush=True)
    write(results, options.name)


def write(results: dict[str, list[list[float]]], other: str) -> None:
    """Write the page."""
    sys.path.append(str(ROOT / "benchmarks" / "pipeline"))
    from ranks import report

    rows = [("", "this code, ms", f"{other}, ms", "ratio, and its 95 % interval", f"{other} to itself", "turns")]
    for name, times in results.items():
        title = f"a step of {name}" if name in TRAININGS else f"{MEGABYTES} MB, {name}"
        medians = [f"{1e3 * statistics.median(each):.1f}" for each in times[:2]]
        rows.append((title, *medians, ratio(*times[:2]), ratio(*times[1:]), str(len(times[0]))))
    text = (__doc__ or "").splitlines()
    report(
        Path(__file__).with_suffix(".md"),
        f"The parameter server against that of {other}",
        "\n".join([text[0], *text[4:-2]]),
        rows,
        "one thread per process",
    )


if __name__ == "__main__":
    main()
