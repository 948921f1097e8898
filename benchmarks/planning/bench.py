"""Common parts of the benchmarks of `plan` and `tune`.

Import this module first: it makes the pipeline's benchmarks importable.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(HERE.parent / "pipeline"))  # hosts, networks, pieces, ranks


def environment() -> dict[str, str]:
    """For programs that train on all cores, with the benchmarks' networks."""
    paths = [str(ROOT), str(HERE), str(HERE.parent / "pipeline")]
    cores = str(os.cpu_count() or 1)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": cores}


def threads() -> str:
    """How many such a program has, for a page."""
    return f"{os.cpu_count()} threads per process"
