"""The connection to a Ray cluster, and what a run needs of its nodes."""

import contextlib
import importlib
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cnnstrategies.cluster.job import Size
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.errors import ConfigurationError

SECONDS = 10.0  # for a connection to the address
LAST = Path("/tmp/ray/ray_current_cluster")  # Where ray.init looks for this machine's; one that has died is there too.
BYTES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def demand(options: ClusterOptions, size: Size) -> dict[str, float]:
    """What the run needs of each node, as Ray counts it."""
    needed = {"CPU": float(size.tasks_per_node * (options.cpus_per_task or 1))}
    if size.gpus_per_node:
        needed["GPU"] = float(size.gpus_per_node)
        if options.gpu_type is not None:
            needed[f"accelerator_type:{options.gpu_type.upper()}"] = 0.001
    if options.memory is not None:
        match = re.fullmatch(r"(\d+)([KMGT]?)", options.memory.upper())
        if match is None:
            raise ConfigurationError(f"cluster.memory={options.memory!r}: write a number and K, M, G or T, as in 64G")
        needed["memory"] = float(int(match[1]) * BYTES[match[2] or "M"])
    return needed


def in_words(needed: Mapping[str, float]) -> str:
    """Resources of a node, for a reader."""
    words = []
    for name, value in needed.items():
        if name == "memory":
            words.append(f"{value / BYTES['G']:.3g} GiB of memory")
        elif name.startswith("accelerator_type:"):
            words.append(f"type {name.partition(':')[2]}")
        else:
            words.append(f"{value:g} {name}{'s' * (value != 1)}")
    return ", ".join(words)


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to a cluster. Without an address, to that of the environment or of this machine."""
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ConfigurationError(
            f"--to ray needs Ray ({error}): pip install '.[ray]' in a clone, and the version that the cluster has"
        ) from error
    if ray.is_initialized():
        yield ray
        return
    asked = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        knock(asked)
        # What the programs print is passed on by their actors, line by line and whole.
        ray.init(address=asked, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = "on this machine" if asked == "auto" else f"at {asked}"
        raise ConfigurationError(
            f"no Ray cluster is reachable {where}: {' '.join(str(error).split())[:300]}; start one with `ray start "
            "--head`, or name one with --cluster.ray.address HOST:PORT or RAY_ADDRESS"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def knock(address: str) -> None:
    """Fail at once where nobody listens: Ray itself tries for minutes."""
    if address == "auto" and LAST.exists():
        address = LAST.read_text().strip()
    match = re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address)
    if match is not None:
        socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=SECONDS).close()
