"""Run a command of cnnstrategies for a recipe, and measure its time."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path


def command(folder: Path, *words: str) -> tuple[str, float, float]:
    """Return the output, seconds and processor seconds of a command, whose processes have one thread each.

    Args:
        folder: Working directory of the command.
        words: The command and its arguments.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(
        [str(Path(sys.executable).parent / "cnnstrategies"), *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        done.stdout,
        time.perf_counter() - start,
        now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime,
    )
