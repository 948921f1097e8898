"""Streams and loaders of other packages: each sample is used once, and a run continues within an epoch."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset, default_collate

from cnnstrategies.callbacks import StreamCounts
from cnnstrategies.strategies import BalancedDDPStrategy, ParameterServerStrategy
from tests.strategies.test_streams import BATCH, EVERYTHING, SIZE, balanced, noted, sample, train

PACKAGES = ("datasets", "torchdata", "webdataset", "litdata")
pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, PACKAGES)),
        reason=f"one of {', '.join(PACKAGES)} is not installed; `make test-extras` installs them",
    ),
]


def collated(rows: list[dict[str, int]]) -> Any:
    return default_collate([sample(row["number"]) for row in rows])


def hugging_face(folder: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    if not (folder / "hf").exists():
        datasets.Dataset.from_dict({"number": list(range(SIZE))}).save_to_disk(str(folder / "hf"), num_shards=4)
    return datasets.load_from_disk(str(folder / "hf"))


def split_by_node(folder: Path) -> Any:
    from datasets.distributed import split_dataset_by_node

    stream = hugging_face(folder).to_iterable_dataset(num_shards=4)
    return split_dataset_by_node(stream, dist.get_rank(), dist.get_world_size())


def web_dataset(folder: Path) -> Any:
    import webdataset

    if not (folder / "0.tar").exists():
        for shard in range(4):
            with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
                for number in range(shard, SIZE, 4):
                    writer.write({"__key__": f"{number:03}", "txt": "x"})
    options = {"shardshuffle": False, "empty_check": False, "nodesplitter": webdataset.split_by_node}
    return webdataset.WebDataset(str(folder / "{0..3}.tar"), **options).map(lambda row: {"number": int(row["__key__"])})


def number_row(number: int) -> dict[str, int]:
    return {"number": number}


def lit_data(folder: Path) -> Any:
    import litdata

    if not (folder / "lit").exists():
        chunks = {"chunk_size": 3, "num_workers": 1, "start_method": "fork", "verbose": False}
        litdata.optimize(number_row, list(range(SIZE)), str(folder / "lit"), **chunks)
    return litdata.StreamingDataset(str(folder / "lit"))


class Batches(IterableDataset[Any]):
    """A stream with a state of its own: the number of the next sample."""

    next = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.next = self.next, 0
        for number in range(first, SIZE):
            self.next = number + 1
            yield {"number": number}
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class OwnPart(Batches):
    """A stream that yields every second sample on each of two processes, whose states therefore differ."""

    def __iter__(self) -> Iterator[Any]:
        first, self.next = self.next or dist.get_rank(), 0
        for number in range(first, SIZE, 2):
            self.next = number + 2
            yield {"number": number}
        self.next = 0


def loader(kind: Callable[..., Any], data: Any, workers: int) -> Any:
    return kind(data, BATCH, num_workers=workers, collate_fn=collated)


def stateful(data: Any, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return loader(StatefulDataLoader, data, workers)


def lit_loader(folder: Path, workers: int) -> Any:
    import litdata

    data = litdata.StreamingDataset(str(folder / "lit"), shuffle=True, drop_last=False)
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, collate_fn=collated)


STREAMS: dict[str, Callable[[Path, int], Any]] = {
    "one shard": lambda folder, w: loader(DataLoader, hugging_face(folder).to_iterable_dataset(), w),
    "four shards": lambda folder, w: loader(DataLoader, hugging_face(folder).to_iterable_dataset(num_shards=4), w),
    "split by node": lambda folder, w: loader(DataLoader, split_by_node(folder), w),
    "WebDataset": lambda folder, w: loader(DataLoader, web_dataset(folder), w),
    "LitData": lambda folder, w: loader(DataLoader, lit_data(folder), w),
    "LitData's loader": lambda folder, w: lit_loader(folder, w),
    "with indices": lambda folder, w: loader(DataLoader, hugging_face(folder), w),
    "torchdata, with indices": lambda folder, w: stateful(hugging_face(folder), w),
    "torchdata": lambda folder, w: stateful(Batches(), w),
    "torchdata, own part": lambda folder, w: stateful(OwnPart(), w),
    "torchdata, one shard": lambda folder, w: stateful(hugging_face(folder).to_iterable_dataset(), w),
    "torchdata, four shards": lambda folder, w: stateful(hugging_face(folder).to_iterable_dataset(num_shards=4), w),
    "torchdata, split by node": lambda folder, w: stateful(split_by_node(folder), w),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("workers", [0, 2, 4])
def test_a_stream_of_a_package_is_used_once_and_continues(name: str, workers: int, tmp_path: Path) -> None:
    hugging_face(tmp_path)
    web_dataset(tmp_path)
    if name.startswith("LitData"):
        lit_data(tmp_path)

    def make() -> Any:
        return STREAMS[name](tmp_path, workers)

    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    counts = StreamCounts()
    train(tmp_path / "first", balanced(), 2, make, callbacks=[saves, counts], enable_checkpointing=True)
    assert noted(tmp_path / "first") == EVERYTHING
    options = {"ckpt_path": tmp_path / "step=4.ckpt", "callbacks": [StreamCounts()]}
    train(tmp_path / "then", balanced(), 2, make, **options)
    assert noted(tmp_path / "first", before=4) + noted(tmp_path / "then") == EVERYTHING
    weights = [torch.load(tmp_path / part / "weights") for part in ("first", "then")]
    assert all(value.equal(weights[1][key]) for key, value in weights[0].items())


def test_a_data_set_with_indices_on_disk_follows_shares_and_is_dispatched(tmp_path: Path) -> None:
    hugging_face(tmp_path)
    strategies = {
        "shares": BalancedDDPStrategy(shares=[3, 1], start_method="fork"),
        "dispatch": ParameterServerStrategy(mode="async", data_dispatch="dynamic", start_method="fork"),
    }
    for name, strategy in strategies.items():
        train(tmp_path / name, strategy, 2, lambda: loader(DataLoader, hugging_face(tmp_path), 2), max_epochs=2)
        assert [noted(tmp_path / name, epoch) for epoch in ("0", "1")] == [EVERYTHING] * 2, name
    sizes = [(tmp_path / "shares" / str(rank)).read_text().split("\n")[0].count(" ") - 1 for rank in range(2)]
    assert sizes == [3, 1], "numbers of samples in the first batch"
