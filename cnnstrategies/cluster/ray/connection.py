"""Connection to a Ray cluster, and the resources that a run requests from it."""

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

SECONDS = 10.0  # Time-out, in seconds, for connecting to the address of a Ray cluster.
# File from which ray.init reads the address of this machine's Ray cluster. It may have the address of a cluster that no
# longer runs, so `knock` tests the address first.
LAST = Path("/tmp/ray/ray_current_cluster")
BYTES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def demand(options: ClusterOptions, size: Size) -> dict[str, float]:
    """Return the resources that a run requests on each node, by the names that Ray uses for resources.

    Raises:
        ConfigurationError: ``cluster.memory`` is not a number, with an optional unit.
    """
    needed = {"CPU": float(size.tasks_per_node * (options.cpus_per_task or 1))}
    if size.gpus_per_node:
        needed["GPU"] = float(size.gpus_per_node)
        if options.gpu_type is not None:
            needed[f"accelerator_type:{options.gpu_type.upper()}"] = 0.001
    if options.memory is not None:
        match = re.fullmatch(r"(\d+)([KMGT]?)", options.memory.upper())
        if match is None:
            raise ConfigurationError(
                f"cluster.memory={options.memory!r}: write a number with K, M, G or T, for example 64G"
            )
        needed["memory"] = float(int(match[1]) * BYTES[match[2] or "M"])
    return needed


def in_words(needed: Mapping[str, float]) -> str:
    """Return a text about the resources of a node, such as "8 CPUs, 1 GPU"."""
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
    """Connect to a Ray cluster, yield the module ``ray``, and disconnect.

    Args:
        address: Address of the cluster. The default is the value of ``RAY_ADDRESS``, or else this machine's cluster.

    Raises:
        ConfigurationError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ConfigurationError(
            f"--to ray needs Ray ({error}): run `pip install '.[ray]' 'ray==VERSION'` in a clone of the repository, "
            "with the cluster's version of Ray as VERSION"
        ) from error
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        knock(address)
        # The driver prints the output of the nodes' programs itself, in complete lines, so Ray's own printing is off.
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        place = "on this machine" if address == "auto" else f"at {address}"
        raise ConfigurationError(
            f"no Ray cluster is reachable {place} ({' '.join(str(error).split())[:300]}): start one with `ray start "
            "--head`, or set --cluster.ray.address HOST:PORT or RAY_ADDRESS"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def knock(address: str) -> None:
    """Fail immediately if no process listens at the address. Ray itself would try to connect for minutes.

    Raises:
        OSError: The connection fails.
    """
    if address == "auto" and LAST.exists():
        address = LAST.read_text().strip()
    match = re.fullmatch(r"(?:ray://)?([^/]+):(\d+)", address)
    if match is not None:
        socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=SECONDS).close()
