"""Which samples of a stream are used in an epoch, by a hash of their numbers.

    python benchmarks/data/streams.py

The packages of the extra `streams` are needed. The script writes streams.md beside this file.

Each run trains a small network on two CPU processes for one epoch, with batches of 4 samples, and notes the numbers of
the samples of each batch. A sample that a process repeats with weight 0, so that all processes have equally many
batches, is not noted. The hash is that of the sorted numbers; it differs if a sample is missing or used twice. In the
last column process 1 is killed with SIGKILL in the fourth batch under `ddp_balanced`, and the run continues from the
checkpoint after the second batch: with three processes, or with two if the stream divides its samples among them.

The second table has killed runs under other strategies. `hybrid_pipeline` has two stages and continues with two
replicas of the first one; `spatial` continues with four processes, which are two groups.
"""

import datetime
import importlib.metadata
import logging
import multiprocessing
import os
import signal
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import litdata
import torch
import torch.distributed as dist
import webdataset
from datasets.distributed import split_dataset_by_node
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from cnnstrategies.strategies import (
    BalancedDDPStrategy,
    HybridPipelineStrategy,
    ParameterServerStrategy,
    SpatialStrategy,
)
from cnnstrategies.strategies.protocol import facts_of

SIZE, BATCH, LIMIT = 46, 4, 120.0
WORKERS = (0, 2, 4)


class Plain(IterableDataset[dict[str, int]]):
    """A stream that knows neither processes nor workers."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"number": number} for number in range(SIZE))


class Uneven(IterableDataset[dict[str, int]]):
    """A stream that gives process 0 30 samples, and process 1 16 samples."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        numbers = range(30, SIZE) if dist.is_initialized() and dist.get_rank() else range(30)
        return ({"number": number} for number in numbers)


def hugging_face(folder: Path) -> Any:
    """Return the data set with indices that :func:`write_data` has saved."""
    return datasets.load_from_disk(str(folder / "hf"))


def by_node(folder: Path) -> Any:
    """Return this process's part of a stream of four shards."""
    place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return split_dataset_by_node(hugging_face(folder).to_iterable_dataset(num_shards=4), *place)


def web_dataset(folder: Path) -> Any:
    """Return a stream of four tar files, which are divided among the processes and workers."""
    options = {"shardshuffle": False, "empty_check": False, "nodesplitter": webdataset.split_by_node}
    return webdataset.WebDataset(str(folder / "{0..3}.tar"), **options).map(lambda row: {"number": int(row["__key__"])})


LOADER = "LitData, `StreamingDataLoader`"
# By name: the data set, the class of its loader, and whether another number of processes can continue.
STREAMS: dict[str, tuple[Callable[[Path], Any], Any, bool]] = {
    "plain `IterableDataset`": (lambda folder: Plain(), DataLoader, True),
    "30 and 16 samples by process": (lambda folder: Uneven(), DataLoader, False),
    "Hugging Face, 1 shard": (lambda folder: hugging_face(folder).to_iterable_dataset(), DataLoader, True),
    "Hugging Face, `split_dataset_by_node`": (by_node, DataLoader, False),
    "plain, `StatefulDataLoader`": (lambda folder: Plain(), StatefulDataLoader, True),
    "WebDataset, `split_by_node`": (web_dataset, DataLoader, False),
    "LitData": (lambda folder: litdata.StreamingDataset(str(folder / "lit")), DataLoader, False),
    LOADER: (
        lambda folder: litdata.StreamingDataset(str(folder / "lit"), drop_last=False),
        litdata.StreamingDataLoader,
        False,
    ),
}
OF_STRATEGIES = ("plain, `StatefulDataLoader`", LOADER)
STRATEGIES: dict[str, Callable[[], Any]] = {
    "Lightning's `ddp` alone": lambda: "ddp_fork",
    "`ddp_balanced`": lambda: BalancedDDPStrategy(start_method="fork"),
}
# By name: the strategy of the run that is killed, that of the run that continues, and its number of processes.
KILLED: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
    "`ddp_balanced`": (*[STRATEGIES["`ddp_balanced`"]] * 2, 3),
    "`hybrid_pipeline`": (
        lambda: HybridPipelineStrategy(stages=2, start_method="fork"),
        lambda: HybridPipelineStrategy(replicas=[2, 1], start_method="fork"),
        3,
    ),
    "`parameter_server`": (*[lambda: ParameterServerStrategy(start_method="fork")] * 2, 3),
    "`spatial`": (*[lambda: SpatialStrategy(parts=2, start_method="fork")] * 2, 4),
}


def number_row(number: int) -> dict[str, int]:
    """Return a sample."""
    return {"number": number}


def collate(rows: list[dict[str, int]]) -> Any:
    """Return a batch of values, targets and numbers."""
    images = [torch.sin(torch.arange(16.0).view(1, 4, 4) * (1 + row["number"])) for row in rows]
    return default_collate([(image, row["number"] % 2, row["number"]) for image, row in zip(images, rows, strict=True)])


