"""Training with divided images gives what one process gives, and groups of devices give what DDP gives."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.commands.scaling.recorder import TimelineRecorder
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.placed.messages import DivergedError
from cnnstrategies.planning.scaling.timeline import BATCH, ROWS, SUMS
from cnnstrategies.recording.clock import PartClock
from cnnstrategies.runtime.waiting import unwatch, watch
from cnnstrategies.spatial import RowsTensor, SpatialParts
from cnnstrategies.strategies import SpatialStrategy
from cnnstrategies.strategies.spatial.checks import check_division
from cnnstrategies.strategies.spatial.descriptions import describe_costs, describe_groups, describe_parts, describe_rows
from cnnstrategies.strategies.spatial.groups import ImageGroups, print_divergence
from cnnstrategies.strategies.spatial.loading import GroupLoader
from cnnstrategies.strategies.spatial.parted_batches import part_batch
from cnnstrategies.strategies.spatial.same_weights import SameWeights
from tests.conftest import quiet_trainer
from tests.runner import panels
from tests.runner.ranks import run_apart, run_ranks
from tests.spatial.parts_in_turn import on_parts
from tests.strategies.spatial_programs import (
    CLASSES,
    PROGRAMS,
    OwnModule,
    Slow,
    Spiked,
    images_with,
    peaks,
    train_all,
    train_from,
    train_in,
    train_with_hook,
    train_with_signal,
    train_with_sleep,
)
from tests.strategies.whole_step_cases import CASES, Case
from tests.strategies.whole_step_cases.running import on_one_device, on_ranks, verdict

TIMEOUT = 60.0
ALL = tuple(PROGRAMS)


def auto() -> str:
    return "auto"


def ddp() -> str:
    return "ddp"


def two_parts() -> SpatialStrategy:
    return SpatialStrategy(timeout=TIMEOUT)


def check(actual: dict[str, Tensor], expected: dict[str, Tensor], rank: int, text: str) -> None:
    """Check all values of a rank. Only the first rank of a group has predictions, and only the first rank has logs."""
    expected = {name: value for name, value in expected.items() if not (rank and name.startswith("written"))}
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if name.startswith("predicted") and rank % 2:
            assert len(actual[name]) == 0
            continue
        scale = max(1.0, float(value.double().abs().max()))
        torch.testing.assert_close(actual[name], value, rtol=1e-12, atol=1e-12 * scale, msg=f"{text}, {name}")


def train_all_and_with_faults() -> tuple[dict[str, dict[str, Tensor]], list[str], Any, tuple[int, bool], Any]:
    """Run all programs in two parts, and runs with a hook on one rank and on both, a sleep, and a stop on rank 1.

    The last runs count the memory in two precisions.
    """
    results = train_all(two_parts, 2, ALL)
    lines = [train_with_hook(two_parts, 2, *hooked) for hooked in ((1,), (0, 1))]
    slow, stopped = train_with_sleep(two_parts, 2, 1), train_with_signal(two_parts, 2, 1)
    return results, lines, slow, stopped, [peaks(two_parts, 2, precision) for precision in ("32-true", "bf16-mixed")]


def test_two_parts_train_as_one_process() -> None:
    reports = run_ranks(2, train_all_and_with_faults)
    expected = run_apart(train_all, auto, 1, ALL)
    line = (
        r"spatial: after 1 batch, the ranks that .* have different weights network.bias \(norms from .* to .*\): "
        r"register hooks, .* on all of these ranks alike\n"
    )
    for rank, (report, (on_one, on_both), (times, compared), stopped, memory) in enumerate(reports):
        for (predicted, *_), (_, counted, lines) in zip(reports[0][4], memory, strict=True):
            assert predicted[rank].total == pytest.approx(counted, rel=0.02)
            assert lines == [] if rank else [panels.line_on_memory(predicted[0].total, 1.3 * counted)]
        (in_full, *_), (in_half, *_) = reports[0][4]
        assert in_half[rank].activations < 0.6 * in_full[rank].activations
        assert compared == [True, True, False], "only the first steps are compared"
        # Rank 0 waits for rows of rank 1, which sleeps in its forward. The times are means over both ranks.
        assert times["rows"] > 1000 * Slow.SECONDS / 4
        assert times["forward"] > 1000 * Slow.SECONDS / 2
        assert times["step"] == pytest.approx(sum(value for part, value in times.items() if part != "step"), rel=1e-3)
        assert min(times["share"], times["sums"]) > 0
        assert stopped == reports[0][3], "both ranks stop after the same step"
        assert stopped[1]
        assert stopped[0] >= 2
        assert on_both == ""
        assert re.fullmatch("" if rank else line, on_one), on_one
        for name in ALL:
            check(report[name], expected[name], rank, name)


def train_in_groups(names: tuple[str, ...]) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    """Run programs in two groups, and a run in which the second group sleeps."""
    times, _ = train_with_sleep(two_parts, 4, 2, 3)
    return train_all(two_parts, 4, names), times


def test_groups_train_as_ddp() -> None:
    names = "own classifier", "classifier"
    reports = run_ranks(4, train_in_groups, names)
    expected = run_ranks(2, train_all, ddp, 2, names)
    for rank, (report, times) in enumerate(reports):
        assert times["communication"] > 1000 * Slow.SECONDS / 4, "the first group waits for the second one"
        for name in names:
            check(report[name], expected[rank // 2][name], rank, name)


def for_case(case: Case, _: Any) -> SpatialStrategy:
    return two_parts()


@pytest.mark.parametrize(
    "names",
    [
        ("asks_the_strategy", "gradient_surgery", "declared_skip"),
        pytest.param(
            (
                *("gathered_contrast", "noise_in_hooks", "wasserstein_penalty", "small_unet", "grad_cam", "lbfgs"),
                *("averaged_weights", "best_checkpoint", "predictions", "unpacked_batch", "two_optimizers"),
            ),
            marks=pytest.mark.cluster,
        ),
    ],
)
def test_programs_of_several_kinds_train_as_on_one_device(names: tuple[str, ...]) -> None:
    cases = [replace(CASES[name], epochs=1, samples=20) for name in names]
    verdicts = map(verdict, on_one_device(cases), on_ranks(cases, for_case, [2]))
    assert dict(zip(names, verdicts, strict=True)) == dict.fromkeys(names, "equal")


@pytest.mark.cluster
def test_checkpoints_are_resumed_on_one_device_and_in_two_parts(tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("one", "parts", "one then parts", "parts then one", "all")}
    run_apart(train_from, auto, 1, 1, None, files["one"])
    run_ranks(2, train_from, two_parts, 2, 1, None, files["parts"])
    run_ranks(2, train_from, two_parts, 2, 2, files["one"], files["one then parts"])
    run_apart(train_from, auto, 1, 2, files["parts"], files["parts then one"])
    run_apart(train_from, auto, 1, 2, None, files["all"])
    expected = torch.load(files["all"], weights_only=True)
    for name in ("one then parts", "parts then one"):
        resumed = torch.load(files[name], weights_only=True)
        torch.testing.assert_close(resumed["state_dict"], expected["state_dict"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(resumed["optimizer_states"], expected["optimizer_states"], rtol=1e-12, atol=1e-12)


@pytest.mark.cluster
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_is_as_exact_as_on_one_device(precision: str) -> None:
    exact, _ = run_apart(train_in, auto, 1, "32-true")
    mixed, scale = run_apart(train_in, auto, 1, precision)
    error = (mixed - exact).norm()
    assert error > 1e-5
    for weights, own_scale in run_ranks(2, train_in, two_parts, 2, precision):
        assert (weights - exact).norm() < 2 * error
        assert own_scale == scale


@pytest.mark.cluster
@pytest.mark.parametrize(("ranks", "others", "strategy"), [(2, 1, auto), (4, 2, ddp)], ids=["parts", "groups"])
def test_an_infinite_gradient_of_one_rank_skips_the_step_on_all_ranks(ranks: int, others: int, strategy: Any) -> None:
    """The gradient is infinite in the last row of the last group's images."""
    mixed, _ = run_apart(train_in, auto, 1, "16-mixed")
    exact, _ = run_apart(train_in, auto, 1, "32-true")
    reports = run_ranks(ranks, train_in, two_parts, ranks, "16-mixed", Spiked)
    expected = (
        run_ranks(others, train_in, strategy, others, "16-mixed", Spiked)
        if others > 1
        else [run_apart(train_in, strategy, 1, "16-mixed", Spiked)]
    )
    for weights, scale in reports:
        assert scale == expected[0][1]
        assert torch.equal(weights, reports[0][0])
        assert (weights - expected[0][0]).norm() < 2 * (mixed - exact).norm()
    # One of the steps was skipped, and halved the scale.
    assert expected[0][1] == 1024 * 8 / 2 * (8 if others == 1 else 1)


