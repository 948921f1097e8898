"""Tests of the plan for divided images: counted messages against those of a real step, and step times by hand."""

from dataclasses import replace

import pytest
import torch
from planning.random_graphs import chain
from spatial.parts_in_turn import on_parts
from torch import nn

from cnnstrategies import planning
from cnnstrategies.pipeline.tracing import trace_open
from cnnstrategies.planning.candidates import Candidate, Effect, Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import Link, Profile
from cnnstrategies.planning.devices import Device
from cnnstrategies.planning.image_parts import PartCosts
from cnnstrategies.planning.measure_parts import divided_axis, part_costs, possible_parts
from cnnstrategies.planning.rank import rank
from cnnstrategies.planning.spatial import spatial
from cnnstrategies.spatial import RowsTensor, SpatialParts, gradient_sums

LINK = Link(bandwidth=1e6, latency=1e-3, work=1e-4)
PARTS = PartCosts(
    parts=2,
    shares=(0.5, 0.6),
    sent_bytes=(100.0, 300.0),
    busiest_bytes=300.0,
    exchanges=5,
    summed_bytes=4000,
    sums=2,
    gradient_bytes=8000,
    window_bytes=700.0,
    seconds=0.002,
)


class Network(nn.Module):
    """Convolutions with and without overlap, batch norm, a skip, and an operation that needs all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.wide, self.point = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.stem(images)
        features = features + self.point(torch.relu(self.wide(features)))
        return features.cumsum(2)


@pytest.mark.parametrize("parts", [2, 3])
def test_counted_messages_and_memory_are_those_of_a_step(parts: int) -> None:
    network, images = Network(), torch.randn(4, 3, 41, 37)
    costs = part_costs(trace_open(network, True), images, parts, None, rule=1.0)

    def step(rules: SpatialParts) -> tuple[int, int]:
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            rows = tensor.rows if isinstance(tensor, RowsTensor) else tensor
            kept[rows.untyped_storage().data_ptr()] = rows
            return tensor

        divided = rules.scatter(images, 2)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = network(divided)
        result.backward(torch.ones_like(result))
        state = {tensor.data_ptr() for tensor in (*network.parameters(), *network.buffers())}
        return rules.sent_bytes, sum(
            rows.untyped_storage().nbytes() for address, rows in kept.items() if address not in state
        )

    results = on_parts(parts, step)
    assert costs.sent_bytes == tuple(sent / len(images) for sent, _ in results)
    total = sum(kept for _, kept in results)
    assert sum(costs.shares) == pytest.approx(1, abs=0.15), "each rank keeps its own rows"
    for share, (_, kept) in zip(costs.shares, results, strict=True):
        assert share / sum(costs.shares) == pytest.approx(kept / total, abs=0.03)
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert costs.gradient_bytes == sum(value.nbytes for module in convolutions for value in module.parameters())
    assert costs.sums == 2, "batch norm sums in the forward and in the backward"
    assert len(costs.gathers) == 1
    assert costs.gathers[0].startswith("cumsum at ")
    assert costs.seconds > 10, "each divided operation takes the time of a rule"


def test_exchanges_without_rows_cost_nothing() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1, 2))
    costs = part_costs(trace_open(network, True), torch.zeros(1, 3, 16, 16), 2, None)
    assert costs.exchanges == 2, "the first convolution's rows in the forward and in the backward"


def test_the_longest_dimension_is_divided() -> None:
    assert divided_axis(torch.empty(2, 3, 40, 41)) == 3
    assert divided_axis(torch.empty(2, 3, 41, 41)) == 2
    assert divided_axis(torch.empty(2, 1, 8, 9, 7)) == 3


def test_parts_divide_the_devices_and_a_reason_is_named_where_images_cannot_be_divided() -> None:
    traced = trace_open(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), True)
    costs, reason = possible_parts(traced, torch.randn(2, 3, 16, 16), 12, torch.device("cpu"), "bf16-mixed")
    assert ([row.parts for row in costs], reason) == ([2, 3, 4, 6], "")
    full, _ = possible_parts(traced, torch.randn(2, 3, 16, 16), 2, torch.device("cpu"), "32-true")
    assert full[0].sent_bytes == tuple(2 * size for size in costs[0].sent_bytes), "bf16 has half as many bytes"
    linear = trace_open(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), True)
    assert possible_parts(linear, torch.randn(2, 4), 2, torch.device("cpu"), "32-true") == (
        (),
        "the inputs of the network are not images",
    )


def job(devices: int, samples: int, batch_norm: bool = False) -> Job:
    costs = chain([0.03, 0.06], sent=4000, parameters=[2000, 6000], saved=5000, samples=8, input_bytes=700)
    cluster = Cluster.connected([Device()] * devices, LINK)
    return Job(Profile(costs, batch_norm=batch_norm), cluster, samples, image_parts=(PARTS,))


def candidate(job: Job) -> Candidate:
    (row,) = spatial(job)
    return row


def test_a_step_computes_exchanges_rows_and_sums() -> None:
    row = candidate(job(2, 8))
    exchanging = 5 * (1e-3 + 2e-4) + 8 * 300 / 1e6
    summing = 2 * 2 * (2e-4 + 1e-3 + 2000 / 2 / 1e6)
    gradients = LINK.all_reduce_time(8000, 2)  # In one message, which begins at the end of the backward.
    assert row.step == pytest.approx(0.09 * 0.6 + 0.002 + exchanging + summing + gradients)
    assert row.sent_bytes == 8 * 400 + 2 * 4000 + 2 * 8000
    assert (str(row), row.effect) == ("spatial, parts=2", Effect.ROUNDING)
    assert candidate(job(2, 8, batch_norm=True)).effect == Effect.ROUNDING, "one group normalises the whole batch"
    assert candidate(job(4, 8, batch_norm=True)).effect == Effect.LEARNING, "each group normalises its own batch"
    priced = Cluster.connected([Device()] * 2, replace(LINK, sum=0.01, exchange=0.004))
    waiting = candidate(replace(job(2, 8), cluster=priced))
    # Two sums of statistics and one of gradients, which take two messages of 1.2 ms without a price.
    assert waiting.step - row.step == pytest.approx(5 * (0.004 - 0.0012) + 3 * (0.01 - 2 * 0.0012))
    small = replace(PARTS, window_bytes=0.0)
    bare = candidate(replace(job(2, 8), image_parts=(small,)))
    assert [a.total - b.total for a, b in zip(row.peaks, bare.peaks, strict=True)] == [8 * 700] * 2


@pytest.mark.parametrize(("bandwidth", "left"), [(4e9, 1), (1e9, 2)])
def test_gradients_are_summed_while_the_backward_goes_on(bandwidth: float, left: int) -> None:
    """The second node's gradients are ready when two thirds of the backward, which takes 36 ms, are over."""
    link, size = Link(bandwidth, 0.0), 16 << 20
    costs = chain([0.03, 0.06], parameters=[size, size], samples=8)
    cluster = Cluster.connected([Device()] * 2, link)
    parts = replace(PARTS, gradient_bytes=2 * size, exchanges=0, busiest_bytes=0.0, sums=0, seconds=0.0)
    row = candidate(Job(Profile(costs), cluster, 8, image_parts=(parts,)))
    message = link.all_reduce_time(size, 2)
    hidden = 0.012 if left == 2 else 0.0
    assert row.step == pytest.approx(0.09 * 0.6 + left * message - hidden)


def test_groups_of_parts_are_replicas() -> None:
    row, single = candidate(job(4, 8)), candidate(job(2, 4))
    assert row.step - single.step == pytest.approx(LINK.all_reduce_time(8000, 2))
    assert row.sent_bytes == 2 * single.sent_bytes + 2 * 1 * 2 * 8000
    assert not list(spatial(job(3, 8))), "three devices are not groups of two"
    assert not list(spatial(job(4, 1))), "each group needs an image"


def test_a_plan_names_divided_images_where_a_batch_has_fewer_images_than_devices() -> None:
    ranking = rank(job(4, 2))
    assert "spatial, parts=2" in [str(row) for row in (*ranking.same, *ranking.changing)]
    notes = rank(replace(job(4, 8), image_parts=(), whole_images="an operation")).notes
    assert any(note.startswith("spatial: not predicted") and note.endswith("an operation") for note in notes)


def test_plans_know_how_many_bytes_of_gradients_the_engine_sums_together() -> None:
    assert planning.spatial.MESSAGE_BYTES == gradient_sums.MESSAGE_BYTES
