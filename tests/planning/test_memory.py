"""Tests of predicted peak memory: parts that can be worked out by hand, and the bytes of real training steps."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cnnstrategies.networks import SmallResNet, UNet
from cnnstrategies.paramserver import slicing
from cnnstrategies.pipeline import channels
from cnnstrategies.pipeline.tracing import trace_open
from cnnstrategies.planning import memory
from cnnstrategies.planning.costs import GraphCosts, NodeCost, Profile, Value
from cnnstrategies.planning.held_bytes import HeldBytes
from cnnstrategies.planning.measure import states_of, update_of
from cnnstrategies.planning.measure_bytes import bytes_of
from cnnstrategies.planning.measure_nodes import profile
from cnnstrategies.planning.memory import (
    NO_STATE,
    OptimizerMemory,
    PeakMemory,
    Update,
    largest,
    replica_peak,
    shared_slices,
)
from tests.planning.random_graphs import chain

CPU = torch.device("cpu")


@pytest.mark.light
def test_the_parts_of_a_peak_add_up() -> None:
    peak = PeakMemory(*range(1, 10))
    assert peak.total == sum(peak.parts().values()) == 45
    assert next(iter(peak.parts())) == "framework", "the largest part first"
    assert "images" not in PeakMemory(5).parts(), "parts of 0 bytes are left out"
    assert largest([PeakMemory(5), peak, PeakMemory(6)]) is peak


@pytest.mark.light
def test_a_peak_is_that_of_the_fullest_phase() -> None:
    costs = chain([0.03] * 2, sent=100, parameters=[400, 600], saved=5000, samples=2, input_bytes=70)
    # At the end of the forward the last step's gradients exist.
    assert replica_peak(costs, OptimizerMemory(1)) == PeakMemory(1000, 1000, 1000, 10000, images=70)
    light = Profile(costs).at(0.02)
    update = OptimizerMemory(2, Update(of_all=1.5))
    assert replica_peak(light, update) == PeakMemory(1000, 1000, 2000, images=1, workspaces=1500), "the update"
    # The backward of the last node, which needs much, begins with all activations and without gradients.
    last = costs.nodes[1]
    heavy = GraphCosts(
        (costs.nodes[0], NodeCost(last.name, 0.1, 0.2, 600, 5000, backward_bytes=2600)), costs.values, (1,), 2, 70, 30
    )
    assert replica_peak(heavy, OptimizerMemory(1)) == PeakMemory(
        1000, 600, 1000, 10000, images=70, outputs=30, workspaces=2000
    )
    # In the backward of the loss there are no gradients and workspaces of the network, but more tensors of the loss.
    assert replica_peak(replace(heavy, output_bytes=3000), OptimizerMemory(1)) == PeakMemory(
        1000, 0, 1000, 10000, images=70, outputs=3 * 3000
    )
    # If gradients are accumulated, they exist, and those of the node are added to them.
    assert replica_peak(heavy, OptimizerMemory(1), batches=2).gradients == 1000
    assert replica_peak(heavy, OptimizerMemory(1), batches=2).workspaces == 2600
    assert replica_peak(costs, OptimizerMemory(1), buckets=1.5).messages == 1500
    # Slices of small parameters exist in the backward, and not at the end of the forward.
    assert replica_peak(costs, OptimizerMemory(1), shared=50) == replica_peak(costs, OptimizerMemory(1))
    assert replica_peak(heavy, OptimizerMemory(1), shared=50).messages == 50


@pytest.mark.light
def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    node = NodeCost("a", 0.1, 0.2, 400, 5000, frozen_bytes=300, buffer_bytes=20)
    costs = GraphCosts((node,), (), (), 2, 70)
    assert replica_peak(costs, OptimizerMemory(2)) == PeakMemory(420, 100, 200, 5000, images=70)


@pytest.mark.light
def test_workspaces_and_gradients_of_parameters_do_not_depend_on_the_batch() -> None:
    node = NodeCost("a", 0.1, 0.2, 400, 5000, forward_bytes=5900, backward_bytes=2300, workspace_bytes=900)
    smaller = node.scaled(0.5)
    assert (smaller.forward_bytes, smaller.backward_bytes) == (900 + 2500, 400 + 900 + 500)
    assert (smaller.saved_bytes, smaller.workspace_bytes) == (2500, 900)
    copied = replace(node, copied_bytes=200).scaled(0.5)
    assert (copied.forward_bytes, copied.backward_bytes) == (900 + 200 + 2400, 400 + 900 + 200 + 400)
    assert copied.saved_bytes == 200 + 2400


@pytest.mark.light
def test_gradients_flow_past_the_nodes_of_a_branch() -> None:
    nodes = tuple(NodeCost(f"n{index}", 0.1, 0.2) for index in range(4))
    values = Value(0, (1, 3), 100, 100), Value(1, (2,), 10, 10), Value(2, (3,), 1, 1)
    costs = GraphCosts(nodes, values, (1, 2, 3), 1, 0)
    assert costs.flowing_gradient_bytes == (100, 110, 101, 0)


@pytest.mark.light
def test_the_numbers_are_those_of_the_engines() -> None:
    """The planner runs without torch, so it repeats numbers of modules that import torch."""
    assert (memory.RECEIVES_AHEAD, memory.GRADIENT_SENDS) == (channels.AHEAD, channels.MOST_GRADIENT_SENDS)
    assert (memory.SHARED_BYTES, memory.SLICES_OF_A_SERVER) == (slicing.SHARED_BYTES, slicing.SLICES_OF_A_SERVER)
    sizes = [2**18, 2**18 + 4, 100, 2**24]
    costs = GraphCosts(tuple(NodeCost("a", 0, 0, size) for size in sizes), (), (), 1, 0)
    assert shared_slices(costs, 1) == 2**18 + 100


def test_the_memory_of_an_update_is_measured() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    assert update_of(torch.optim.SGD(parameters, 0.1, momentum=0.9), CPU) == Update()
    single = update_of(torch.optim.Adam(parameters, foreach=False), CPU)
    assert single.of_all == 0
    assert single.of_largest >= 1
    together = update_of(torch.optim.Adam(parameters, foreach=True), CPU)
    assert together.of_largest == 0
    assert together.of_all >= 0.5


class Branches(nn.Module):
    """A network with a frozen layer, a branch, a change in place and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.normal, self.active, self.drop = nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Dropout(0.3)
        self.last = nn.Linear(16, 10)
        self.first.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        values = self.first(images)
        values = values + self.active(self.normal(self.second(values)))
        logits: Tensor = self.last(self.drop(values).mean((2, 3)))
        return logits