def compiled_modules() -> Iterator[tuple[LightningModule, str]]:
    """Yield modules of which a part is compiled, with the part's name."""
    for name in ("network.0", "network", "network.forward", "training_step"):
        module = OwnModule(nn.Sequential(nn.Conv2d(3, 3, 3)))
        if name == "network.0":
            module.network[0].compile()
        elif name == "network":
            module.network = torch.compile(module.network)
        elif name == "network.forward":
            module.network.forward = torch.compile(module.network.forward)
        else:
            module.training_step = torch.compile(module.training_step)
            name = "OwnModule.training_step"
        yield module, name


@pytest.mark.light
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"parts": 0}, "parts=0: an image has at least one part; use 2 or more to divide images"),
        ({"axis": 2}, "axis=2: count dimensions of images from the last one: -1 is the width, -2 the height"),
        ({"static_graph": True}, r"SpatialStrategy\(static_graph=...\): the strategy has no such option"),
    ],
)
def test_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        SpatialStrategy(**options)


def test_what_cannot_be_divided_is_refused_before_processes_start() -> None:
    strategy = SpatialStrategy(start_method="fork")
    trainer = quiet_trainer(strategy, 3)
    with pytest.raises(ConfigurationError, match=r"parts=2: 3 devices cannot .* trainer.devices to a multiple .* 4"):
        trainer.fit(OwnModule(nn.Identity()))
    alone = quiet_trainer(SpatialStrategy(start_method="fork"), 1)
    assert alone.distributed_sampler_kwargs["num_replicas"] == 1, "data modules read it before the check"
    with pytest.raises(ConfigurationError, match=r"parts=2: 1 device cannot .* such as 2, or choose"):
        alone.fit(OwnModule(nn.Identity()))
    with pytest.raises(ConfigurationError, match=r"sync_batchnorm=True: .* set trainer.sync_batchnorm to false"):
        quiet_trainer(SpatialStrategy(start_method="fork"), 2, sync_batchnorm=True).fit(OwnModule(nn.Identity()))
    for module, name in compiled_modules():
        with pytest.raises(ConfigurationError, match=rf"^{name} is compiled: .* leave torch.compile out, or use ddp"):
            strategy.check_job(module, 4)
        strategy.connect(module)
        with pytest.raises(ConfigurationError, match=rf"^{name} is compiled: "):
            strategy.on_train_start()  # A hook may have compiled it after the set-up.
    classifier = ImageClassifier(nn.Identity(), CLASSES, compile_backend="inductor")
    with pytest.raises(ConfigurationError, match="compile_backend='inductor' of ImageClassifier"):
        strategy.check_job(classifier, 4)
    with pytest.raises(ConfigurationError, match=r"network is a SyncBatchNorm layer, .*: use BatchNorm"):
        strategy.check_job(OwnModule(nn.SyncBatchNorm(3)), 4)
    lazy = OwnModule(nn.LazyConv2d(3, 3))
    with pytest.raises(ConfigurationError, match=r"network.weight gets its shape in the first forward"):
        strategy.check_job(lazy, 4)
    loader = DataLoader(images_with(False), 2, sampler=DistributedSampler(images_with(False), 4, 0))
    with pytest.raises(ConfigurationError, match=r"DistributedSampler has num_replicas=4: .* among 2 ranks only"):
        check_division(loader, 2, 2, lambda row: [row, row])
    with pytest.raises(ConfigurationError, match=r"different data sets or samplers: .* among 1 rank only"):
        check_division(DataLoader(images_with(False)), 1, 2, lambda row: [row, [number + 1 for number in row]])


