"""Handing a script to SLURM."""

import shutil
import subprocess
from pathlib import Path

from cnnstrategies.errors import ConfigurationError


def submit(script: Path) -> str:
    """Check a script with SLURM and put it into the queue.

    Args:
        script: The sbatch script.

    Returns:
        The job's number.

    Raises:
        ConfigurationError: There is no SLURM here, or it refuses the job; the message is SLURM's.
    """
    if shutil.which("sbatch") is None:
        raise ConfigurationError(
            "sbatch is not found: submit on a login node of a SLURM cluster; --dry_run prints the script anywhere"
        )
    # A job that no set of nodes can run would be accepted and wait forever, where the cluster does not enforce limits.
    _sbatch("--test-only", str(script))
    return _sbatch("--parsable", str(script)).strip().partition(";")[0]


def _sbatch(*arguments: str) -> str:
    ended = subprocess.run(["sbatch", *arguments], capture_output=True, text=True)
    if ended.returncode != 0:
        said = " ".join(ended.stderr.split()) or f"exit code {ended.returncode}"
        raise ConfigurationError(f"SLURM refuses the job: {said}; change the cluster section, or the trainer's devices")
    return ended.stdout
