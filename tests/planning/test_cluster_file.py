"""Tests of cluster files: the cluster that a file describes, and error messages with file, key and accepted values."""

from math import inf
from pathlib import Path

import pytest

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.cluster import Cluster, read_cluster
from cnnstrategies.planning.costs import UNMEASURED, Link

pytestmark = pytest.mark.light

FILE = """
nodes:
  - {count: 2, devices: 4, memory: 16GiB, price: 12.0,
     inside: {gbit: 96, us: 10}, interconnect: {gbit: 10, us: 50, efficiency: 0.5}}
  - {devices: 2, speed: 0.5, inside: {gbit: 8, work_us: 70, sum_us: 90, exchange_us: 0},
     interconnect: {gbit: 4, sum_us: 200, exchange_us: 90}}
server: {gbyte_per_s: 2, us: 80}
"""


def read(text: str, folder: Path, backend: str = "nccl") -> Cluster:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return read_cluster(file, backend=backend)


def test_a_cluster_file_becomes_devices_and_links(tmp_path: Path) -> None:
    cluster = read(FILE, tmp_path)
    assert cluster.host_of == (0,) * 4 + (1,) * 4 + (2,) * 2
    assert cluster.speeds == (1.0,) * 8 + (0.5,) * 2
    assert cluster.memories == (16 * 2**30,) * 8 + (inf,) * 2
    of_nccl = {"sum": pytest.approx(UNMEASURED["nccl"][0]), "exchange": pytest.approx(UNMEASURED["nccl"][1])}
    assert cluster.link(0, 3) == Link(12e9, 10 * 1e-6, **of_nccl)
    assert cluster.link(0, 4) == Link(0.625e9, 50 * 1e-6, **of_nccl), "10 Gbit/s at an efficiency of 0.5"
    link = cluster.link(8, 9)
    assert (link.work, link.sum, link.exchange) == (pytest.approx(7e-5), pytest.approx(9e-5), 0.0)
    assert read(FILE, tmp_path, "gloo").link(0, 9).sum == pytest.approx(UNMEASURED["gloo"][0])
    between = cluster.link(4, 9)
    assert between.bandwidth == 0.5e9, "a link between two machines is as fast as the slower machine's network"
    assert (between.sum, between.exchange) == pytest.approx((2e-4, 9e-5))
    assert (cluster.server_rate, cluster.hosts[0].price) == (2e9, 12.0)
    assert cluster.server_message == pytest.approx(8e-5)


MISTAKES = [
    ("speed: 0.5", "sped: 0.5", "nodes[1]: unknown key 'sped'; did you mean 'speed'? use one of: count, devices"),
    ("count: 2", "count: 2.5", "nodes[0]: count: 2.5 is not accepted; it must be a whole number of at least 1"),
    ("gbit: 96", "gbit: -1", "nodes[0]: inside: gbit: -1 is not accepted; it must be a number above 0"),
    ("gbit: 96", "gbit: fast", "gbit: 'fast' is not accepted; it must be a number above 0"),
    ("us: 80", "us: -80", "server: us: -80 is not accepted; it must be a number of at least 0"),
    ("gbit: 96, us: 10", "us: 10", "nodes[0]: inside: gbit is missing"),
    ("memory: 16GiB", "memory: 16 apples", "memory='16 apples' is not a size above 0"),
    ("efficiency: 0.5", "efficiency: 1.5", "it must be a number above 0 and of at most 1"),
    (
        "inside: {gbit: 8, work_us: 70, sum_us: 90, exchange_us: 0},",
        "",
        "nodes[1]: `inside` is missing; give the connection between the machine's 2 devices",
    ),
    ("nodes:", "machines:", "unknown key 'machines'; use one of: nodes, server"),
    ("server: {gbyte_per_s: 2, us: 80}", "server: {", "the file is not valid YAML"),
    (
        "server: {gbyte_per_s: 2, us: 80}",
        "server: 2",
        "server: give a mapping; the possible keys are gbyte_per_s, us",
    ),
    (FILE, "server: {us: 3}", "nodes is missing"),
    (FILE, "nodes: []", "nodes: give a list of at least one machine"),
    (FILE, "", "give a mapping; the possible keys are nodes, server"),
]


def test_an_error_in_a_cluster_file_names_the_file_and_the_key(tmp_path: Path) -> None:
    for old, new, message in MISTAKES:
        assert old in FILE
        with pytest.raises(ConfigurationError) as error:
            read(FILE.replace(old, new), tmp_path)
        assert str(error.value).startswith(f"{tmp_path / 'cluster.yaml'}: ")
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigurationError, match=r"none\.yaml: No such file"):
        read_cluster(tmp_path / "none.yaml")