@pytest.mark.light
@pytest.mark.parametrize(
    ("axis", "chosen", "divided"),
    [(None, -1, [0, 1, 3]), (-2, -2, [0, 1, 3]), (-3, -3, [])],
)
def test_images_and_targets_of_pixels_are_divided(axis: int | None, chosen: int, divided: list[int]) -> None:
    tensors = [
        torch.zeros(2, 3, 4, 5),
        torch.zeros(2, 4, 5, dtype=torch.long),
        torch.zeros(2, 5),
        torch.zeros(2, 1, 4, 5),
    ]
    if not divided:
        with pytest.raises(ConfigurationError, match=r"axis=-3: images of shape \(2, 3, 4, 5\) do not have a depth"):
            part_batch(tensors, axis)
        return
    parted, wholes = part_batch({"batch": tensors, "names": ["a", "b"]}, axis)
    assert parted.axis == chosen
    assert [next(index for index, tensor in enumerate(tensors) if tensor is whole) for whole in wholes] == divided
    with pytest.raises(ConfigurationError, match=r"batch\[0\]: a tensor that requires a gradient .* cannot be sent"):
        part_batch([torch.zeros(2, 3, 4, 5, requires_grad=True)], axis)


@pytest.mark.light
def test_the_panel_names_rows_and_who_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[int, int | None, tuple[int, ...] | None]] = [
        (2, None, (3, 1024, 1024)), (3, -1, (3, 8, 41)), (2, None, (1, 64, 128, 64)), (4, None, (1, 7, 5)),
        (2, -3, None), (2, None, None),
    ]  # fmt: skip
    assert [describe_parts(*case) for case in cases] == [
        "2, of the height (the longest dimension): 512 of 1,024 rows each",
        "3, of the width: 13 or 14 of 41 rows each",
        "2, of the height (the longest dimension): 64 of 128 rows each",
        "4, of the height (the longest dimension): with only 7 rows, each device has whole images; use at least 8 rows",
        "2, of the depth",
        "2, of the longest dimension of each batch",
    ]
    with pytest.raises(ConfigurationError, match=r"axis=-3: images of shape \(1, 3, 4, 5\) do not have a depth"):
        describe_parts(2, -3, (3, 4, 5))
    assert describe_groups(2, 1) == "1, with 2 devices; rank 0 loads the batches, and sends each device its rows"
    trainer = SimpleNamespace(datamodule=DigitsDataModule())
    monkeypatch.setattr(SpatialStrategy, "_module", SimpleNamespace(trainer=trainer))
    strategy = SpatialStrategy(axis=-1)
    strategy.parallel_devices = [torch.device("cpu")] * 6
    assert strategy.panel_rows(None) == [
        ("image parts", "2, of the width: 4 of 8 rows each"),
        ("device groups", describe_groups(2, 3)),
    ]
    assert describe_groups(2, 3) == "3, with 2 devices each; the first device of each group loads the group's batches"


