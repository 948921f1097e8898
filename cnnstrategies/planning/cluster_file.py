"""A cluster as a YAML file describes it."""

import itertools
from pathlib import Path
from typing import Any

from cnnstrategies.planning.cluster import ALL_REDUCE, Cluster, Failures, Host
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.yaml_lines import Value, count, duration, number, one_of, size

GBIT = 1e9 / 8  # bytes per second
DEFAULT_US = {"inside": 10.0, "network": 50.0}


def read_cluster(file: Path, devices: int | None = None) -> Cluster:
    """The cluster that a file describes.

    Args:
        file: With ``nodes``, a list; and, if wished, ``failures``, ``jitter``, ``all_reduce``, ``server``.
        devices: How many it must have, where a configuration says so too.

    Raises:
        ConfigurationError: A key is unknown, a number impossible, or something needed is missing; the message has the
            file, the line and what is accepted.
    """
    root = Value.load(file)
    found = root.mapping(
        {
            "nodes": lambda value: [host for item in value.items() for host in _hosts(item)],
            "failures": _failures,
            "jitter": number(0.0, most=1.0),
            "all_reduce": one_of(*ALL_REDUCE),
            "server": lambda value: value.mapping({"gbyte_per_s": number(0.0, above=True), "us": number(0.0)}),
        }
    )
    if "nodes" not in found:
        root.refuse("nodes is missing, a list of machines such as {count: 4, devices: 4, network: {gbit: 10}}")
    options: dict[str, Any] = {name: found[name] for name in ("failures", "jitter", "all_reduce") if name in found}
    server = found.get("server") or {}
    if "gbyte_per_s" in server:
        options["server_rate"] = server["gbyte_per_s"] * 1e9
    if "us" in server:
        options["server_message"] = server["us"] * 1e-6
    cluster = Cluster(tuple(found["nodes"]), **options)
    if devices is not None and cluster.devices != devices:
        value = next(value for key, value in root.pairs() if key.text == "nodes")
        value.refuse(
            f"they have {cluster.devices} devices, but trainer.devices x trainer.num_nodes are {devices}: "
            "give both the same"
        )
    return cluster


def _hosts(item: Value) -> list[Host]:
    found = item.mapping(
        {
            "count": count,
            "devices": count,
            "speed": number(0.0, above=True),
            "memory": size,
            "price": number(0.0),
            "inside": lambda value: _link(value, "inside"),
            "network": lambda value: _link(value, "network"),
        }
    )
    number_of_hosts = found.pop("count", 1)
    found.setdefault("devices", 1)
    if "network" not in found and "inside" not in found:
        item.refuse("network is missing, how machines are connected, such as {gbit: 10, us: 50}")
    if found["devices"] > 1 and "inside" not in found:
        item.refuse(f"inside is missing, how its {found['devices']} devices are connected, such as {{gbit: 96}}")
    found.setdefault("network", found.get("inside"))
    found.setdefault("inside", found["network"])
    return [Host(**found)] * number_of_hosts


def _link(value: Value, kind: str) -> Link:
    found = value.mapping(
        {
            "gbit": number(0.0, above=True),
            "us": number(0.0),
            "work_us": number(0.0),
            "efficiency": number(0.0, above=True, most=1.0),
            "rates": _rates,
        }
    )
    efficiency = found.get("efficiency", 1.0)
    rates = tuple((bytes_, rate * efficiency) for bytes_, rate in found.get("rates", ()))
    if "gbit" not in found and not rates:
        value.refuse("gbit is missing, the rate of large messages in Gbit/s; or rates, by size")
    bandwidth = found["gbit"] * GBIT * efficiency if "gbit" in found else rates[-1][1]
    return Link(bandwidth, found.get("us", DEFAULT_US[kind]) * 1e-6, rates, found.get("work_us", 0.0) * 1e-6)


def _rates(value: Value) -> list[tuple[int, float]]:
    read = number(0.0, above=True)
    rates = [(size(key), read(rate) * GBIT) for key, rate in value.pairs()]
    if not rates or any(left[0] >= right[0] for left, right in itertools.pairwise(rates)):
        value.refuse("sizes of messages, ascending, with Gbit/s are accepted, such as {64KiB: 2, 1MiB: 7}")
    return rates


def _failures(value: Value) -> Failures:
    found = value.mapping({"device_mtbf_hours": number(0.0, above=True), "restart": duration, "checkpoint": duration})
    if "device_mtbf_hours" not in found:
        value.refuse("device_mtbf_hours is missing, the mean hours between two failures of one device, such as 50000")
    return Failures(
        device_mtbf=found["device_mtbf_hours"] * 3600,
        restart=found.get("restart", 600.0),
        checkpoint=found.get("checkpoint", 60.0),
    )
