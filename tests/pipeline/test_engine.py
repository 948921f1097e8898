"""The pipeline trains the same model as one process on the same global batch."""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.layout import check_layout
from cnnstrategies.pipeline.stage import divide_by_names
from cnnstrategies.pipeline.timetable import in_flight

LAYOUT = (1, 2, 1)  # All others: `test_layouts.py`.
CUTS = {1: [], 2: ["2"], 3: ["2", "join"]}


class Network(nn.Module):
    """A skip over two cuts, an operation in place right after a cut, a frozen BatchNorm and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        for name, module in {
            "0": nn.Conv2d(1, 4, 3, padding=1),
            "1": nn.ReLU(inplace=True),
            "2": nn.Conv2d(4, 4, 3, padding=1),
            "3": nn.ReLU(inplace=True),
            "4": nn.Conv2d(4, 8, 3, padding=1),
            "join": nn.Conv2d(4, 4, 1),
            "norm": nn.BatchNorm2d(8),
            "head": nn.Linear(16 * 16, 5),
        }.items():
            self.add_module(name, module)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        first = self.get_submodule("1")(self.get_submodule("0")(images))
        x = self.get_submodule("2")(first)
        x = self.get_submodule("3")(x)
        x = self.join(x * self.scale)
        left, right = torch.chunk(self.norm(self.get_submodule("4")(x)), 2, dim=1)
        x = torch.cat([torch.tanh(left) + first, right], dim=1)
        return self.head(F.avg_pool2d(x, 2)[:, :, ::2].flatten(1).repeat(1, 4))


def make_network() -> Network:
    torch.manual_seed(0)
    network = Network().double()
    network.norm.running_mean.normal_()
    return network


def global_batches(steps: int, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """In float64, as the networks: in float32 what is equal here differs by chance, and from processor to processor."""
    generator = torch.Generator().manual_seed(1)
    counts = itertools.islice(itertools.cycle(sizes), steps)
    return [
        (torch.randn(n, 1, 8, 8, generator=generator).double(), torch.randint(5, (n,), generator=generator))
        for n in counts
    ]


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(parameters, lr=1e-3)


def part(pipeline: Pipeline, tensor: Tensor) -> Tensor:
    return tensor[pipeline.place.replica :: pipeline.placement.replicas[0]]


def freeze_norm(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.eval()


def train(replicas: tuple[int, ...], **options: Any) -> list[tuple[str, Tensor, Tensor]]:
    """Some steps of a pipeline and of one process: (what, got, expected)."""
    optimizer_name = options.pop("optimizer")
    sizes, accumulate = options.pop("sizes"), options.pop("accumulate")
    reduce_once = options.pop("reduce_once", False)
    network = make_network()
    alone = copy.deepcopy(network)
    pipeline = Pipeline(
        network, CUTS[len(replicas)], replicas, 6, bucket_bytes=500, activation_checkpointing="except_last", **options
    )
    optimizer = optimizer_of(optimizer_name, pipeline.module.parameters())
    reference = optimizer_of(optimizer_name, alone.parameters())
    freeze_norm(pipeline.module)
    freeze_norm(alone)
    compared = []
    for step, (images, targets) in enumerate(global_batches(max(3 * accumulate, len(sizes) + 1), sizes)):
        more = reduce_once and (step + 1) % accumulate > 0
        got = pipeline.step(part(pipeline, images), part(pipeline, targets), F.cross_entropy, more)
        loss = F.cross_entropy(alone(images), targets)
        loss.backward()
        compared.append((f"loss {step}", got, loss.detach()))
        if (step + 1) % accumulate == 0:
            for one in (optimizer, reference):
                one.step()
                one.zero_grad()
    expected = alone.state_dict()
    return compared + [(name, value, expected[name]) for name, value in pipeline.module.state_dict().items()]


def scenarios() -> dict[str, Any]:
    options: dict[str, dict[str, Any]] = {
        "accumulation, gpipe": {"optimizer": "adamw", "accumulate": 2, "schedule": "gpipe", "sizes": (12, 5)},
        "accumulation, reduced once": {"optimizer": "sgd", "accumulate": 3, "reduce_once": True, "sizes": (12, 7)},
    }
    return {name: train(LAYOUT, **option) for name, option in options.items()}


def test_steps_equal_one_process() -> None:
    names: dict[str, set[str]] = {}
    for rank, results in enumerate(run_ranks(sum(LAYOUT), scenarios)):
        for scenario, compared in results.items():
            for name, got, expected in compared:
                names.setdefault(scenario, set()).add(name)
                error = (got - expected).double().norm()
                assert error <= 1e-10 * expected.double().norm() + 1e-14, (rank, scenario, name, error)
    for scenario, seen in names.items():
        assert make_network().state_dict().keys() <= seen, scenario


def norm_network() -> nn.Module:
    torch.manual_seed(0)
    shared = nn.BatchNorm2d(4)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Conv2d(4, 4, 3),
        shared,
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 4, 3), shared),
        nn.Flatten(),
        nn.Linear(16, 5),
    ).double()


def norm_statistics(replicas: tuple[int, ...], mode: Any, recompute: Any) -> list[tuple[str, Tensor, Tensor]]:
    network = norm_network()
    alone = copy.deepcopy(network)
    pipeline = Pipeline(network, ["2"], replicas, 4, batch_norm=mode, activation_checkpointing=recompute)
    for images, targets in global_batches(3, (16, 8)):
        images = 3 * images + 20
        batch = pipeline.share(part(pipeline, images), part(pipeline, targets))
        pipeline.train(batch, F.cross_entropy)
        with torch.no_grad():
            if mode == "deferred":
                # Full-batch statistics of a layer behind another depend on how that one normalised, so only the first
                # can be compared with one full-batch pass; the others with the definition, below.
                alone[:2](images)
            else:
                for microbatch in range(4):
                    alone(images[batch.split.global_rows(microbatch)])
    expected = alone.state_dict()
    names = [name for name in pipeline.module.state_dict() if "running" in name or "tracked" in name]
    if mode == "deferred":
        names = [name for name in names if name.startswith("1.")]
    assert network.state_dict().keys() == norm_network().state_dict().keys()
    return [(name, pipeline.module.state_dict()[name], expected[name]) for name in names]


def all_norm_statistics(replicas: tuple[int, ...]) -> list[Any]:
    return [
        (mode, recompute, norm_statistics(replicas, mode, recompute))
        for mode in ("deferred", "microbatch")
        for recompute in ("never", "always")
    ]


def test_running_statistics_of_batch_norm() -> None:
    compared = set()
    for results in run_ranks(3, all_norm_statistics, (2, 1)):
        for mode, recompute, values in results:
            for name, got, expected in values:
                compared.add((mode, name))
                assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12), (mode, recompute, name, got, expected)
    assert {
        ("deferred", "1.running_var"),
        ("microbatch", "3.running_var"),
        ("microbatch", "1.num_batches_tracked"),
    } <= compared


def gathered(replicas: tuple[int, ...]) -> tuple[list[bool], list[tuple[Tensor, Tensor]]]:
    """Whether outputs of training were under way before the last backward, and outputs, evaluated ones as well."""
    network = make_network()
    alone = copy.deepcopy(network)
    pipeline = Pipeline(network, CUTS[len(replicas)], replicas, 4)
    freeze_norm(pipeline.module)
    freeze_norm(alone)
    early: list[Any] = []
    compared = []
    finish = pipeline.reducer.finish
    pipeline.reducer.finish = lambda keep: (early.append(pipeline.gathering), finish(keep))[1]  # type: ignore[method-assign]
    for images, targets in global_batches(4, (9, 4, 1)):
        batch = pipeline.share(part(pipeline, images), part(pipeline, targets))
        _, outputs = pipeline.train(batch, F.cross_entropy, gather=True)
        compared.append((pipeline.gather(batch, outputs), alone(images).detach()))
    pipeline.module.eval()
    for images, targets in global_batches(4, (9, 1, 3)):
        batch = pipeline.share(part(pipeline, images), part(pipeline, targets))
        assert torch.equal(batch.rest[0], targets)
        compared.append((pipeline.gather(batch, pipeline.evaluate(batch)), alone.eval()(images).detach()))
    return [one is not None for one in early], compared


def test_outputs_are_those_of_one_process_in_order_on_every_rank() -> None:
    """Those of training leave while the last backward runs, but for the first, whose structure is waited for."""
    for early, compared in run_ranks(3, gathered, (2, 1)):
        assert early == [False, True, True, True]
        for got, expected in compared:
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


class Meter:
    """Counts the bytes that autograd has saved and not yet freed."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> "Saved":
        return Saved(self, tensor)


