"""The samples of a stream are divided like those of one device, whatever the numbers of processes and workers are."""

from collections.abc import Iterator
from itertools import chain, product, zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from cnnstrategies import ConfigurationError
from cnnstrategies.strategies.streams import part as part_module
from cnnstrategies.strategies.streams.part import StreamBatch, StreamPart
from cnnstrategies.strategies.streams.recognition import StreamDivision, describe_samples, find_division

RANKS = (1, 2, 3)
WORKERS = (0, 1, 2, 4)


class Numbers(IterableDataset[Any]):
    """The numbers of samples; a share of them by the worker's number if the stream knows its worker."""

    def __init__(self, count: int, by_worker: bool = False) -> None:
        self.count, self.by_worker = count, by_worker

    def __iter__(self) -> Iterator[int]:
        worker = part_module.get_worker_info() if self.by_worker else None
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(range(first, self.count, step))


def loaded(monkeypatch: pytest.MonkeyPatch, stream: Any, size: int | None, ranks: int, rank: int, workers: int,
           skip: int = 0, **options: Any) -> list[StreamBatch]:  # fmt: skip
    """Return a process's batches in the order in which torch's loader takes turns with its workers."""
    options = {"drop_last": False, "is_evaluation": False, "fills": True, "seed": 0, **options}
    by_worker = options.pop("by_worker", False)
    lists = []
    for worker in range(max(1, workers)):
        made = StreamPart(
            stream, size, list if size else int, processes=ranks, process=rank, workers=workers, **options
        )
        made.division, made.skip = StreamDivision(False, by_worker), [skip] * max(1, workers)
        info = SimpleNamespace(id=worker, num_workers=workers) if workers else None
        monkeypatch.setattr(part_module, "get_worker_info", lambda info=info: info)
        lists.append(list(made))
    return [batch for batch in chain(*zip_longest(*lists)) if batch is not None]


