"""Tests of measuring networks and links; measuring must not change the network."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from cnnstrategies.pipeline.graph_checks import preserved
from cnnstrategies.pipeline.tracing import trace
from cnnstrategies.planning import measure, measure_links, measure_nodes
from cnnstrategies.planning.costs import GraphCosts
from cnnstrategies.planning.measure import profile
from cnnstrategies.planning.measure_links import MEDIUM, SMALL, measure_cluster, measure_local_link, prices
from tests.runner.simulated_cuda import simulate

CPU = torch.device("cpu")


class Network(nn.Module):
    """A network with the constructs that are hard to measure.

    They are in-place operations, a skip connection, a split, dropout, BatchNorm, a parameter outside a layer, a shared
    layer, and images that the last layer reads again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Conv2d(16, 16, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(16, 1, 1))
        self.dropout = nn.Dropout(0.5)
        self.halves = nn.Conv2d(8, 8, 1)
        self.head, self.images = nn.Linear(8 * 16 * 16, 10), nn.Linear(3 * 16 * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(images)))
        skip = x
        x = self.body(x) * self.scale
        x += skip
        left, right = torch.chunk(self.dropout(x), 2, dim=1)
        x = self.halves(left) + self.halves(right)
        return self.head(x.flatten(1)) + self.images(images.flatten(1))


def profile_of(network: nn.Module, microbatch: Tensor, repeats: int = 3, **options: Any) -> GraphCosts:
    return profile(trace(network), microbatch, repeats, **options)


@pytest.fixture
def microbatch() -> Tensor:
    return torch.randn(4, 3, 16, 16)


def test_nodes_cost_time_and_bytes(microbatch: Tensor) -> None:
    network = Network()
    costs = profile_of(network, microbatch)
    nodes = {node.name: node for node in costs.nodes}
    assert all(node.forward > 0 for node in costs.nodes)
    assert nodes["body"].backward > 0
    assert costs.parameter_bytes == sum(parameter.nbytes for parameter in network.parameters()), (
        "shared parameters count once"
    )
    assert nodes["mul"].parameter_bytes == network.scale.nbytes
    assert {node.name: node.statistics_bytes for node in costs.nodes if node.statistics_bytes} == {"norm": 16 * 16}
    assert nodes["halves"].parameter_bytes > nodes["halves_1"].parameter_bytes == 0
    position = {node.name: index for index, node in enumerate(costs.nodes)}
    assert position["halves_1"] not in costs.cut_positions, "uses of the same parameters stay together"
    activation_bytes = 4 * 16 * 16 * 16 * 4
    assert costs.sent_bytes[position["norm"]] == activation_bytes + microbatch.nbytes
    assert costs.sent_bytes[position["mul"]] == 2 * activation_bytes + microbatch.nbytes, (
        "the skip connection is also sent"
    )
    assert costs.sent_gradient_bytes[position["mul"]] == 2 * activation_bytes, "images have no gradient"
    assert costs.sent_bytes[0] == costs.sent_bytes[len(costs.nodes)] == 0
    known = {tensor.untyped_storage().data_ptr() for tensor in (*network.parameters(), *network.buffers(), microbatch)}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with preserved(network), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _alive = network.train()(microbatch)
    saved = sum(node.saved_bytes for node in costs.nodes)
    assert saved == pytest.approx(sum(sizes.values()), rel=0.02), "all nodes together save what the whole network saves"


def test_profiling_changes_nothing_and_node_by_node_finds_the_same_bytes(microbatch: Tensor) -> None:
    """Nodes that are measured one at a time have the same bytes as nodes of a whole run."""
    network = Network().eval()
    network.body.train()
    network.stem.weight.grad = torch.full_like(network.stem.weight, 3.0)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    modes = [module.training for module in network.modules()]
    profiles = []
    for device in (None, CPU):
        random_state = torch.get_rng_state()
        profiles.append(profile_of(network, microbatch, repeats=1, apart_on=device))
        assert torch.equal(torch.get_rng_state(), random_state)
        assert [module.training for module in network.modules()] == modes
        assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
        left = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
        assert list(left) == ["stem.weight"]
        assert torch.equal(left["stem.weight"], torch.full_like(network.stem.weight, 3.0))
    whole, apart = (
        replace(costs, nodes=[replace(node, forward=0, backward=0) for node in costs.nodes]) for costs in profiles
    )
    assert apart == whole
    assert all(node.forward > 0 for node in profiles[1].nodes)
    assert next(node for node in profiles[1].nodes if node.name == "body").backward > 0


