"""Tests of the plan for divided images: counted messages against those of a real step, and step times by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from cnnstrategies.pipeline.tracing import trace_open
from cnnstrategies.planning import part_peaks
from cnnstrategies.planning.candidates import Candidate, Effect, Job
from cnnstrategies.planning.cluster import Cluster
from cnnstrategies.planning.costs import Link, Profile
from cnnstrategies.planning.devices import Device
from cnnstrategies.planning.image_parts import PartCosts
from cnnstrategies.planning.lighter import lighter_parts
from cnnstrategies.planning.measure_parts import divided_axis, part_costs, possible_parts
from cnnstrategies.planning.memory import NO_STATE, OptimizerMemory, PeakMemory, Update
from cnnstrategies.planning.part_peaks import PartedStep
from cnnstrategies.planning.rank import rank
from cnnstrategies.planning.spatial import spatial
from cnnstrategies.spatial import RowsTensor, SpatialParts, gradient_sums
from cnnstrategies.strategies.spatial import replicas
from tests.planning.random_graphs import chain
from tests.spatial.parts_in_turn import on_parts

LINK = Link(bandwidth=1e6, latency=1e-3, work=1e-4)
PARTS = PartCosts(
    parts=2,
    shares=(0.5, 0.6),
    sent_bytes=(100.0, 300.0),
    busiest_bytes=300.0,
    early_bytes=200.0,
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
    assert 0 < costs.early_bytes < costs.busiest_bytes, "pooling waits for rows, and gradients of rows are waited for"
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
    assert costs.early_bytes == costs.busiest_bytes == 2 * 16 * 3 * 4, "the inner rows are computed meanwhile"
    assert costs.window_bytes == 3 * 16 * 3 * 4, "the three rows of an image that an edge of the convolution needs"


def test_the_longest_dimension_is_divided() -> None:
    assert divided_axis(torch.empty(2, 3, 40, 41)) == 3
    assert divided_axis(torch.empty(2, 3, 41, 41)) == 2
    assert divided_axis(torch.empty(2, 1, 8, 9, 7)) == 3


def test_parts_divide_the_devices_and_a_reason_is_named_where_images_cannot_be_divided() -> None:
    traced = trace_open(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()), True)
    images = torch.randn(2, 3, 16, 16)
    alike, _ = possible_parts(traced, images, 12, torch.device("cuda"), "32-true")
    assert alike == tuple(part_costs(traced, images, parts, None) for parts in (2, 3, 4, 6))
    costs, reason = possible_parts(traced, images, 12, torch.device("cpu"), "bf16-mixed")
    assert ([row.parts for row in costs], reason) == ([2, 3, 4, 6], "")
    full, _ = possible_parts(traced, images, 2, torch.device("cpu"), "32-true")
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
    exchanging = 5 * (1e-3 + 2e-4) + 8 * (300 - 200) / 1e6
    summing = 2 * 2 * (2e-4 + 1e-3 + 2000 / 2 / 1e6)
    gradients = LINK.all_reduce_time(8000, 2)  # In one message, which begins at the end of the backward.
    assert row.step == pytest.approx(0.09 * 0.6 + 0.002 + exchanging + summing + gradients)
    assert row.sent_bytes == 8 * 400 + 2 * 4000 + 2 * 8000
    assert (str(row), row.effect) == ("spatial, parts=2", Effect.ROUNDING)
    assert candidate(job(2, 8, batch_norm=True)).effect == Effect.ROUNDING, "one group normalises the whole batch"
    assert candidate(job(4, 8, batch_norm=True)).effect == Effect.LEARNING, "each group normalises its own batch"
    priced = Cluster.connected([Device()] * 2, replace(LINK, sum=0.01, exchange=0.004))
    # The other device computes for 45 ms. Rows that take longer are waited for.
    large = candidate(replace(job(2, 8), image_parts=(replace(PARTS, busiest_bytes=20300.0, early_bytes=20000.0),)))
    assert large.step - row.step == pytest.approx(8 * (20300 - 100) / 1e6 - 0.09 * 0.5)
    waiting = candidate(replace(job(2, 8), cluster=priced))
    # Two sums of statistics and one of gradients, which take two messages of 1.2 ms without a price.
    assert waiting.step - row.step == pytest.approx(5 * (0.004 - 0.0012) + 3 * (0.01 - 2 * 0.0012))
    copying, bare = (
        candidate(replace(job(2, 8), image_parts=(replace(PARTS, gradient_bytes=0, window_bytes=size),)))
        for size in (700.0, 0.0)
    )
    assert [a.total - b.total for a, b in zip(copying.peaks, bare.peaks, strict=True)] == [8 * 700] * 2


@pytest.mark.parametrize(("bandwidth", "left"), [(4e9, 1), (1e9, 2)])
def test_gradients_are_summed_while_the_backward_goes_on(bandwidth: float, left: int) -> None:
    """The second node's gradients are ready when two thirds of the backward, which takes 36 ms, are over."""
    link, size = Link(bandwidth, 0.0), 16 << 20
    costs = chain([0.03, 0.06], parameters=[size, size], samples=8)
    cluster = Cluster.connected([Device()] * 2, link)
    parts = replace(
        PARTS, gradient_bytes=2 * size, exchanges=0, busiest_bytes=0.0, early_bytes=0.0, sums=0, seconds=0.0
    )
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


