"""What ``cnnstrategies doctor`` takes."""

import argparse
from pathlib import Path

PORT = 29480


def parser() -> argparse.ArgumentParser:
    """Its parser."""
    result = argparse.ArgumentParser(
        prog="cnnstrategies doctor",
        description="Check a cluster before training: versions, connections, shared directory, clocks. Start it as the "
        "training will be, with srun, torchrun or mpirun, one process on each machine; or with --hosts over SSH.",
        allow_abbrev=False,
    )
    result.add_argument("--hosts", help="names of the machines, with commas: start the doctor there over SSH")
    result.add_argument("--ssh", default="ssh", help="the SSH command with its options (default: ssh)")
    result.add_argument("--port", type=int, default=PORT, help=f"main port with --hosts (default: {PORT})")
    result.add_argument(
        "--shared", type=Path, default=Path(), help="directory for checkpoints on shared storage (default: this one)"
    )
    result.add_argument("--interface", help="network interface, by name or subnet (default: by route)")
    result.add_argument(
        "--listen",
        type=int,
        help="port that the others try here, where a server of parameters will listen (default: a free one)",
    )
    result.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the other hosts (default: 60)")
    return result