def test_bytes_do_not_depend_on_the_device_that_computes() -> None:
    """Tensors without values have the bytes of tensors with values."""
    traced, images = trace_open(Branches(), True), torch.randn(4, 3, 16, 16)

    def compare(real: GraphCosts, without_values: GraphCosts, except_for: str = "") -> None:
        assert without_values.values == real.values
        for node, other in zip(real.nodes, without_values.nodes, strict=True):
            assert node.name == except_for or vars(node) | {"forward": 0, "backward": 0} == vars(other) | {
                "forward": 0,
                "backward": 0,
            }

    with torch.autocast("cpu", torch.bfloat16):
        mixed = profile(traced, images)
    # Without values, torch's batch norm has its means and variances in bfloat16 as well.
    compare(mixed, bytes_of(traced, images[:2], 4, torch.bfloat16, CPU), except_for="normal")
    copied = {node.name: node.copied_bytes for node in mixed.nodes if node.copied_bytes}
    assert copied == {"second": 16 * 16 * 9 * 2, "last": 16 * 10 * 2}, "the frozen layer's input needs no gradient"
    assert (mixed.output_bytes, mixed.result_bytes) == (4 * 10 * 2, 4 * 10 * 4)
    real = profile(traced, images)
    compare(real, bytes_of(traced, images[:2], 4))
    assert not any(node.copied_bytes for node in real.nodes)
    by_name = {node.name: node for node in real.nodes}
    assert by_name["first"].trained_bytes == 0
    assert by_name["normal"].buffer_bytes == 2 * 16 * 4 + 8
    assert by_name["second"].backward_bytes >= by_name["second"].parameter_bytes
    assert by_name["second"].workspace_bytes == 16 * 16 * 9 * 4, "the weights in the order of oneDNN"


@pytest.mark.light
def test_bytes_of_a_batch_norm_that_reads_its_number_of_batches() -> None:
    def network(momentum: float | None) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.Flatten())

    usual, mean = (trace_open(network(momentum), True) for momentum in (0.1, None))
    images = torch.randn(2, 3, 8, 8)
    of_usual, of_mean = (bytes_of(traced, images, 4) for traced in (usual, mean))
    assert [node.saved_bytes for node in of_mean.nodes] == [node.saved_bytes for node in of_usual.nodes]
    assert mean.get_buffer("1.num_batches_tracked") == 0


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("network", "size", "make_optimizer"),
    [
        (SmallResNet(10), 32, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)),
        (UNet(4, widths=(8, 16, 32)), 32, torch.optim.Adam),
        (Branches(), 32, torch.optim.Adam),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 900, 256)), 32, torch.optim.Adam),
    ],
)
@pytest.mark.parametrize(("batches", "autocast"), [(1, None), (2, None), (1, torch.bfloat16)])
def test_predicted_peaks_are_those_of_real_steps(
    network: nn.Module, size: int, make_optimizer: MakeOptimizer, batches: int, autocast: torch.dtype | None
) -> None:
    images = torch.randn(8, 3, size, size)
    optimizer = make_optimizer([parameter for parameter in network.parameters() if parameter.requires_grad])
    costs = bytes_of(trace_open(network, True), images, 8, autocast, CPU)
    predicted = replica_peak(costs, OptimizerMemory(states_of(optimizer), update_of(optimizer, CPU)), batches)
    state = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    with torch.no_grad():
        outputs = network(images)
    targets = torch.zeros((len(outputs), *outputs.shape[2:])).long()
    with HeldBytes() as held:
        for _ in range(2):
            for batch in range(batches):
                with torch.autocast("cpu", autocast) if autocast else nullcontext():
                    loss = nn.functional.cross_entropy(network(images), targets)
                if not batch:
                    optimizer.zero_grad()
                loss.backward()
                del loss
            optimizer.step()
    assert predicted.total == pytest.approx(held.most + state + images.nbytes, rel=0.1)
    assert predicted.total > replica_peak(costs, NO_STATE, batches).total
