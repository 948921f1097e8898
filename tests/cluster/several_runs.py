"""A program for launchers that trains several times, one run after the other.

Run ``python -m tests.cluster.several_runs RUNS``.

A launcher's start takes several seconds on each rank, most of them for imports. Here each run is forked after the
imports. RUNS is a list in JSON: each run's name, its arguments after the interpreter, and a list of files, of which
each rank waits for its own before it starts the run; an empty list if no rank waits. The output of all ranks of a run
is in the file ``NAME.log``, and their exit codes are in ``NAME.codes``; the last run has the program's own output and
exit code. A launcher's SIGTERM ends the run and not this program, which starts the next run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch  # noqa: F401

import cnnstrategies.commands.run.lightning_cli
import cnnstrategies.strategies  # noqa: F401
from tests.runner import warm


def wait_for(files: Sequence[str]) -> None:
    """Wait until this rank's file exists."""
    if files:
        file = Path(files[int(os.environ["SLURM_PROCID"])])
        while not file.exists():
            time.sleep(0.1)


def main(runs: list[tuple[str, list[str], list[str]]]) -> int:
    """Train, and return the last run's exit code."""
    warm.install()
    *before, (_, last, files) = runs
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name, arguments, awaited in before:
        wait_for(awaited)
        with open(f"{name}.log", "a") as log, open(f"{name}.codes", "a") as codes:
            code = subprocess.run([sys.executable, *arguments], stdout=log, stderr=log).returncode
            print(code, file=codes)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    wait_for(files)
    return subprocess.run([sys.executable, *last]).returncode


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
