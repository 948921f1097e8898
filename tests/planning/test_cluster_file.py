"""Clusters from YAML: what the numbers become, and mistakes told by file, line and what is accepted."""

from pathlib import Path

import pytest

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.cluster import Cluster, read_cluster
from cnnstrategies.planning.costs import Link

pytestmark = pytest.mark.light

FILE = """
nodes:
  - {count: 2, devices: 4, memory: 16GiB, price: 12.0,
     inside: {gbit: 96, us: 10}, network: {gbit: 10, us: 50, efficiency: 0.5}}
  - {devices: 2, speed: 0.5, inside: {gbit: 8, work_us: 70}, network: {rates: {1KiB: 1, 1MiB: 4}}}
server: {gbyte_per_s: 2, us: 80}
"""


def read(text: str, folder: Path) -> Cluster:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return read_cluster(file)


def test_numbers_become_devices_and_links(tmp_path: Path) -> None:
    cluster = read(FILE, tmp_path)
    assert cluster.host_of == (0,) * 4 + (1,) * 4 + (2,) * 2
    assert cluster.speeds == (1.0,) * 8 + (0.5,) * 2
    assert cluster.memory == 16 * 2**30
    assert cluster.link(0, 3) == Link(12e9, 10 * 1e-6)
    assert cluster.link(0, 4) == Link(0.625e9, 50 * 1e-6), "10 Gbit/s at an efficiency of a half"
    assert cluster.link(8, 9).work == pytest.approx(7e-5)
    assert cluster.link(4, 9).bandwidth == 0.5e9, "the slower of two networks"
    assert (cluster.server_rate, cluster.hosts[0].price) == (2e9, 12.0)
    assert cluster.server_message == pytest.approx(8e-5)


def test_the_rate_is_interpolated_between_sizes(tmp_path: Path) -> None:
    link = read(FILE, tmp_path).hosts[2].network
    assert [link.rate(size) * 8 / 1e9 for size in (1, 1024, (2**20 + 1024) / 2, 2**20, 2**30)] == [1, 1, 2.5, 4, 4]


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("speed: 0.5", "sped: 0.5", 5, "unknown key 'sped'; did you mean 'speed'? accepted: count, devices"),
        ("count: 2", "count: 2.5", 3, "nodes[0].count: '2.5' is not accepted; it must be a whole number"),
        ("gbit: 96", "gbit: -1", 4, "nodes[0].inside.gbit: -1 is not possible; it must be a number above 0"),
        ("gbit: 96", "gbit: fast", 4, "'fast' is not accepted; it must be a number above 0"),
        ("gbit: 96, us: 10", "us: 10", 4, "nodes[0].inside: gbit is missing"),
        ("memory: 16GiB", "memory: 16 apples", 3, "it must be a size above 0 such as 16GiB"),
        ("efficiency: 0.5", "efficiency: 1.5", 4, "it must be a number above 0 and at most 1"),
        ("server: {", "server: {us: 9}\nserver: {", 7, "'server' is given twice"),
        (
            "server: {gbyte_per_s: 2, us: 80}",
            "all_reduce: tree",
            6,
            "'tree' is not accepted; it must be flat or two_level",
        ),
        ("inside: {gbit: 8, work_us: 70}, ", "", 5, "inside is missing, how its 2 devices are connected"),
        ("1KiB: 1, 1MiB: 4", "1MiB: 4, 1KiB: 1", 5, "sizes of messages, ascending"),
        ("nodes:", "machines:", 2, "unknown key 'machines'; accepted: nodes, all_reduce"),
        ("server: {gbyte_per_s: 2, us: 80}", "server: {", 7, "this is not YAML"),
    ],
)
def test_a_mistake_is_told_by_file_and_line(tmp_path: Path, old: str, new: str, line: int, said: str) -> None:
    assert old in FILE
    with pytest.raises(ConfigurationError) as error:
        read(FILE.replace(old, new), tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'cluster.yaml'}, line {line}: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_missing_or_empty_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.yaml: No such file"):
        read_cluster(tmp_path / "none.yaml")
    with pytest.raises(ConfigurationError, match=r"cluster\.yaml: the file is empty"):
        read("", tmp_path)
    with pytest.raises(ConfigurationError, match="line 1: nodes is missing"):
        read("all_reduce: flat", tmp_path)
