"""Batches that the first stage loads: all ranks get the batches that a single process would load."""

import random
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.placed import ForeignTensor, Places
from cnnstrategies.placed.partial import PartialTensor
from cnnstrategies.strategies.hybrid_pipeline.loader_messages import end_together
from cnnstrategies.strategies.hybrid_pipeline.loading import PlacedLoader
from cnnstrategies.strategies.hybrid_pipeline.loading_ranks import LoadingRanks
from tests.placed.turns import generator_states, on_ranks, outcomes, set_generators

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


def placed(places: Places, loader: Any, replicas: tuple[int, ...], small: int = 64, predicts: bool = False) -> Any:
    placement = Placement(replicas, microbatches=4)
    everyone = range(places.world_size)
    ranks = LoadingRanks(
        loader,
        placement,
        places.rank,
        lambda row: places.exchange(list(row), everyone, "rows"),
        lambda: MemoryTransport(places),  # type: ignore[arg-type, return-value]
    )

    def most(number: int) -> int:
        return max(places.exchange(number, everyone, "most"))

    return PlacedLoader(loader, ranks, places, placement, most, small, predicts)


def seen(places: Places, value: Any) -> Any:
    """Return a batch with the values of foreign tensors, and with each tensor's place beside it."""
    if isinstance(value, Tensor):
        place = places.place_of(value)
        assert (type(value) is ForeignTensor) == (place is not None and places.rank not in place)
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
        "namespace": SimpleNamespace(number=1, text="text"),
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


class Drawing(IterableDataset[Any]):
    """A stream that draws a number at its end as well."""

    def __iter__(self) -> Iterator[Any]:
        yield from Stream(150, "torch python numpy")
        random.random()


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Samples("torch python numpy"), 8, shuffle=True),
    "draws nothing": lambda: DataLoader(Samples(), 8),
    "python": lambda: DataLoader(Samples("python"), 8),
    "workers": lambda: DataLoader(Samples("torch"), 8, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Drawing(), batch_size=64),
    "two loaders": lambda: CombinedLoader([DataLoader(Samples("torch"), 8, shuffle=True), [1, 2, 3]], "max_size"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_random_numbers_go_on_as_on_one_device_after_each_batch(name):
    """The user's step draws as well, on all ranks."""

    def states_and_batches(loader: Any, values: Callable[[Any], Any]) -> list[Any]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(7)
        results: list[Any] = []
        for _ in range(2):
            batches = iter(loader)
            results.append((torch.rand(()).item(), random.random(), np.random.rand()))
            for batch in batches:
                results += [values(batch), (torch.rand(()).item(), random.random(), np.random.rand())]
        return results

    def program(places):
        loader = LOADERS[name]()
        if isinstance(loader, CombinedLoader):
            loader.flattened = [placed(places, part, (1, 2)) for part in loader.flattened]
        else:
            loader = placed(places, loader, (1, 2))
        torch.manual_seed(places.rank)
        return states_and_batches(loader, lambda batch: tensors_of(places, batch))

    outside = generator_states()
    expected = states_and_batches(LOADERS[name](), lambda batch: tensors_of(None, batch))
    set_generators(outside)
    for results in on_ranks(3, program):
        check_equal(results, expected)


def tensors_of(places: Any, batch: Any) -> list[Any]:
    """Return the leaves of a batch with the values of foreign tensors."""
    leaves = tree_leaves(batch)
    return [places.everywhere(leaf).clone() if places and isinstance(leaf, Tensor) else leaf for leaf in leaves]


def test_replicas_draw_different_augmentation_and_go_on_alike():
    def program(places):
        sampler = DistributedSampler(Samples(), 2, min(places.rank, 1), shuffle=False)
        loader = DataLoader(Samples("torch python numpy"), batch_size=2, sampler=sampler)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(7)
        batch = next(iter(placed(places, loader, (2, 1))))
        return places.everywhere(batch[0])[:, 0].tolist(), torch.rand(()).item(), random.random(), np.random.rand()

    results = on_ranks(3, program)
    noise = [round(value % 100, 6) for value in results[0][0]]
    assert results[1:] == results[:1] * 2
    assert len(set(noise)) == 4, "all samples have different random numbers"


def test_loaders_without_a_length_end_on_all_ranks_with_the_longest_of_the_first_stage():
    def program(places):
        length = [10, 5, 99][places.rank]
        loader = placed(places, DataLoader(Stream(length), batch_size=2), (2, 1))
        loader.ranks.all_load = False
        with pytest.raises(TypeError, match="DataLoader has no length"):
            len(loader)
        return [tensors_of(places, batch)[1].tolist() for batch in loader]

    expected = [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5], [6, 7], [8, 9]]
    assert on_ranks(3, program) == [expected] * 3


def test_attributes_and_length_are_those_of_the_users_loader():
    def program(places):
        loader = placed(places, DataLoader(Samples(), 8), (1, 1))
        return len(loader), loader.batch_size, loader.dataset[3][1], loader.loads, len(list(loader))

    assert on_ranks(2, program) == [(3, 8, 3, True, 3), (3, 8, 3, False, 3)]


