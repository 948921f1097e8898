"""A program for launchers that trains several times, one run after the other: ``python -m cluster.several_runs RUNS``.

A launcher's start takes several seconds on each rank, most of them for imports. Here each run is forked after the
imports. RUNS is a list in JSON: each run's name, and its arguments after the interpreter. The output of all ranks of a
run is in the file ``NAME.log``, and their exit codes are in ``NAME.codes``; the last run has the program's own output
and exit code.
"""

import json
import subprocess
import sys

import lightning.pytorch  # noqa: F401
import warm

import cnnstrategies.commands.run.lightning_cli
import cnnstrategies.strategies  # noqa: F401


def main(runs: list[tuple[str, list[str]]]) -> int:
    """Train, and return the last run's exit code."""
    warm.install()
    *before, (_, last) = runs
    for name, arguments in before:
        with open(f"{name}.log", "a") as log, open(f"{name}.codes", "a") as codes:
            code = subprocess.run([sys.executable, *arguments], stdout=log, stderr=log).returncode
            print(code, file=codes)
    return subprocess.run([sys.executable, *last]).returncode


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