@pytest.mark.light
def test_the_line_about_the_first_step_names_operations_that_needed_all_rows() -> None:
    def main(parts: SpatialParts) -> str:
        images = parts.scatter(torch.ones(1, 1, 4, 250_000), -2)
        before = parts.sent_bytes
        parts.gathers.clear()
        images.sort(-2)
        embedding = nn.Parameter(torch.ones(1, 1, 4, 1))
        (images * embedding).sum().backward()
        parts.plain_gradients([("embedding", embedding)])
        assert type(embedding.grad) is Tensor
        return describe_costs(parts, before, describe_rows({"images": [torch.ones(1), images]}))

    for text in on_parts(2, main):
        assert re.fullmatch(
            r"spatial: in the first step, this rank has had 2 of 4 rows \(height\), has sent 2.0 MB of rows to other "
            r"ranks, and has received all rows for sort at .*test_spatial.py:\d+ \(2.0 MB\), the gradient of embedding "
            r"\(0.0 MB\)",
            text,
        ), text


@pytest.mark.light
@pytest.mark.parametrize(("precision", "size"), [(None, 4), (torch.float16, 2)])
def test_the_bytes_of_a_step_are_those_of_the_rows_at_the_edges(precision: torch.dtype | None, size: int) -> None:
    def main(parts: SpatialParts) -> int:
        layers = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 5, padding=2)
        images = parts.scatter(torch.ones(2, 3, 16, 10), -2)
        with torch.autocast("cpu", precision, enabled=precision is not None):
            loss = layers[1](layers[0](images)).float().mean()
        before = parts.sent_bytes
        loss.backward()  # type: ignore[no-untyped-call]
        assert (before, parts.sent_bytes - before) == (forward, backward), parts.rank
        return parts.sent_bytes

    row = 2 * 10 * size  # Bytes of a row of a channel.
    forward = (3 + 2 * 8) * row
    backward = (3 + 2 * 8 + 2 * 8) * row  # The rows again, and the gradients of the rows between the layers.
    assert on_parts(2, main) == [forward + backward] * 2