def test_data_that_the_user_has_divided_among_all_ranks_are_loaded_by_all_ranks():
    def program(places):
        rank, world = places.rank, places.world_size
        numbers = []
        for loader in (
            DataLoader(Samples(), 2, sampler=DistributedSampler(Samples(), world, rank, shuffle=False)),
            DataLoader(Subset(Samples(), range(rank, SIZE, world)), 2),
            [torch.tensor([[index, rank]]) for index in range(rank, SIZE, world)],
        ):
            for replicas in ((1, 2), (2, 1)):
                mine = placed(places, loader, replicas)
                batches = [tensors_of(places, batch) for batch in mine]
                assert mine.ranks.all_load
                numbers.append(
                    sorted(int(row) for batch in batches for row in batch[-1].reshape(len(batch[-1]), -1)[:, 0])
                )
        return numbers

    results = on_ranks(3, program)
    assert results[1:] == results[:1] * 2
    assert results[0][2:] == [list(range(SIZE))] * 4


def test_batches_that_are_none_and_parts_without_samples():
    def program(places):
        none = placed(places, [None, torch.ones(3), None], (1, 1))
        empty = placed(places, [torch.arange(3 * places.rank), torch.arange(2), torch.empty(0)], (2,))
        none.ranks.all_load = empty.ranks.all_load = False
        return [batch if batch is None else batch.tolist() for batch in none], [batch.tolist() for batch in empty]

    assert on_ranks(2, program) == [([None, [1, 1, 1], None], [[0, 1, 2], [0, 0, 1, 1], []])] * 2


def test_parts_of_any_structure_are_joined_in_order():
    def part(rank: int, count: int) -> Any:
        rows = torch.arange(count) * 10 + rank
        return {
            "size": torch.tensor([5, 7]),
            "views": [rows, rows + 100],
            "scene": Scene(rows[:, None].expand(-1, 4), [{"boxes": torch.ones(n + 1, 4) * n} for n in rows.tolist()]),
            "names": [f"name {n}" for n in rows.tolist()],
            "array": rows.numpy(),
            "constant": ("train", 0.5, float("nan"), None),
        }

    def program(places):
        loader = placed(places, [part(places.rank, 3 - places.rank)], (2,))
        loader.ranks.all_load = False
        (batch,) = loader
        order = [0, 1, 10, 11, 20]
        assert batch["size"].tolist() == [5, 7]
        assert [view.tolist() for view in batch["views"]] == [order, [n + 100 for n in order]]
        assert batch["scene"].image[:, 3].tolist() == order
        assert [box["boxes"].shape[0] for box in batch["scene"].boxes] == [n + 1 for n in order]
        assert batch["names"] == [f"name {n}" for n in order]
        assert batch["array"].tolist() == order
        assert batch["constant"][:2] == ("train", 0.5)

    on_ranks(2, program)


def local_class() -> Any:
    @dataclass
    class Local:
        number: int

    return Local(1)


