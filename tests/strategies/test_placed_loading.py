"""Batches that the first stage loads: all ranks get the batches that a single process would load."""

import random
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from turns import on_ranks

from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.placed import ForeignTensor, Places
from cnnstrategies.strategies.hybrid_pipeline.loading_ranks import LoadingRanks
from cnnstrategies.strategies.whole_step.loading import PlacedLoader

SIZE = 22
Pair = namedtuple("Pair", "left right")
pytestmark = pytest.mark.light


class Phase(Enum):
    TRAIN = "train"


class Record(dict):
    """A dictionary whose items are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass(frozen=True)
class Scene:
    image: Tensor
    boxes: list[Any]
    extra: dict[str, Any] = field(default_factory=dict)


class Plain:
    __slots__ = ("__dict__", "mask")

    def __init__(self, mask: Tensor, name: str) -> None:
        self.mask, self.name = mask, name

    def to(self, *_: Any) -> "Plain":
        return self


class Samples(Dataset[Any]):
    """Samples with an image of 80 bytes; random numbers are drawn from some generators."""

    def __init__(self, draws: str = "") -> None:
        self.draws = draws

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.arange(10, dtype=torch.float64) + 100 * index
        image += torch.rand(()) if "torch" in self.draws else 0
        image += random.random() if "python" in self.draws else 0
        image += np.random.rand() if "numpy" in self.draws else 0
        return image, index


class Stream(IterableDataset[Any]):
    def __init__(self, length: int, draws: str = "") -> None:
        self.length, self.draws = length, draws

    def __iter__(self) -> Iterator[Any]:
        samples = Samples(self.draws)
        return (samples[index] for index in range(self.length))


class MemoryTransport:
    """Sends objects by the links of ranks in memory."""

    def __init__(self, places: Places) -> None:
        self.messages = places.messages

    def send_object(self, value: Any, target: int, content: str) -> list[Any]:
        self.messages.send(target, content, value)
        return []

    def receive_object(self, source: int, content: str) -> Any:
        return self.messages.receive(source, content)


def placed(
    places: Places, loader: Any, replicas: tuple[int, ...], small: int = 64, kind: Any = PlacedLoader, **options: Any
) -> Any:
    placement = Placement(replicas, microbatches=4)
    everyone = range(places.world_size)
    ranks = LoadingRanks(
        loader,
        placement,
        places.rank,
        lambda row: places.exchange(list(row), everyone, "rows"),
        lambda: MemoryTransport(places),  # type: ignore[arg-type, return-value]
    )
    return kind(loader, ranks, places, placement, lambda n: max(places.exchange(n, everyone, "most")), small, **options)


def seen(places: Places, value: Any) -> Any:
    """Return a batch with the values of foreign tensors, and with each tensor's place beside it."""
    if isinstance(value, Tensor):
        place = places.place_of(value)
        assert isinstance(value, ForeignTensor) == (place is not None and places.rank not in place)
        return place, places.everywhere(value).clone()
    if isinstance(value, dict):
        return type(value)({key: seen(places, item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [seen(places, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Scene):
        return Scene(*(seen(places, item) for item in vars(value).values()))
    return seen(places, {"mask": value.mask, **vars(value)}) if isinstance(value, Plain) else value


def check_equal(left: Any, right: Any, path: str = "batch") -> None:
    """Check that two batches have equal types and values."""
    assert type(left) is type(right), path
    if isinstance(left, (Tensor, np.ndarray)):
        assert (left.dtype, left.tolist()) == (right.dtype, right.tolist()), path
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key, item in left.items():
            check_equal(item, right[key], f"{path}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        for index, (item, other) in enumerate(zip(left, right, strict=True)):
            check_equal(item, other, f"{path}[{index}]")
    elif isinstance(left, Scene):
        check_equal(vars(left), vars(right), path)
    else:
        assert left == right, path


def structure() -> Any:
    big, tiny = torch.arange(24.0).reshape(4, 6), torch.arange(4)
    return {
        "big": big,
        0: (tiny, [big.t(), None, 3, 2.5, True, "name", float("inf"), 1 + 2j, b"bytes", b""]),
        "pair": Pair(tiny, {"deep": big[:, :3]}),
        "scene": Scene(big * 2, [{"boxes": tiny.float()}, {"boxes": big}], {"path": Path("a/b"), "dtype": torch.half}),
        "record": Record(image=big, label=OrderedDict(b=tiny, a=1)),
        "plain": Plain(big > 2, "plain"),
        "arrays": [np.arange(3, dtype=np.int16), np.float32(1.5), np.int64(3), np.bool_(True)],
        "phase": Phase.TRAIN,
        "size": torch.Size([2, 3]),
        "empty": [torch.empty(0, 3), [], {}, ()],
        "mixed": [torch.arange(4, dtype=torch.bfloat16), torch.tensor(2.0), torch.tensor(True)],
    }


def with_places(value: Any, small: int) -> Any:
    """Return a batch with each tensor's expected place beside it."""
    if isinstance(value, Tensor):
        return ((0,) if value.nbytes > small else None), value
    if isinstance(value, dict):
        return type(value)({key: with_places(item, small) for key, item in value.items()})
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [with_places(item, small) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Scene):
        return Scene(*(with_places(item, small) for item in vars(value).values()))
    return with_places({"mask": value.mask, **vars(value)}, small) if isinstance(value, Plain) else value


def test_all_ranks_get_a_users_structure_with_large_tensors_on_the_first_stage_alone():
    def program(places):
        for small in (0, 24, 64, 1 << 16):
            for batch in placed(places, [structure()], (1, 2), small):
                check_equal(seen(places, batch), with_places(structure(), small))
                assert batch["scene"].boxes[1]["boxes"].stride() == (6, 1)
                assert batch[0][1][0].stride() == ((1, 6) if small < 96 else (4, 1))
                assert batch["plain"].to() is batch["plain"]
                assert batch["record"].image is batch["record"]["image"]

    on_ranks(3, program)


def test_views_of_one_storage_and_the_loaders_own_tensors_have_places_of_their_own():
    rows = torch.arange(60.0).reshape(6, 10)

    def program(places):
        data = rows.clone()
        for batch in placed(places, [(data[:, :-1], data[:, -1], data)], (1, 1)):
            assert [places.place_of(tensor) for tensor in batch] == [(0,), None, (0,)]
            (batch[0] - batch[2][:, :9]).sum().item()
            assert places.place_of(data) is None

    on_ranks(2, program)


def program_order(replicas: tuple[int, ...], loader: Callable[[int, int], Any]) -> list[list[Any]]:
    """Return the batches that each rank sees. The loader gets the number of replicas and this rank's replica."""

    def program(places):
        placement = Placement(replicas, microbatches=4)
        place = placement.place(places.rank)
        mine = loader(replicas[0], place.replica if place.stage == 0 else 0)
        return [seen(places, batch) for batch in placed(places, mine, replicas)]

    return on_ranks(sum(replicas), program)


def shards(count: int, replica: int, draws: str = "") -> DataLoader[Any]:
    samples = Samples(draws)
    sampler = DistributedSampler(samples, count, replica, shuffle=False)
    return DataLoader(samples, batch_size=12 // count, sampler=sampler if count > 1 else None)


def test_samples_are_in_the_order_of_one_process_for_one_two_and_three_replicas():
    """The last batches are smaller, and a replica that repeats a sample to have as many as others leaves it out."""
    expected = list(DataLoader(Samples(), batch_size=12))
    for replicas in ((1, 1), (1, 2), (2, 1), (3, 1), (4,)):
        for batches in program_order(replicas, shards):
            assert len(batches) == len(expected)
            for (images, targets), (right, numbers) in zip(batches, expected, strict=True):
                assert images[0] == tuple(range(replicas[0]))
                check_equal(images[1], right)
                check_equal(targets[1], numbers)