@pytest.mark.light
def test_a_value_that_only_one_rank_reads_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def main(parts: SpatialParts) -> None:
        parts.note_loss = lambda text: print_divergence(f"{text}; Timed out")
        images = parts.scatter(torch.ones(1, 1, 4, 5), -2)
        if parts.rank == 0:
            images.max()

    with pytest.raises(DivergedError, match=r"^rank 0 waits in max at .*test_spatial.py:\d+ .* must run this line"):
        on_parts(2, main)
    assert re.match(r"rank 0 waits in max at .*; Timed out\n$", capsys.readouterr().err)
    print_divergence("rank 0 waits in max at train.py:3 for other ranks: Connection closed by peer")
    assert capsys.readouterr().err == "", "the rank that has ended shows the cause"


@pytest.mark.light
def test_ranks_that_sum_in_different_operations_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the comparison, the ranks would add sums of images to sums of squares."""

    def main(parts: SpatialParts, second: Any) -> Any:
        parts.note_loss = print_divergence
        images = parts.scatter(torch.full((1, 1, 4, 5), 2.0), -2)
        parts.checks_order = True
        images.sum()
        operation = second if parts.rank else images.sum
        try:
            return operation(images) if parts.rank else operation()
        except DivergedError as error:
            return str(error)

    for second, name in (
        (torch.mean, "mean"),
        (torch.prod, "prod"),
        (lambda images: F.avg_pool2d(images, 3, 1, 1), "avg_pool2d"),
    ):
        reports = on_parts(2, lambda parts, second=second: main(parts, second))
        for rank, (text, operation) in enumerate(zip(reports, ("sum", name), strict=True)):
            line = (
                rf"rank {rank} is in {operation} at test_spatial.py:\d+, but another rank is in another operation: all"
            )
            assert re.match(line, text), text
        assert len(capsys.readouterr().err.splitlines()) == 2, "each rank prints its line"


@pytest.mark.light
def test_weights_are_compared_every_100_steps_and_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    def main(parts: SpatialParts) -> None:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        groups: Any = SimpleNamespace(parts=parts, part=parts.rank, device="cpu")
        comparison = SameWeights(module, groups)
        for step in range(250):
            if step == 50 and parts.rank == 1:
                nn.init.constant_(module[1].weight, 1.001)
            comparison.before_step()

    on_parts(2, main)
    assert re.fullmatch(r"spatial: after 101 batches, .* different weights 1.weight .*\n", capsys.readouterr().err)


class Record(NamedTuple):
    """A batch of a user's own class."""

    images: Tensor
    masks: Tensor
    names: list[str]