class Noted(LightningModule):
    """Module that writes the numbers of its samples to a file of each process."""

    def __init__(self, make: Callable[[], Any], notes: Path, killed_in: int) -> None:
        super().__init__()
        self.make, self.notes, self.killed_in = make, notes, killed_in
        self.example_input_array = torch.zeros(1, 1, 4, 4)
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
        self.net = nn.Sequential(*layers)

    def train_dataloader(self) -> Any:
        """Return a loader of the stream."""
        return self.make()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        """Write the numbers of the batch, or kill this process."""
        rank, loader = self.trainer.global_rank, self.trainer.train_dataloader
        if index == self.killed_in and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        line = " ".join(map(str, [index, *batch[2].tolist()]))  # All ranks of a pipeline must read a tensor alike.
        facts = facts_of(self.trainer.strategy)
        if facts.has_global_batches:
            notes = rank == 0
        else:
            counts = not hasattr(loader, "own_count") or loader.own_count(index) > 0
            notes = counts and rank % facts.ranks_per_batch == 0
        if notes:
            with (self.notes / str(rank)).open("a") as file:
                file.write(line + "\n")

    def training_step(self, batch: Any, index: int) -> Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy: Callable[[], Any], devices: int, make: Any, notes: Path, killed_in: int, path: Path | None) -> None:
    """Train in a process group of its own, whose messages go to a file."""
    os.setsid()
    output = (notes / "output").open("w")
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    saves = ModelCheckpoint(notes, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy(), max_epochs=1, callbacks=saves, **options)
    trainer.fit(Noted(make, notes, killed_in), ckpt_path=path)


def run(strategy: Callable[[], Any], devices: int, make: Any, killed_in: int = -1, path: Path | None = None) -> Path:
    """Train in a child process, and return the folder of its notes."""
    notes = Path(tempfile.mkdtemp())
    arguments = (strategy, devices, make, notes, killed_in, path)
    process = multiprocessing.get_context("fork").Process(target=train, args=arguments)
    process.start()
    process.join(LIMIT)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        raise TimeoutError(f"the run in {notes} has not ended after {LIMIT} s")
    if process.exitcode and killed_in < 0:
        raise RuntimeError((notes / "output").read_text())
    return notes


def noted(notes: Path, before: int = SIZE) -> Counter[int]:
    """Return how often each sample was used in the batches before a batch."""
    rows = [[*map(int, line.split())] for rank in range(4) for line in _lines(notes / str(rank))]
    return Counter(number for index, *numbers in rows if index < before for number in numbers)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def digest(numbers: Counter[int]) -> str:
    """Return the hash of the samples, and how many were repeated or are missing."""
    text = f"{zlib.crc32(repr(sorted(numbers.elements())).encode()):08x}"
    repeated, missing = sum(numbers.values()) - len(numbers), SIZE - len(numbers)
    faults = [f"{count} {word}" for count, word in ((repeated, "repeated"), (missing, "missing")) if count]
    return f"{text} ({', '.join(faults)})" if faults else text


def cell(stream: str, strategy: str, workers: int, folder: Path, is_killed: bool) -> str:
    """Return a cell of a table."""
    data, kind, can_change = STREAMS[stream]

    def make() -> Any:
        return kind(data(folder), batch_size=BATCH, num_workers=workers, collate_fn=collate)

    try:
        if not is_killed:
            return digest(noted(run(STRATEGIES[strategy], 2, make)))
        first, second, devices = KILLED[strategy]
        killed = run(first, 2, make, killed_in=3)
        if not (killed / "step=2.ckpt").exists():
            raise RuntimeError((killed / "output").read_text())
        options: Any = (second, devices) if can_change else (first, 2)
        return digest(noted(killed, before=2) + noted(run(*options, make, path=killed / "step=2.ckpt")))
    except RuntimeError as error:
        return "refused" if "ConfigurationError" in str(error) else "ends with an error"
    except TimeoutError:
        return f"does not end in {LIMIT:.0f} s"


def table(streams: Sequence[str], columns: Sequence[tuple[str, str, bool]], folder: Path) -> list[str]:
    """Return the lines of a table.

    Args:
        streams: Names of the streams.
        columns: For each column its heading, the strategy, and whether a process is killed.
        folder: Folder of the data sets.
    """
    lines = ["| Stream | Workers |" + "".join(f" {heading} |" for heading, _, _ in columns)]
    lines.append("|---" * (2 + len(columns)) + "|")
    for stream in streams:
        for workers in WORKERS:
            cells = [cell(stream, strategy, workers, folder, is_killed) for _, strategy, is_killed in columns]
            lines.append("| " + " | ".join([stream, str(workers), *cells]) + " |")
            print(lines[-1], flush=True)
    return lines


def write_data(folder: Path) -> None:
    """Write the files of all data sets."""
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"number": list(range(SIZE))}).save_to_disk(str(folder / "hf"), num_shards=4)
    for shard in range(4):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in range(shard, SIZE, 4):
                writer.write({"__key__": f"{number:03}", "txt": "x"})
    chunks: dict[str, Any] = {"chunk_size": 4, "num_workers": 1, "start_method": "fork", "verbose": False}
    litdata.optimize(number_row, list(range(SIZE)), str(folder / "lit"), **chunks)


def main() -> None:
    """Run all cells, and write the page."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp())
    write_data(folder)
    columns = [(name, name, False) for name in STRATEGIES] + [("`ddp_balanced`, killed", "`ddp_balanced`", True)]
    others = [(f"{name}, killed", name, True) for name in list(KILLED)[1:]]
    tables = [table(list(STREAMS), columns, folder), table(OF_STRATEGIES, others, folder)]
    names = ("torch", "lightning", "datasets", "torchdata", "webdataset", "litdata")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    about = (__doc__ or "").split("beside this file.\n\n")[1].strip()
    expected = digest(Counter(range(SIZE)))
    text = [
        f"# Samples of streams\n\n{about}\n",
        f"The hash of {SIZE} samples that are used once each is `{expected}`.\n",
        f"- {datetime.datetime.now(datetime.UTC).date()}; {versions}\n",
    ]
    Path(__file__).with_suffix(".md").write_text("\n".join([*text, *tables[0], "", *tables[1]]) + "\n")


if __name__ == "__main__":
    main()