def test_plans_know_how_many_bytes_of_gradients_are_summed_together() -> None:
    assert part_peaks.MESSAGE_BYTES == gradient_sums.MESSAGE_BYTES
    assert part_peaks.AVERAGED_BYTES == replicas.BUCKET


def peak(step: PartedStep, **costs: int) -> PeakMemory:
    """Return the first device's peak. It has half of the activations, and all of 1,000 bytes of parameters."""
    graph = chain([0.03] * 2, sent=100, parameters=[400, 600], saved=5000, samples=2, input_bytes=70)
    graph = replace(graph, output_bytes=costs.pop("output", 0))
    first, second = part_peaks.part_peaks(Profile(graph), replace(PARTS, **{"gradient_bytes": 1000} | costs), step)
    assert second.activations == 1.2 * first.activations
    return first


def test_a_peak_with_parts_is_that_of_the_fullest_phase() -> None:
    usual = PartedStep(2, OptimizerMemory(1))
    # At the end of the forward, with the gradients of the last step. PARTS has a copy of 700 bytes for each sample.
    assert peak(usual) == PeakMemory(1000, 1000, 1000, 5000, 1400, images=35)
    assert peak(usual, output=3000) == PeakMemory(1000, 1000, 1000, 5000, 1400, images=35, outputs=2 * 1500)
    # In the backward of the loss there are no gradients and no copies of rows, but more tensors of the loss.
    assert peak(usual, output=20000) == PeakMemory(1000, 0, 1000, 5000, images=35, outputs=3 * 10000)
    # The sums of a backward exist beside the gradients of earlier batches.
    light = replace(usual, samples=0)
    assert peak(replace(light, batches=2), gradient_bytes=0).gradients == 2000
    # Gradients are joined for a message, and averaged over groups.
    assert peak(light) == PeakMemory(1000, 1000, 1000, messages=1000)
    assert peak(light, gradient_bytes=600).messages == 600
    assert peak(replace(light, groups=2), gradient_bytes=0).messages == 1000
    # The first device of a group gets the whole batch, and copies all rows.
    many = replace(usual, samples=20, holds_batch=True)
    big = replace(chain([0.03], sent=1, parameters=[400], saved=1, samples=2), input_bytes=10**6)
    first, second = part_peaks.part_peaks(Profile(big), PARTS, many)
    assert (first.images, second.images) == (2 * 10**7, 6 * 10**6)
    update = replace(light, state=OptimizerMemory(2, Update(of_all=1.5)))
    assert peak(update, gradient_bytes=0).workspaces == 1500


def test_large_gradients_are_joined_during_the_backward() -> None:
    size = 6 << 20
    graph = chain([0.03] * 4, parameters=[size] * 4, saved=50 * size, samples=2)
    graph = replace(graph, nodes=tuple(replace(node, backward_bytes=5 * size) for node in graph.nodes))
    parts = replace(PARTS, gradient_bytes=4 * size, window_bytes=0.0)
    first, _ = part_peaks.part_peaks(Profile(graph), parts, PartedStep(2, NO_STATE))
    assert first.messages == 8 << 20


def test_lighter_plans_with_parts_have_as_many_samples_in_a_step() -> None:
    costs = chain([0.03] * 4, sent=10, parameters=[10] * 4, saved=4000, samples=8, input_bytes=80)
    plans = list(lighter_parts(Profile(costs), PARTS, PartedStep(2, NO_STATE, groups=2)))
    more, small = "strategy.init_args.parts=4 --trainer.accumulate_grad_batches=2", "with a group's batch of 1 samples"
    names = [plan.settings for plan in plans]
    assert names[0] == "--trainer.callbacks+=ActivationCheckpointing"
    assert [more in name for name in names] == [False, True, True, False, False]
    assert [small in name for name in names] == [False, False, False, True, True]
    before = part_peaks.part_peaks(Profile(costs), PARTS, PartedStep(2, NO_STATE, groups=2))
    assert [len(plan.peaks) for plan in plans] == [2, 4, 4, 2, 2]
    for plan in plans:
        assert max(peak.activations for peak in plan.peaks) <= 0.5 * max(peak.activations for peak in before)
    assert not list(lighter_parts(Profile(costs), PARTS, PartedStep(1, NO_STATE, recomputes=True)))