REFUSED: dict[str, tuple[Callable[[int], Any], str]] = {
    "file": (lambda rank: {"meta": [Path("a"), iter([1])]}, r"batch\['meta'\]\[1\]: list_iterator cannot be sent"),
    "local class": (
        lambda rank: [local_class()],
        r"batch\[0\]: an object of class .*Local cannot be sent .* top level",
    ),
    "set": (lambda rank: ({1, 2},), r"batch\[0\]: set cannot be sent"),
    "key": (lambda rank: {"a": {(1, 2): 3}}, r"the key \(1, 2\) of batch\['a'\] cannot be sent"),
    "objects": (lambda rank: [np.array(["a"])], r"batch\[0\]: NumPy value of dtype <U1 cannot be sent"),
    "sparse": (lambda rank: [torch.eye(3).to_sparse()], r"batch\[0\]: a tensor .*torch.sparse_coo.* cannot be sent"),
    "gradient": (lambda rank: Scene(torch.ones(2, requires_grad=True), []), r"batch.image: .*requires a gradient"),
    "scalars": (lambda rank: (torch.ones(2), torch.tensor(rank)), r"batch\[1\] .* differ, .* \(\(\) and \(\)\)"),
    "numbers": (lambda rank: {"x": torch.ones(2), "lam": rank / 2}, r"batch\['lam'\] .* differ \(0.0 and 0.5\)"),
    "sizes": (lambda rank: [torch.ones(2, rank + 1)], r"batch\[0\] .* have different sizes \(\(1,\) and \(2,\)\)"),
    "large sizes": (
        lambda rank: [torch.ones(99, rank + 1)],
        r"batch\[0\] .* have different sizes \(\(1,\) and \(2,\)\)",
    ),
    "large rows": (
        lambda rank: {"x": torch.ones(99 + rank, 2), "y": torch.ones(99, 9)},
        r"batch\['y'\] .* differ, .* each of 99 and 100 samples",
    ),
    "large dtypes": (
        lambda rank: torch.ones(99, 2, dtype=[torch.half, torch.int8][rank]),
        "batch .* have different dtypes",
    ),
    "keys": (lambda rank: {"x": torch.ones(2), rank: 0}, r"batch .* have different keys"),
    "types": (lambda rank: (torch.ones(2), [1.0, 2][rank]), r"batch\[1\] .* different types \(float and int\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_be_sent_or_joined_are_refused_by_their_path(name):
    make, text = REFUSED[name]

    def program(places):
        loader = placed(places, [make(places.rank % 2)], (2, 1))
        loader.ranks.all_load = False
        next(iter(loader))

    _, errors = outcomes(3, program)
    assert any(isinstance(error, ConfigurationError) and re.search(text, str(error)) for error in errors), errors


def test_ranks_that_end_early_or_use_other_loaders_end_with_one_line():
    placement = Placement((2, 1), microbatches=4)

    def program(places, ends):
        loader, other = (placed(places, DataLoader(Samples(), 2), (2, 1)) for _ in range(2))
        batches = iter(loader)
        next(batches)
        if ends == "other":
            return next(iter(other) if places.rank == 2 else batches)
        if places.rank in ends:
            end_together(places, placement.ranks(0))
        else:
            next(batches)
            next(batches)
        return None

    for ends in ([0], [1], [2], [0, 1]):
        _, errors = outcomes(3, lambda places, ends=ends: program(places, ends))
        texts = [str(error) for error in errors if isinstance(error, ConfigurationError)]
        assert any(f"rank {ends[0]} ended an epoch, or training, while rank" in text for text in texts), errors
    _, errors = outcomes(3, lambda places: program(places, "other"))
    assert any("rank 2 is at the start of loader" in str(error) for error in errors)
    assert outcomes(3, lambda places: program(places, [0, 1, 2]))[1] == [None] * 3


def test_a_step_needs_one_message_for_each_rank_of_other_stages():
    def program(places):
        loader = placed(places, DataLoader(Samples(), 2), (1, 2))
        before = places.messages.counts.total()
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        return places.messages.counts.total() - before

    assert on_ranks(3, program) == [2 * 6, 0, 0]


def test_replicas_do_not_send_each_other_images_that_only_the_network_uses():
    """Large tensors stay on the replicas that have loaded them, also if a replica has loaded only few samples."""

    class Counting:
        def __init__(self, link: Any) -> None:
            self.link, self.sent = link, 0

        def send(self, target: int, message: Any) -> None:
            self.sent += len(message)
            self.link.send(target, message)

        def receive(self, source: int) -> Any:
            return self.link.receive(source)

    def part(rank: int, count: int) -> Any:
        numbers = torch.arange(count) * 2 + rank
        rows = numbers[:, None].expand(-1, 1000).double()
        return {"images": rows, "views": [rows + 100, rows.float()], "label": numbers, "table": torch.ones(9000)}

    def program(places):
        counts = [5, 1][places.rank : places.rank + 1] or [0]
        loader = placed(places, [part(places.rank, counts[0])], (2, 1), small=10_000)
        loader.ranks.all_load = False
        link = vars(places.messages)["_link"] = Counting(vars(places.messages)["_link"])
        (batch,) = loader
        # The table of 36 kB and, in one message, the rows of the second replica are sent.
        assert link.sent < [45_000, 62_000, 1][places.rank]
        large = batch["images"], *batch["views"]
        assert [type(tensor) for tensor in large] == [PartialTensor if places.rank < 2 else ForeignTensor] * 3
        order = [0, 1, 2, 4, 6, 8]
        assert batch["label"].tolist() == order
        assert places.everywhere(batch["images"])[:, 7].tolist() == order
        assert places.everywhere(batch["views"][0])[:, 7].tolist() == [n + 100 for n in order]
        assert batch["views"][1].dtype == torch.float32
        assert places.everywhere(batch["table"]).sum() == 9000

    on_ranks(3, program)


def test_prediction_writers_get_the_indices_of_the_global_batch():
    class Indices(BatchSampler):
        """Records the indices of each batch, as Lightning's wrapper of a batch sampler does."""

        seen_batch_indices: list[list[int]]

        def __iter__(self) -> Iterator[list[int]]:
            self.seen_batch_indices = []
            for batch in super().__iter__():
                self.seen_batch_indices.append(batch)
                yield batch

    def program(places):
        sampler = DistributedSampler(Samples(), 2, min(places.rank, 1), shuffle=False)
        batches = Indices(sampler, 3, drop_last=False)
        loader = DataLoader(Samples(), batch_sampler=batches)
        mine = placed(places, loader, (2, 1), predicts=True)
        pairs = []
        for index, batch in enumerate(mine):
            pairs.append((batch[1].tolist(), mine.batch_sampler.seen_batch_indices[index]))
        return pairs

    results = on_ranks(3, program)
    assert all(numbers == indices for numbers, indices in results[0])
    assert [number for numbers, _ in results[0] for number in numbers] == list(range(SIZE))
    assert all(indices == [] for rank in (1, 2) for _, indices in results[rank])