class Stream(IterableDataset[Any]):
    """Batches of several sizes, with random numbers that the loader draws in this process."""

    def __init__(self, part: int = 0) -> None:
        self.part = part

    def __iter__(self) -> Iterator[Record]:
        for height, width in ((5, 9), (8, 3), (1, 1)):
            images = torch.rand(2, 3, height, width) + self.part
            masks = torch.arange(2 * height * width).view(2, height, width) + self.part
            yield Record(images, masks, [f"{height} x {width}", str(random.random())])


def waits_of_a_step(groups: ImageGroups) -> list[str]:
    """Load a batch, and return the kinds of waits of a convolution and a mean, in the order of the first of each."""
    clock = PartClock(lambda action: None)
    recorder = TimelineRecorder(clock)
    clock.run()
    watch(recorder)
    images = next(iter(GroupLoader(DataLoader(Stream(), batch_size=None), groups, None, is_predicting=False))).images
    F.conv2d(images, torch.ones(1, 3, 3, 3), padding=1).mean().item()
    unwatch(recorder)
    return [*dict.fromkeys(segment["collective"] for segment in recorder.segments)]


def load_streams() -> Any:
    """Return what the ranks of a group have of the batches of a stream, kinds of waits, and an error.

    The error is that for a divided stream. Rank 1 also returns the errors for messages of rank 0 after rank 0 has left
    the group.
    """
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    groups = ImageGroups(dist.get_rank(), 2, 2, torch.device("cpu"), timedelta(seconds=60))
    groups.same_random_numbers()
    first = torch.rand(()), random.random()
    loader = GroupLoader(DataLoader(Stream(), batch_size=None), groups, None, is_predicting=False)
    received = []
    for batch in loader:
        assert type(batch) is Record
        height, width = batch.images.shape[2:]
        kind = RowsTensor if max(height, width) > 1 else Tensor  # One row cannot be divided.
        assert (type(batch.images), type(batch.masks)) == (kind, kind)
        if kind is RowsTensor:
            assert batch.images.row_layout.axis == 2 + (width > height)
        received.append([groups.parts.gather(batch.images, "test"), groups.parts.gather(batch.masks, "test")])
        received[-1] += [batch.names, torch.rand(()), random.random()]
    waits = waits_of_a_step(groups)
    with pytest.raises(ConfigurationError) as divided:
        next(iter(GroupLoader(DataLoader(Stream(dist.get_rank()), batch_size=None), groups, None, is_predicting=False)))
    if dist.get_rank() == 0:
        dist.destroy_process_group(groups.group)
        return first, received, waits, str(divided.value), []
    lost, divided_tensor = [], groups.parts.scatter(torch.ones(1, 1, 4, 5), -2)
    for wait in (groups.from_loader, torch.max, lambda tensor: groups.parts.gather(tensor, "sort")):
        with pytest.raises(DivergedError) as error:
            wait(divided_tensor)
        lost.append(str(error.value))
    return first, received, waits, str(divided.value), lost


def test_ranks_of_a_group_get_the_same_batches() -> None:
    """The generators of both ranks continue as they do on one device, on which rank 0's program would run alone."""
    torch.manual_seed(0)
    random.seed(0)
    expected_first = torch.rand(()), random.random()
    expected = [[batch.images, batch.masks, batch.names, torch.rand(()), random.random()] for batch in one_stream()]
    for first, received, waits, error, lost in run_ranks(2, load_streams):
        assert waits == [BATCH, ROWS, SUMS]
        assert first == expected_first
        torch.testing.assert_close([batch[:2] for batch in received], [batch[:2] for batch in expected], rtol=0, atol=0)
        assert [batch[2:] for batch in received] == [batch[2:] for batch in expected]
        assert error.startswith("the ranks of a group load different batches: with parts=2 each 2 ranks get parts")
        for text, named in zip(lost, ("rank 0", "the other ranks", "rank 0"), strict=bool(lost)):
            assert re.match(rf"rank 1 waits in .* at \S+:\d+ for {named}: \w+", text), text
            assert "GLHF" not in text


def one_stream() -> Iterator[Record]:
    """Return the batches of one device, where the loader compares nothing."""
    yield from DataLoader(Stream(), batch_size=None)
