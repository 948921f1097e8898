"""Identity of this process's run, from the configuration and from the launchers that have started the process."""

import os
import sys
import time
from pathlib import Path

from cnnstrategies.cluster import launchers
from cnnstrategies.cluster.launchers import RUN_NAME, Environ
from cnnstrategies.identity import LAUNCH, Identity, text_digest
from cnnstrategies.runtime.process_ids import ProcessId

# Environment variable with the value that MASTER_PORT had before this package changed it to the port of the store.
FIRST_PORT = "CNNSTRATEGIES_FIRST_PORT"
LONGEST_ID = 80  # Launch ids with more characters are replaced by a digest.
_declared: tuple[str, str] | None = None


def declare(name: str | None, configuration: str) -> None:
    """Set the name of this process's run, and the digest of its configuration.

    Args:
        name: Name of the run, or None.
        configuration: Digest from :func:`cnnstrategies.identity.configuration_digest`.
    """
    global _declared
    _declared = (name or "", configuration)


def run_identity() -> Identity:
    """Return the identity of this process's run.

    Without a configuration, which :func:`declare` announces, the name of the program takes the place of the run's name,
    unless the variable `RUN_NAME` is set.
    """
    launch = launch_of(os.environ)
    if _declared is not None:
        return Identity(*_declared, launch)
    return Identity(_short(os.environ.get(RUN_NAME) or Path(sys.argv[0]).name), "", launch)


def launch_of(environ: Environ) -> str:
    """Return a text that names the launch of this process, the same for all ranks of a run.

    It is empty if no launcher has an id for the launch.
    """
    launcher = launchers.rank_launcher(environ)
    candidates = launchers.detected(environ) if launcher is None else [launcher]
    ids = [f"{launcher.title} {_short(launch)}" for launcher in candidates if (launch := launcher.launch_id(environ))]
    _, _, description = environ.get(LAUNCH, "").partition(" ")
    texts = [*ids[:1], *([description] if description else [])]
    if not texts and (port := environ.get(FIRST_PORT, environ.get("MASTER_PORT"))) is not None:
        texts = [f"MASTER_PORT {port}"]  # The users start the processes, and distinguish their runs by the port.
    return ", ".join(texts)


def launch_secret(environ: Environ) -> bytes:
    """Return the secret that the processes of this launch share. It is empty if they share none."""
    return environ.get(LAUNCH, "").partition(" ")[0].encode()


def process_start() -> int:
    """Return the time at which this process started, in seconds since the epoch."""
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        age = uptime - ProcessId.current().start / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        age = 0.0  # Systems other than Linux.
    return int(time.time() - max(0.0, age))


def _short(launch: str) -> str:
    return launch if len(launch) <= LONGEST_ID and launch.isprintable() else text_digest(launch)