class Saved:
    def __init__(self, meter: Meter, tensor: Tensor) -> None:
        self.meter = meter
        self.tensor = tensor
        meter.now += tensor.nbytes
        meter.most = max(meter.most, meter.now)

    def __del__(self) -> None:
        self.meter.now -= self.tensor.nbytes


def peak(replicas: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Most microbatches in flight, and most bytes that autograd saved at once."""
    peaks = {}
    for schedule, run_ahead, recompute in (
        ("1f1b", False, "never"),
        ("1f1b", True, "never"),
        ("gpipe", False, "never"),
        ("gpipe", False, "always"),
    ):
        layers = [nn.Sequential(nn.Conv2d(8 if i else 1, 8, 3, padding=1), nn.Tanh()) for i in range(6)]
        network = nn.Sequential(*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())).double()
        options: Any = {"schedule": schedule, "run_ahead": run_ahead, "activation_checkpointing": recompute}
        pipeline = Pipeline(network, ["1", "3"], replicas, 8, **options)
        meter, now, held = Meter(), 0, 0

        def count(span: Any) -> None:
            nonlocal now, held
            now += {"forward": 1, "backward": -1}.get(span.kind, 0)
            held = max(held, now)

        pipeline.watchers.append(count)
        images, targets = global_batches(1, (16,))[0]
        with torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda saved: saved.tensor):
            pipeline.step(part(pipeline, images), part(pipeline, targets), F.cross_entropy)
        assert meter.now == 0, "a step leaves no activations behind"
        peaks[f"{schedule} {recompute}{' ahead' * run_ahead}"] = (held, meter.most)
    return peaks


def test_peak_memory_holds_the_microbatches_in_flight_alone() -> None:
    results = run_ranks(3, peak, (1, 1, 1))
    microbatch = 2 * 8 * 64 * 8  # Bytes of one activation: 2 samples of 8 channels of 8 x 8.
    for stage, peaks in enumerate(results):
        held, saved = peaks["1f1b never"]
        assert held == min(3 - stage, 8) == in_flight((1, 1, 1), stage)
        assert peaks["1f1b never ahead"][0] == held + (stage < 2) == in_flight((1, 1, 1), stage, run_ahead=True)
        assert peaks["gpipe never"][0] == 8
        # Two layers, each of which saves its input and its output, and what the weights take.
        assert saved <= held * 4.5 * microbatch + 40_000
        assert peaks["gpipe never"][1] > 2 * saved or stage == 0
        assert peaks["gpipe always"][1] < peaks["gpipe never"][1] / 3


def test_impossible_layouts_and_cuts_are_refused() -> None:
    refused: list[tuple[Any, Any, str]] = [
        (check_layout, (1, (2, 2), 4, 3), r"replicas=\[2, 2\] need 4 devices, but there are 3"),
        (check_layout, (2, (1, 1), 4, 2), r"2 cuts make 3"),
        (check_layout, (1, (3, 1), 2, 4), r"microbatches=2 are fewer than the 3 replicas"),
        (check_layout, (1, (2, 0), 2, 2), r"every stage needs at least 1 replica"),
        (divide_by_names, (make_network(), ["nowhere"]), "no module or node 'nowhere'"),
        (divide_by_names, (make_network(), ["join", "2"]), "in the order in which the network runs"),
        (divide_by_names, (make_network(), ["head"]), "cannot be cut"),
    ]
    for check, arguments, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            check(*arguments)
