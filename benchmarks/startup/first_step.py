"""From Enter to the first optimizer step: `cnnstrategies fit` against a script of LightningCLI's two lines.

    python benchmarks/startup/first_step.py [--rounds 10]

Both run the same YAML: a module and data of one's own, and the quickstart's; on one device, and on two processes under
`ddp` by the launcher that it has by default, which starts the command once more. A run's time is from its start until
all its ranks have made their first step, and then it is killed. Processor time is that of all its processes, in user
and in kernel mode, and says more here than the time by the clock: other work shares the machine. The target is at most
1.05 times plain Lightning's.
"""

import argparse
import contextlib
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLAIN, OURS = "LightningCLI", "cnnstrategies fit"
COMMANDS = {PLAIN: [str(HERE / "plain.py"), "fit"], OURS: ["-m", "cnnstrategies", "fit"]}
TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE = 300.0  # seconds
Measured = tuple[float, float]  # Seconds of processors, and by the clock.


# What is imported, and how; a fit of ours imports as the last one does.
IMPORTS = {
    "torch": "import torch",
    "torch, Lightning and its command line": "import torch, lightning.pytorch.cli",
    "the same, and no garbage is looked for": "import gc; gc.disable(); import torch, lightning.pytorch.cli",
    "with this package's `fit`": "import gc; gc.disable(); import torch, cnnstrategies.commands.run.lightning_cli",
}


def configurations() -> dict[str, dict[str, object]]:
    """Return the configurations to train, by name: ``model`` and ``data`` without references.

    LightningCLI cannot resolve references by default.
    """
    own_classes = {"model": {"class_path": "own.Module"}, "data": {"class_path": "own.Data"}}
    quickstart = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text(encoding="utf-8"))
    arguments = quickstart["model"]["init_args"]
    arguments["network"]["init_args"]["num_classes"] = arguments["num_classes"]
    arguments["lr_scheduler"]["init_args"]["T_max"] = quickstart["trainer"]["max_epochs"]
    return {"own module": own_classes, "quickstart's module": {key: quickstart[key] for key in ("model", "data")}}


def write(file: Path, parts: dict[str, object], devices: int) -> None:
    """Write a configuration."""
    logger = {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": {"save_dir": "runs"}}
    trainer = {"accelerator": "cpu", "devices": devices, "strategy": "auto" if devices == 1 else "ddp"}
    mark = {"class_path": "own.FirstStep"}
    trainer |= {"max_epochs": 20, "log_every_n_steps": 5, "logger": logger, "callbacks": [mark]}
    file.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": trainer, **parts}), encoding="utf-8")


def of_session(leader: int) -> list[tuple[int, int]]:
    """The processes of a session, and the processor time of each and of its children that have ended, in ticks."""
    processes = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # It has ended.
            continue
        if int(fields[3]) == leader:
            processes.append((int(file.parent.name), sum(map(int, fields[11:15]))))
    return processes


def run(words: Sequence[str], configuration: Path, devices: int) -> Measured:
    """Start a command, and kill it when all its ranks have made a step."""
    paths = os.pathsep.join((str(ROOT), str(HERE)))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        marks = Path(folder, "marks")
        marks.mkdir()
        command = [sys.executable, *words, "--config", str(configuration)]
        environment = {**os.environ, "FIRST_STEPS": str(marks), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        start = time.perf_counter()
        leader = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=folder, start_new_session=True
        )
        try:
            while len(list(marks.iterdir())) < devices:
                if leader.poll() is not None or time.perf_counter() > start + PATIENCE:
                    output.seek(0)
                    raise SystemExit(f"{command} made no step:\n{output.read().decode()}")
                time.sleep(0.02)
            seconds = time.perf_counter() - start
            ticks = sum(spent for _, spent in of_session(leader.pid))
        finally:
            for process, _ in of_session(leader.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            leader.wait()
    return ticks / TICKS, seconds


def imports() -> dict[str, float]:
    """The processor time that each of ``IMPORTS`` takes, in seconds."""
    spent = {}
    for title, program in IMPORTS.items():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent[title] = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return spent


def row(title: str, results: dict[str, list[Measured]]) -> str:
    """A row of the table."""
    cells = [title]
    for kind in range(2):
        plain, ours = ([times[kind] for times in results[name]] for name in COMMANDS)
        ratios = sorted(b / a for a, b in zip(plain, ours, strict=True))
        cells += [f"{statistics.median(plain):.1f}", f"{statistics.median(ours):.1f}"]
        cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run all in turn, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for title, parts in configurations().items():
            for devices in (1, 2):
                file = Path(folder, "run.yaml")
                write(file, parts, devices)
                results: dict[str, list[Measured]] = {name: [] for name in COMMANDS}
                for number in range(-1, rounds):  # The first writes what Python compiles.
                    for name in sorted(COMMANDS, reverse=number % 2 == 0):
                        measured = run(COMMANDS[name], file, devices)
                        results[name] += [measured] * (number >= 0)
                rows.append(row(f"{title}, {devices} device{'s' * (devices > 1)}", results))
    spent = [imports() for _ in range(rounds)]
    parts = [
        f"| {title} | {statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f}) |"
        for title in IMPORTS
        for values in [[times[title] for times in spent]]
    ]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    first, _, rest = (__doc__ or "").partition("\n\n")
    page = [
        "# To the first step",
        "",
        first,
        "",
        rest.partition("\n\n")[2].strip(),
        "",
        f"| | {PLAIN}, s of processors | {OURS} | ratio | {PLAIN}, s by the clock | {OURS} | ratio |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"Medians of {rounds} rounds, both in each, in an order that changes; the ratio is a round's: median, lowest "
        "to highest.",
        "",
        "Most of it is imports. Python's garbage collector looks through all that torch and Lightning make, again and "
        "again; `fit` has it wait until all is imported, and leave that out from then on.",
        "",
        "| Import of | s of processors: median, lowest to highest |",
        "|---|---|",
        *parts,
        "",
        f"Machine: {model}, {os.cpu_count()} cores, shared with other work (load {os.getloadavg()[0]:.0f} at the end), "
        f"{platform.system()}; Python {platform.python_version()}, torch {version('torch')}, lightning "
        f"{version('lightning')}, jsonargparse {version('jsonargparse')}, one thread per process; "
        f"{date.today():%d %B %Y}. Command: `python first_step.py --rounds {rounds}`, in `benchmarks/startup`.",
    ]
    text = "\n".join(page) + "\n"
    print(text)
    Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