@pytest.mark.parametrize("size", [None, 1, 3])
def test_each_global_batch_has_the_samples_of_one_device(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for count, ranks, workers, skip in product(range(0, 20, 3), RANKS, WORKERS, (0, 4)):
        of_ranks = [loaded(monkeypatch, Numbers(count), size, ranks, r, workers, skip) for r in range(ranks)]
        assert len({len(batches) for batches in of_ranks}) == 1
        block = ranks * (size or 1)
        for index, batches in enumerate(zip(*of_ranks, strict=True)):
            rows = [
                row
                for rank, batch in enumerate(batches)
                for row in (batch.batch if size else [batch.batch])
                if batch.counts[rank]
            ]
            first = skip + index * block
            assert sorted(rows) == list(range(first, min(first + block, count)))
            assert len({batch.counts for batch in batches}) == 1
            assert sum(batches[0].counts) == len(rows)
        assert len(of_ranks[0]) == -(-max(0, count - skip) // block)


def test_a_pipeline_gets_no_repeated_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [loaded(monkeypatch, Numbers(5), 2, 2, rank, 0, fills=False) for rank in range(2)]
    assert [[batch.batch for batch in of_rank] for of_rank in batches] == [[[0, 2], [4]], [[1, 3]]]


def test_samples_that_are_left_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for workers in WORKERS:
        *whole, last = loaded(monkeypatch, Numbers(11), 2, 2, 0, workers, drop_last=True)
        assert [batch.batch for batch in whole] == [[0, 2], [4, 6]]
        assert last == StreamBatch(None, (), 3)


def test_each_process_evaluates_equally_many_batches_without_repeated_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, ranks, workers, size in product(range(3, 20), RANKS, WORKERS, (1, 3)):
        options = {"is_evaluation": True}
        of_ranks = [loaded(monkeypatch, Numbers(count), size, ranks, r, workers, **options) for r in range(ranks)]
        assert len({len(batches) for batches in of_ranks}) == 1
        assert sorted(row for batches in of_ranks for batch in batches for row in batch.batch) == list(range(count))
        assert all(len(batch.batch) == batch.counts[r] for r in range(ranks) for batch in of_ranks[r])
    with pytest.raises(ConfigurationError, match="2 samples of Numbers cannot be evaluated by 3 processes"):
        loaded(monkeypatch, Numbers(2), 1, 3, 0, 0, is_evaluation=True)


def test_a_stream_that_knows_its_workers_is_divided_among_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, workers in product((7, 16), (1, 2, 4)):
        stream = Numbers(count, by_worker=True)
        of_ranks = [loaded(monkeypatch, stream, 2, 2, rank, workers, by_worker=True) for rank in range(2)]
        rows = [row for r in range(2) for batch in of_ranks[r] if batch.counts[r] for row in batch.batch]
        assert sorted(rows) == list(range(count))
        assert len(of_ranks[0]) == len(of_ranks[1])


def described(*numbers: int, noise: bool = False, label: int | None = None) -> list[int]:
    samples: list[tuple[Tensor, Any]] = []
    for number in numbers:
        image = torch.full((4,), float(number)) + (torch.rand(4) if noise else 0)
        samples.append((image, number if label is None else label))
    return describe_samples(samples)


SAME, OTHER, THIRD, NONE = described(0, 1, 2), described(3, 4, 5), described(6, 7, 8), described()


@pytest.mark.parametrize(
    ("rows", "replicas", "division"),
    [
        ([[SAME], [SAME]], [0, 1], (False, False)),
        ([[SAME], [OTHER]], [0, 1], (True, False)),
        ([[SAME, SAME], [SAME, SAME]], [0, 1], (False, False)),
        ([[SAME, OTHER], [SAME, OTHER]], [0, 1], (False, True)),
        ([[SAME, NONE], [SAME, NONE]], [0, 1], (False, True)),
        ([[SAME, SAME], [OTHER, OTHER]], [0, 1], (True, False)),
        ([[SAME, OTHER], [THIRD, NONE]], [0, 1], (True, True)),
        ([[SAME], [NONE]], [0, 1], (True, False)),
        ([[NONE], [NONE]], [0, 1], (False, False)),
        ([[SAME], [SAME], [OTHER], [OTHER]], [0, 0, 1, 1], (True, False)),
        ([[described(0, 1, 2, noise=True)], [described(0, 1, 2, noise=True)]], [0, 1], (False, False)),
        ([[described(0, 1, 2, label=1)], [described(3, 4, 5, label=1)]], [0, 1], (True, False)),
        ([[described(0, 0, 0)], [described(0, 0, 0)]], [0, 1], (False, False)),
    ],
)
def test_the_first_samples_tell_who_divides_a_stream(rows: Any, replicas: list[int], division: Any) -> None:
    assert find_division(rows, replicas, "Numbers") == division


def test_doubtful_divisions_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="processes 0 and 2 read the same samples of Numbers, and other"):
        find_division([[SAME], [OTHER], [SAME]], [0, 1, 2], "Numbers")
    with pytest.raises(ConfigurationError, match="some workers of the loader of Numbers read the same samples"):
        find_division([[SAME, SAME, OTHER], [SAME, SAME, OTHER]], [0, 1], "Numbers")


class Restarts(IterableDataset[Any]):
    """A stream that is its own iterator, and starts again whenever ``iter`` is called, as LitData's does."""

    def __iter__(self) -> Iterator[int]:
        self.next = 0
        return self

    def __next__(self) -> int:
        self.next += 1
        if self.next > 20:
            raise StopIteration
        return self.next - 1


def test_a_stream_that_is_its_own_iterator_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = StreamPart(Restarts(), 4, list, False, 2, 0, 0, is_evaluation=False, fills=True, seed=0)
    made.ask = lambda worker, row: StreamDivision(by_process=True, by_worker=False)
    assert [row for batch in made for row in batch.batch] == list(range(20))