def test_a_network_too_large_for_its_device_is_measured_apart(
    microbatch: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that runs out of memory is measured node by node; half precision halves the bytes sent."""

    def full(*arguments: Any, apart_on: torch.device | None = None) -> GraphCosts:
        if apart_on is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return profile(*arguments, apart_on=apart_on, repeats=1)

    monkeypatch.setattr(measure, "profile", full)
    whole, half = (
        measure.measure_profile(trace(Network()), microbatch, 8, CPU, precision, False).costs
        for precision in ("32-true", "bf16-mixed")
    )
    assert half.microbatch_size == 8
    assert all(node.forward > 0 for node in half.nodes)
    assert half.sent_gradient_bytes[1] * 2 == whole.sent_gradient_bytes[1]


def peak_of(network: nn.Module, microbatch: Tensor) -> int:
    """Return the largest number of bytes that a profile holds, beyond what the network and its input need."""
    traced = trace(network)
    profile(traced, microbatch, 1)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        profile(traced, microbatch, 1)
    assert watched.profiler is not None
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(sizes))


def test_a_profile_needs_the_memory_of_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of layers does not matter, neither for activations nor for gradients of parameters."""
    monkeypatch.setattr(measure_nodes, "TOGETHER", {"cpu": 2**16})
    layers = [nn.PReLU(), *(layer for _ in range(12) for layer in (nn.Tanh(), nn.Sigmoid()))]
    images = torch.randn(4, 8, 16, 16)
    for skips in (False, True):
        network = Skipping(*layers) if skips else nn.Sequential(*layers)
        assert peak_of(network, images) < 12 * images.nbytes
    wide = nn.Sequential(*[nn.Linear(128, 128) for _ in range(12)])
    assert peak_of(wide, torch.randn(2, 128)) < 4 * 4 * 128 * 129


class Skipping(nn.Sequential):
    """Layers whose last one also uses the result of the first one."""

    def forward(self, images: Tensor) -> Tensor:
        first = values = self[0](images)
        for layer in self[1:-1]:
            values = layer(values)
        result: Tensor = self[-1](values + first)
        return result


def test_short_nodes_get_the_time_in_which_they_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement of a node takes a millisecond more than the node itself."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.0005
        return now[0]

    def takes(layer: nn.Module, seconds: float) -> nn.Module:
        layer.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + seconds))
        return layer

    monkeypatch.setattr(measure_nodes, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(measure_nodes, "UNDISTURBED", 1.0)
    layers = [takes(nn.Linear(4, 4), 0.001 * (1 + index % 3)) for index in range(30)]
    nodes = profile_of(nn.Sequential(*layers), torch.randn(2, 4)).nodes
    assert sum(node.forward for node in nodes) == pytest.approx(0.0605)
    assert nodes[2].forward > 2 * nodes[0].forward


def test_a_batch_that_would_take_too_long_is_measured_with_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    now, seen = [0.0], []

    def slow(traced: Any, images: Tensor, **options: Any) -> GraphCosts:
        seen.append(len(images))
        now[0] += len(images)
        return profile(traced, images, 1, **options)

    monkeypatch.setattr(measure, "profile", slow)
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: now[0]))
    traced, images = trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())), torch.randn(2, 3, 8, 8)
    for budget, size, expected in ((100, 16, [4, 16]), (6, 16, [4, 6]), (3, 16, [4]), (3, 2, [2]), (100, 1, [1])):
        monkeypatch.setattr(measure, "BUDGET", budget)
        seen.clear()
        result = measure.measure_profile(traced, images, size, CPU, "32-true", False)
        assert seen == expected
        assert result.costs.microbatch_size == expected[-1]
        assert len(result.at(size).nodes) == 2


