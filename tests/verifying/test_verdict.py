"""Tests of the comparison of two runs' values, and of joining the ranks' batches into global batches."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset
from torchvision.ops import StochasticDepth

from cnnstrategies.data.division import shuffles, yields_each_once
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.joined_batches import joined
from cnnstrategies.verifying.batches import GlobalBatches, Precision
from cnnstrategies.verifying.loaded_batches import LoadedBatches
from cnnstrategies.verifying.recorder import settle
from cnnstrategies.verifying.verdict import differences, row_of, tolerance_of

pytestmark = pytest.mark.light
Pair = namedtuple("Pair", "image target")


def unequal(first: object, second: object, precision: Precision = "64-true") -> list[str]:
    return [
        difference.name
        for difference in differences(first, second, tolerance_of(precision, first))
        if not difference.is_equal
    ]


def test_only_rounding_counts_as_equal() -> None:
    reference = {
        "a": {"weight": torch.tensor([1.0, 100.0], dtype=torch.float64)},
        "steps": [3, {"rate": 0.1}],
        "name": "x",
    }
    assert (
        unequal(reference, {"a": {"weight": reference["a"]["weight"] * (1 + 1e-12)}, "steps": [3, {"rate": 0.1}]}) == []
    )
    off = {"a": {"weight": torch.tensor([1.0, 100.001], dtype=torch.float64)}, "steps": [4, {"rate": 0.1}]}
    assert unequal(reference, off) == ["a.weight", "steps[0]"]
    assert unequal(reference, off, "32-true") == ["steps[0]"], "in float32 a difference of 1e-5 is rounding"
    assert unequal(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])) == []
    assert unequal(torch.tensor([1.0, torch.nan]), torch.tensor([2.0, torch.nan])) == [""]


@pytest.mark.parametrize(("kind", "equal"), [("weights", False), ("optimizer", False), ("logged", True)])
def test_weights_that_are_nan_in_both_runs_are_not_called_equal(kind: str, equal: bool) -> None:
    values = {"loss": torch.tensor([1.0, torch.nan]), "other": torch.ones(2)}
    row = row_of(kind, list(differences(values, values, tolerance_of("64-true", values))))
    assert row.equal == equal
    assert "NaN in both runs" in row.text
    assert "loss" in row.text


def test_ranks_that_load_the_same_batches_are_found(tmp_path: Path) -> None:
    def same_batches(name: str, ranks: dict[int, list[float]]) -> tuple[int, int] | None:
        for rank, values in ranks.items():
            (folder := tmp_path / name / str(rank)).mkdir(parents=True)
            for index, value in enumerate(values):
                torch.save({"x": torch.full((2, 3), value), "y": torch.zeros(2)}, folder / f"{index}.pt")
        return LoadedBatches(tmp_path / name).same_batches()

    assert same_batches("a", {0: [1, 2], 1: [2, 1], 10: [1, 2]}) == (0, 10)
    assert same_batches("b", {0: [1, 2], 1: [2, 1]}) is None
    assert same_batches("c", {0: [1, 2], 1: [1, 3]}) is None, "one batch is the same by chance"
    assert same_batches("d", {0: [1, 1], 1: [1, 1]}) is None, "all samples are equal"
    assert same_batches("e", {0: [], 1: [1, 2], 2: [1, 2]}) == (1, 2), "rank 0 has no batches of its own"


def test_a_value_that_only_one_run_has_is_a_difference() -> None:
    """A gradient of None leaves no momentum, and a gradient of zeros does, so None and zeros must differ."""
    first = {"w": torch.ones(2)}
    undefined = {"w": torch.tensor([0.0, torch.nan])}
    for second in ({}, {"w": None}, {"w": torch.zeros(3)}, undefined, {**first, "v": 1.0}):
        assert unequal(first, second)
        assert unequal(second, first)
        assert not row_of("weights", list(differences(first, second, tolerance_of("64-true", first)))).equal


def test_batches_of_ranks_are_joined_by_samples_in_rank_order() -> None:
    first = {"x": torch.zeros(2, 3), "names": ["a", "b"], "pair": Pair(torch.zeros(2), (torch.ones(2),)), "scale": 2}
    second = {"x": torch.ones(1, 3), "names": ["c"], "pair": Pair(torch.ones(1), (torch.ones(1),)), "scale": 2}
    both = joined([first, second])
    assert both["x"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3]
    assert both["names"] == ["a", "b", "c"]
    assert isinstance(both["pair"], Pair)
    assert both["pair"].image.tolist() == [0, 0, 1]
    assert both["pair"].target[0].shape == (3,)
    assert both["scale"] == 2


def boxes(*counts: int) -> list[Tensor]:
    return [torch.zeros(count, 4) for count in counts]


@pytest.mark.parametrize("images", [torch.zeros(2, 3, 8, 8), tuple(torch.zeros(2, 3, 8, 8))], ids=["stacked", "listed"])
def test_lists_of_tensors_are_joined_sample_by_sample(images: Any) -> None:
    first = (images, [{"boxes": box} for box in boxes(2, 1)], boxes(2, 2))
    second = (images, [{"boxes": box} for box in boxes(2, 2)], boxes(0, 3))
    joint = joined([first, second])
    assert [len(target["boxes"]) for target in joint[1]] == [2, 1, 2, 2]
    assert [len(box) for box in joint[2]] == [2, 2, 0, 3]
    assert [image.shape for image in joint[0]] == [(3, 8, 8)] * 4


def test_a_batch_that_cannot_be_joined_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the ranks' values cannot be combined"):
        joined([[object()], [object()]])
    part = torch.tensor(1.0)
    assert joined([part]) is part, "the batch of a single rank needs no joining"
    images = torch.zeros(4, 2)
    for first, second in ((torch.tensor(1.0), torch.tensor(2.0)), (torch.zeros(5, 6), torch.zeros(3, 6))):
        with pytest.raises(ConfigurationError, match=r"a batch of 4 samples contains a tensor of shape .* differs"):
            joined([[images, first], [images, second]])


def test_a_tensor_without_rows_for_samples_is_joined_once_if_all_ranks_have_it() -> None:
    first = {"x": torch.zeros(4, 2), "weights": torch.arange(3.0), "scale": torch.tensor(2.0), "views": torch.ones(8)}
    second = {"x": torch.ones(2, 2), "weights": torch.arange(3.0), "scale": torch.tensor(2.0), "views": torch.zeros(4)}
    both = joined([first, second])
    assert both["weights"].tolist() == [0, 1, 2]
    assert both["scale"].item() == 2
    assert both["views"].tolist() == [1.0] * 8 + [0.0] * 4, "two views of each image have two rows for each sample"
    labels = {"x": torch.zeros(2, 2), "y": torch.ones(2)}
    assert joined([labels, labels])["y"].shape == (4,), "labels that are equal by chance belong to samples"


def test_global_batches_are_grouped_by_the_epochs_that_loaded_them(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        for index in range(3):
            torch.save([torch.full((2,), 10.0 * rank + index)], tmp_path / f"{rank}/{index}.pt")
    folders = [tmp_path / "0", tmp_path / "1"]
    batches = GlobalBatches(folders, ends=[2], length=2)
    epochs = [[batch[0].tolist() for batch in batches] for _ in range(2)]
    assert epochs == [[[0, 0, 10, 10], [1, 1, 11, 11]], [[2, 2, 12, 12]]]
    assert len(batches) == 2
    with pytest.raises(TypeError, match="have no length"):
        len(GlobalBatches(folders, [], None))
    samples = LoadedBatches(tmp_path).all_samples
    assert (len(samples), len(set(samples))) == (12, 6)


def test_random_layers_are_turned_off_and_reported() -> None:
    network = nn.Sequential(
        *(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.3), nn.MultiheadAttention(4, 2, 0.1)),
        StochasticDepth(0.2, "row"),
    )
    network[0].drop_rate = 0.2  # Networks that call F.dropout have such an attribute.
    notes = settle(network)
    network.train()
    assert [layer.training for layer in network] == [True, False, True, True, True]
    assert network[2].p == network[3].dropout == network[4].p == network[0].drop_rate == 0.0
    assert len(notes) == 2
    assert settle(nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("batches", "ends", "pair"),
    [
        ([0, 1, 1, 2], [4], (1, 2)),  # A batch is repeated within an epoch.
        ([0, 1, 2, 0, 1], [3], (0, 3)),  # The second epoch begins as the first one.
        ([0, 1, 2, 0, 2], [3], None),
        ([0, 1, 2, 0], [3], None),  # One equal batch may be chance.
        ([9, 9, 9, 1], [4], None),  # Batches of equal samples.
        ([9, 9, 9, 9], [2], None),  # Epochs of equal samples.
    ],
)
def test_batches_that_a_rank_loads_again_are_found(
    batches: list[int], ends: list[int], pair: tuple[int, int] | None, tmp_path: Path
) -> None:
    for number, value in enumerate(batches):
        samples_of_batch = torch.full((2, 3), float(value))
        (tmp_path / "0").mkdir(exist_ok=True)
        torch.save([samples_of_batch + torch.arange(2)[:, None] * (value != 9)], tmp_path / "0" / f"{number}.pt")
    (rank,) = LoadedBatches(tmp_path).ranks
    assert rank.repeated(ends, shuffles=True) == pair
    if pair == (0, 3):
        assert rank.repeated(ends, shuffles=False) is None


def test_only_known_samplers_promise_different_samples() -> None:
    data = TensorDataset(torch.arange(6))
    for loader, repeats, has_orders in (
        (DataLoader(data, 2), False, False),
        (DataLoader(data, 2, shuffle=True), False, True),
        (DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0)), False, True),
        (DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0, shuffle=False)), False, False),
        (DataLoader(data, 2, sampler=RandomSampler(data, replacement=True)), True, True),
        (DataLoader(data, 2, sampler=[0, 0, 1]), True, False),
        ([torch.arange(2)], True, False),
    ):
        assert (not yields_each_once(loader), shuffles(loader)) == (repeats, has_orders)
