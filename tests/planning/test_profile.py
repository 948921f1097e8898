"""Tests of profiles: costs for other batch sizes, and CSV files."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.costs import GraphCosts, NodeCost, Value, from_two_sizes
from cnnstrategies.planning.profile_csv import read_profile
from tests.conftest import ROOT

pytestmark = pytest.mark.light

CSV = """node,operation,forward_ms,backward_ms,activation_bytes,parameter_bytes,inputs
n1,Input,600,0,3000,0,
n2,"Conv2d(3, 64)",2,4,8000,700,n1
n3,ReLU(inplace),1,1,8000,0,n2
n4,BatchNorm2d(64),1,2,8000,40,n3
n5,Add(inplace),0.5,0.5,8000,0,n4 n3
n6,Concat,0.5,0.5,11000,0,n5 n1
"""


def costs(scale: float = 1.0, samples: int = 8) -> GraphCosts:
    return GraphCosts(
        nodes=tuple(NodeCost(f"a{index}", scale * 0.01, scale * 0.02, 400, 5000) for index in range(4)),
        values=(Value(0, (1, 3), 1000, 1000), Value(1, (2,), 500, 0), Value(2, (3,), 300, 300), Value(0, (2,), 700, 0)),
        cut_positions=(1, 3),
        microbatch_size=samples,
        input_bytes=700,
    )


def test_a_published_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "net.csv"
    file.write_text(CSV)
    profile = read_profile(file, 32)
    read = profile.costs
    assert [node.name for node in read.nodes] == ["n2", "n3", "n4", "n5", "n6"], (
        "the input node is not a part of the network"
    )
    assert read.nodes[0] == NodeCost("n2", 0.002, 0.004, 700, 8000)
    assert read.cut_positions == (2, 4), (
        "no cut between a layer and an operation that changes the layer's output in place"
    )
    assert read.sent_bytes[2] == 8000 + 3000, "the last node needs the images as well"
    assert read.sent_gradient_bytes[2] == 8000
    assert read.input_bytes == 3000
    assert (profile.batch_norm, profile.nodes_have_names, profile.fixed) == (True, False, ())
    assert profile.at(16).nodes[0] == NodeCost("n2", 0.001, 0.002, 700, 4000), "proportional to the number of samples"


def test_times_are_interpolated_linearly_from_two_batch_sizes() -> None:
    small = replace(costs(samples=4), nodes=tuple(NodeCost(f"a{i}", 0.007, 0.03, 400, 2500) for i in range(4)))
    profile = from_two_sizes(costs(), small, batch_norm=False)
    node = profile.at(16).nodes[0]
    assert node.forward == pytest.approx(0.004 + 16 * 0.00075)
    assert node.backward == pytest.approx(0.02), "if the smaller batch took longer, all of the time counts as fixed"
    assert profile.at(8) == costs()


MISTAKES = [
    ("backward_ms,", "", 1, "missing columns: backward_ms; a profile has the columns node,operation,"),
    ("2,4,8000", "2,four,8000", 3, "backward_ms: 'four' is not accepted; it must be a number of at least 0"),
    ("2,4,8000", "-2,4,8000", 3, "forward_ms: '-2' is not accepted"),
    ("n4 n3", "n4 n6", 6, "inputs: no earlier row has the node 'n6'"),
    ("n4,Batch", "n3,Batch", 5, "node 'n3' is also in line 4"),
    ('"Conv2d(3, 64)"', "Conv2d(3, 64)", 3, "the number of values differs from the number of columns"),
    (CSV, "\n".join(CSV.splitlines()[:2]), 1, "the file has no row for a node of the network"),
]


def test_an_error_in_a_profile_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "net.csv"
    for old, new, line, message in MISTAKES:
        assert old in CSV
        file.write_text(CSV.replace(old, new))
        with pytest.raises(ConfigurationError) as error:
            read_profile(file, 32)
        assert str(error.value).startswith(f"{file}, line {line}: ")
        assert message in str(error.value)


# One configuration of each network; the documentation shows all configurations.
@pytest.mark.parametrize("number", [0, 3, 4])
def test_published_profiles_lead_to_the_published_choices(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Predicted choices are PipeDream's except for one explained choice; speedups are near the measured speedups."""
    folder = ROOT / "benchmarks" / "planning"
    monkeypatch.syspath_prepend(folder)
    published = importlib.import_module("published")
    anchor = published.ANCHORS[number]
    result = published.predict(anchor, folder / "profiles")
    assert result.replicas == (anchor.ours or anchor.replicas)
    if anchor.gain is not None:
        assert result.asynchronous == pytest.approx(anchor.gain, rel=published.TOLERANCE)
