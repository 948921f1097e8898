"""The runner of planted faults: its programs, its faults, what counts as found, and one fault."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "guard"))

import data_faults  # noqa: F401  # These modules register their faults.
import hardware_faults  # noqa: F401
import rank_faults  # noqa: F401
import reduction_faults  # noqa: F401
import training_faults  # noqa: F401
import unseen_data_faults  # noqa: F401
import unseen_forward_faults  # noqa: F401
import unseen_rank_faults  # noqa: F401
import unseen_training_faults  # noqa: F401
from answers import TOOLS, Answer, is_found, is_near
from programs import FAULTS, UNSEEN, Fault, Net, flip, program


@pytest.mark.light
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_bit_of_one_element_flips(dtype: torch.dtype) -> None:
    value = torch.arange(1.0, 5.0, dtype=dtype).reshape(2, 2)
    flip(value, 0, index=2)
    assert value.tolist() == [[1, 2], [-3, 4]]
    flip(value, 8 * value.element_size() - 1)
    assert 0 < float(value[0, 0]) - 1 < 2 * torch.finfo(dtype).eps


@pytest.mark.light
def test_a_module_is_named_within_one_layer() -> None:
    module = Net()
    for named, truth, near in (
        ("net.conv2.weight", "net.conv2", True),
        ("net.norm2", "net.conv2", True),
        ("net.act2", "net.conv2", False),
        ("net", "net.conv1", True),
        ("net", "net.conv2", False),
        ("average", "net.conv1", False),
        ("", "net.conv1", False),
    ):
        assert is_near(named, truth, module) is near, named


@pytest.mark.light
def test_faults_are_sixty_with_names_of_layers_and_a_finding_counts_within_two_checks() -> None:
    assert [len(FAULTS), len(UNSEEN), len(FAULTS | UNSEEN)] == [60, 43, 103]
    for fault in (FAULTS | UNSEEN).values():
        layers = dict(fault.program(faulty=True).module.named_modules())
        assert not fault.module or fault.module in layers, fault.name
    fault = Fault("name", "text", "source", program, lambda made: None, step=4)
    assert is_found(fault, [None, Answer(True, "text", step=44, check="replicas")])
    assert not is_found(fault, [Answer(False, "equal"), Answer(True, "text", step=45, check="replicas")])
    assert is_found(fault, [Answer(True, "text"), None])


def test_a_fault_is_found_and_not_without_the_fault() -> None:
    fault = FAULTS["flipped last bit of a weight"]
    answer = TOOLS["guard"](fault.program(), 25)
    assert (answer.is_fault, answer.name, answer.rank, answer.step) == (True, "net.fc.weight", 1, 20)
    assert not TOOLS["guard"](fault.program(faulty=False), 25).is_fault