def test_a_time_covers_the_devices_own_work_and_no_earlier_work() -> None:
    with simulate():
        tensor = torch.ones(2).to("cuda")
        earlier, later = (torch.empty(2, pin_memory=True) for _ in range(2))
        earlier.copy_(tensor, non_blocking=True)

        def work() -> None:
            assert torch.equal(earlier, torch.ones(2)), "the time began before the device was ready"
            later.copy_(tensor, non_blocking=True)

        measure_nodes.timed(work, tensor.device)
        assert torch.equal(later, torch.ones(2)), "the time ended before the device had finished"


def test_a_network_is_restored_after_an_error() -> None:
    network = nn.BatchNorm1d(3)

    def fail_in_the_middle() -> None:
        with preserved(network):
            network(torch.randn(4, 3))
            raise KeyError

    with pytest.raises(KeyError):
        fail_in_the_middle()
    assert torch.equal(network.running_mean, torch.zeros(3))
    assert network.num_batches_tracked == 0


def test_each_node_gets_the_time_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(measure_nodes, "time", clock)

    def takes(layer: nn.Module, forward: float, backward: float) -> nn.Module:
        def spend(seconds: float) -> None:
            now[0] += seconds

        layer.register_forward_hook(lambda *_: spend(forward))
        layer.register_full_backward_pre_hook(lambda *_: spend(backward))
        return layer

    layers = takes(nn.Conv2d(16, 16, 3, padding=1), 1.0, 2.0), takes(nn.Conv2d(16, 8, 3, padding=1), 4.0, 5.0)
    nodes = profile_of(nn.Sequential(*layers), torch.randn(4, 16, 8, 8)).nodes
    assert [node.forward for node in nodes] == pytest.approx([1.0, 4.0])
    assert [node.backward for node in nodes] == pytest.approx([2.0, 5.0])


def test_the_number_of_optimizer_states_depends_on_class_and_options() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    kinds = (
        torch.optim.SGD(parameters, 0.1),
        torch.optim.SGD(parameters, 0.1, momentum=0.9),
        torch.optim.AdamW(parameters),
        torch.optim.AdamW(parameters, amsgrad=True),
    )
    assert [measure.states_of(optimizer) for optimizer in kinds] == [0, 1, 2, 3]


def test_loopback_has_a_plausible_latency_and_bandwidth() -> None:
    link = measure_local_link(CPU, "gloo")
    assert 1e-6 < link.latency < 10.0
    assert 1e5 < link.bandwidth < 1e13
    assert 0.0 < link.sum < 10.0
    assert 0.0 < link.exchange < 10.0
    with pytest.raises(
        RuntimeError, match=r"measuring the link with backend 'carrier-pigeon' failed: .*carrier-pigeon"
    ):
        measure_local_link(CPU, "carrier-pigeon")


def test_prices_of_sums_and_exchanges_are_what_they_add_to_computations(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, delays = [0.0], iter(range(1000))

    def takes(duration: float, results: object = None) -> Callable[..., object]:
        def run(*args: object) -> object:
            seconds[0] += duration
            return results

        return run

    def delayed_sum(*args: object) -> None:
        seconds[0] += 2.0 if next(delays) % 30 else 500.0  # Other work on the machine delays few rounds.

    monkeypatch.setattr(measure_links.time, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(measure_links.dist, "all_reduce", delayed_sum)
    monkeypatch.setattr(measure_links.dist, "P2POp", lambda *args: args)
    monkeypatch.setattr(measure_links.dist, "batch_isend_irecv", takes(3.0, ()))
    for duration in (1.0, 0.01):
        monkeypatch.setattr(measure_links.torch, "conv2d", takes(duration))
        assert prices(1, CPU) == pytest.approx((2.0, 3.0))


def test_delayed_small_messages_do_not_make_the_bandwidth_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_links.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(measure_links.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(measure_links, "round_trips", lambda *_: [0.003, 0.002])
    link = measure_cluster(1, CPU).hosts[0].inside
    assert link.bandwidth == pytest.approx((MEDIUM - SMALL) / (0.01 * 0.002 / 2))
