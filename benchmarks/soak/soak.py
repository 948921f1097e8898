"""A soak: runs that train for an hour, and what each of their processes holds meanwhile.

    python benchmarks/soak/soak.py [--minutes 60] [--every 20]

Four runs of the command line side by side, each with the configuration of the name: DDP of Lightning as the
yardstick, a hybrid pipeline, and a parameter server in sync (two servers with copies) and async. An epoch of the digits
is 23 steps, so an hour holds hundreds of epochs, validations and checkpoints, too. Every 20 s the memory of a process
that no file stands behind (`RssAnon` and `RssShmem`), its open files and its threads are read from `/proc`. A process
grows where the last quarter of its samples lies above the second one, by medians: the first quarter is left out, in
which all is made once.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXPERIMENTS = ROOT / "configs/experiments"
HYBRID = EXPERIMENTS / "digits_smallcnn_hybrid_1-1_cpu.yaml"
SERVERS = EXPERIMENTS / "digits_smallcnn_parameter_server_cpu.yaml"
RUNS = {
    "ddp": [HYBRID, "--trainer.strategy=ddp"],
    "hybrid_pipeline [1, 1]": [HYBRID],
    "parameter_server sync": [SERVERS],
    "parameter_server async": [SERVERS, "--trainer.strategy.init_args.mode=async"],
}
MEBIBYTE = 1 << 20


class Sample(NamedTuple):
    """Resources that a process holds.

    Attributes:
        seconds: Since the run's start.
        memory: Bytes that no file stands behind.
        files: Open ones.
        threads: Their number.
    """

    seconds: float
    memory: int
    files: int
    threads: int


def processes_below(pid: int) -> list[int]:
    """A process and all that it and they have started."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children[parent].append(int(entry.name))
    descendants = [pid]
    for process in descendants:
        descendants += children[process]
    return descendants


def look(pid: int, seconds: float) -> Sample | None:
    """A sample of a process; None if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    if "RssAnon" not in fields:
        return None  # It has ended, and nobody has asked how.
    memory = sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return Sample(seconds, memory, files, int(fields["Threads"]))


def start(name: str, minutes: float, folder: Path) -> subprocess.Popen[bytes]:
    """Start a run."""
    config, *more = RUNS[name]
    seconds = int(60 * minutes)
    time_limit = f"00:{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    command = [sys.executable, ROOT / "cli.py", "fit", "--config", config, *more]
    command += ["--trainer.max_epochs=1000000", f"--trainer.max_time={time_limit}", "--model.lr_scheduler=null"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def soak(minutes: float, every: float) -> tuple[dict[str, dict[int, list[Sample]]], dict[str, str]]:
    """Run all, and sample until they end.

    Returns:
        By run: samples by process; and how it ended.
    """
    samples: dict[str, dict[int, list[Sample]]] = {name: defaultdict(list) for name in RUNS}
    ended = {}
    with tempfile.TemporaryDirectory() as top:
        folders = {name: Path(top, str(number)) for number, name in enumerate(RUNS)}
        for folder in folders.values():
            folder.mkdir()
        began = time.monotonic()
        running = {name: start(name, minutes, folders[name]) for name in RUNS}
        while running:
            time.sleep(every)
            seconds = time.monotonic() - began
            for name, process in list(running.items()):
                for pid in processes_below(process.pid):
                    if sample := look(pid, seconds):
                        samples[name][pid].append(sample)
                if process.poll() is not None:
                    del running[name]
                    ended[name] = f"{_steps(folders[name])} steps, exit code {process.returncode}"
                    print(name, ended[name], flush=True)
                    if process.returncode:
                        print((folders[name] / "log").read_text()[-3000:], flush=True)
    return samples, ended


def _steps(folder: Path) -> str:
    """The last step that the run's log of measurements names."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events, *_) = folder.rglob("events.out.tfevents*")
    accumulator = EventAccumulator(str(events)).Reload()
    return f"{max(accumulator.Scalars(tag)[-1].step for tag in accumulator.Tags()['scalars']):,}"


def growth(values: list[int]) -> float:
    """Median of the last quarter less that of the second."""
    quarter = max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])


def draw(samples: dict[str, dict[int, list[Sample]]], path: Path) -> None:
    """Curves of memory, files and threads, a column for each run."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, len(samples), figsize=(13, 7), sharex=True, squeeze=False)
    for column, (name, processes) in enumerate(samples.items()):
        axes[0, column].set_title(name, fontsize=10)
        for of_one in processes.values():
            minutes = [sample.seconds / 60 for sample in of_one]
            axes[0, column].plot(minutes, [sample.memory / MEBIBYTE for sample in of_one], linewidth=1)
            axes[1, column].plot(minutes, [sample.files for sample in of_one], linewidth=1)
            axes[2, column].plot(minutes, [sample.threads for sample in of_one], linewidth=1)
        for row in range(3):
            axes[row, column].set_ylim(bottom=0)
        axes[2, column].set_xlabel("minutes")
    for row, label in enumerate(("memory, MiB", "open files", "threads")):
        axes[row, 0].set_ylabel(label)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Soak, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="that each run trains")
    parser.add_argument("--every", type=float, default=20, help="seconds between two samples")
    arguments = parser.parse_args()
    samples, ended = soak(arguments.minutes, arguments.every)
    rows = [("run", "ended", "processes", "memory at the end, MiB", "growth, MiB", "growth of files", "of threads")]
    for name, processes in samples.items():
        lasting = [looks for looks in processes.values() if len(looks) > 0.5 * max(map(len, processes.values()))]
        memory = [growth([sample.memory for sample in looks]) / MEBIBYTE for looks in lasting]
        ends = [f"{looks[-2].memory / MEBIBYTE:.0f}" for looks in lasting]
        rows.append(
            (
                name,
                ended[name],
                f"{len(lasting)}",
                ", ".join(ends),
                ", ".join(f"{value:+.1f}" for value in memory),
                ", ".join(f"{growth([sample.files for sample in looks]):+.0f}" for looks in lasting),
                ", ".join(f"{growth([sample.threads for sample in looks]):+.0f}" for looks in lasting),
            )
        )
    draw(samples, HERE / "soak.svg")
    sys.path.append(str(HERE.parent / "pipeline"))
    from ranks import report

    report(HERE / "soak.md", "A soak", f"{__doc__}\n![Memory, open files and threads of each process](soak.svg)", rows)


if __name__ == "__main__":
    main()
