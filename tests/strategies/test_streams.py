"""Streams that know nothing of processes and workers, or that divide their samples themselves, train as on one device.

Each run uses every sample of an epoch once, also if a process is killed and the run is resumed by other processes.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from cnnstrategies.callbacks import FirstBatch, StreamCounts
from cnnstrategies.strategies import BalancedDDPStrategy, ParameterServerStrategy
from tests.conftest import quiet_trainer
from tests.runner.ports import free_port

SIZE = 22
BATCH = 2

Sample = tuple[Tensor, Tensor, Tensor]


def sample(number: int) -> Sample:
    image = torch.sin(torch.arange(4, dtype=torch.float64) * (1 + number))
    return image, torch.tensor(number % 3 % 2), torch.tensor(number)


class Plain(IterableDataset[Sample]):
    """A stream that does not know processes or workers."""

    def __iter__(self) -> Iterator[Sample]:
        return (sample(number) for number in range(SIZE))


class Sized(Plain):
    """A stream whose length is known."""

    def __len__(self) -> int:
        return SIZE


class ByWorker(IterableDataset[Sample]):
    """A stream that divides its samples among workers, and does not know processes."""

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (sample(number) for number in range(first, SIZE, step))


class Uneven(IterableDataset[Sample]):
    """A stream that gives most of its samples to the first process."""

    def __iter__(self) -> Iterator[Sample]:
        return (sample(number) for number in (range(16, SIZE) if dist.get_rank() else range(16)))


class OwnWay(DataLoader[Any]):
    """A loader that divides a stream like :class:`Uneven` in its own way, with a state like that of LitData's loader.

    An epoch that continues from a state ends only when the loader is asked for a batch after the last one.
    """

    restore, served = False, 0

    def __init__(self) -> None:
        super().__init__(Sized(), BATCH)

    def _numbers(self) -> range:
        return range(16, SIZE) if dist.get_rank() else range(16)

    def __len__(self) -> int:
        return len(self._numbers()) // BATCH

    def __iter__(self) -> Iterator[Any]:
        self.served = self.served if self.restore else 0
        for first in self._numbers()[self.served :: BATCH]:
            self.served += BATCH
            yield default_collate([sample(number) for number in range(first, first + BATCH)])
        self.restore = False

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.served, self.restore = state["served"], True


class Drawn(IterableDataset[Sample]):
    """A stream in a random order, which is the same for all processes only if their random numbers are the same."""

    def __iter__(self) -> Iterator[Sample]:
        return (sample(int(number)) for number in torch.randperm(SIZE))


class Module(LightningModule):
    """Module that notes the numbers of the samples with which it is trained, by rank and batch."""

    def __init__(self, notes: Path, make: Callable[[], DataLoader[Any]], killed_in: int = -1) -> None:
        super().__init__()
        self.notes, self.make, self.killed_in = notes, make, killed_in
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()

    def train_dataloader(self) -> DataLoader[Any]:
        return self.make()

    def val_dataloader(self) -> DataLoader[Any]:
        return self.make()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        rank = self.trainer.global_rank
        if index == self.killed_in and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loader: Any = self.trainer.train_dataloader
        if not hasattr(loader, "own_count") or loader.own_count(index):
            self.note(f"{self.trainer.current_epoch} {index}", batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.note("val 0", batch)

    def note(self, place: str, batch: Any) -> None:
        with (self.notes / f"{self.trainer.global_rank}").open("a") as file:
            file.write(f"{place} {' '.join(str(int(number)) for number in batch[2])}\n")

    def training_step(self, batch: Any, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_fit_end(self) -> None:
        if self.trainer.global_rank == 0:
            torch.save(self.net.state_dict(), self.notes / "weights")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def train(
    notes: Path, strategy: Any, devices: int, make: Callable[[], Any], killed_in: int = -1, **options: Any
) -> None:
    """Train a module. Its notes and weights are written to a folder."""
    notes.mkdir(exist_ok=True)
    path = options.pop("ckpt_path", None)
    options = {"max_epochs": 1, "limit_val_batches": 0, "callbacks": [FirstBatch()], **options}
    trainer: Trainer = quiet_trainer(strategy, devices, **options)
    trainer.fit(Module(notes, make, killed_in), ckpt_path=path, weights_only=True)


def noted(notes: Path, epoch: str = "0", before: int = 99, first: int = 0) -> Counter[int]:
    """Return how often each sample was used in the batches ``first`` to ``before`` - 1 of an epoch."""
    numbers: Counter[int] = Counter()
    for rank in range(4):
        for line in (notes / str(rank)).read_text().splitlines() if (notes / str(rank)).exists() else ():
            place, index, *samples = line.split()
            if place == epoch and first <= int(index) < before:
                numbers.update(map(int, samples))
    return numbers


def weights_of_one_process(batches: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    module = Module(Path(), list)  # type: ignore[arg-type]
    optimizer = module.configure_optimizers()
    for batch in batches:
        images, targets, _ = (torch.stack(values) for values in zip(*map(sample, batch), strict=True))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module.net(images), targets).backward()
        optimizer.step()
    return module.net.state_dict()


def balanced() -> BalancedDDPStrategy:
    return BalancedDDPStrategy(start_method="fork")


def synchronous() -> ParameterServerStrategy:
    return ParameterServerStrategy(start_method="fork")


EVERYTHING = Counter(range(SIZE))
CHUNKS = [range(SIZE)[first : first + 2 * BATCH] for first in range(0, SIZE, 2 * BATCH)]
# The batches of both processes together: process 0 has 8 batches, and process 1 has 3.
UNEVEN = [[*range(BATCH * k, BATCH * k + BATCH), *range(16, SIZE)[BATCH * k : BATCH * k + BATCH]] for k in range(8)]


@pytest.mark.parametrize("strategy", [balanced, synchronous])
def test_streams_train_the_weights_of_one_process(strategy: Any, tmp_path: Path) -> None:
    cases: dict[str, tuple[Any, Sequence[Sequence[int]]]] = {
        "plain": (lambda: DataLoader(Plain(), BATCH), CHUNKS),
        "sized, with workers": (lambda: DataLoader(Sized(), BATCH, num_workers=2), CHUNKS),
        "uneven": (lambda: DataLoader(Uneven(), BATCH), UNEVEN),
        "divided by the loader": (OwnWay, UNEVEN),
    }
    for name, (make, batches) in cases.items():
        notes = tmp_path / name
        train(notes, strategy(), 2, make)
        assert noted(notes) == EVERYTHING, name
        for key, value in weights_of_one_process(batches).items():
            torch.testing.assert_close(torch.load(notes / "weights")[key], value, rtol=1e-12, atol=1e-12, msg=name)


def test_a_random_order_and_an_evaluation_use_each_sample_once(tmp_path: Path) -> None:
    make = {w: lambda w=w: DataLoader(Drawn(), BATCH, num_workers=w, persistent_workers=w > 0) for w in (0, 2)}
    for workers, loader in make.items():
        notes = tmp_path / str(workers)
        train(
            notes,
            balanced(),
            2 if workers else 3,
            loader,
            max_epochs=2,
            limit_val_batches=None,
            check_val_every_n_epoch=2,
        )
        assert [noted(notes, epoch) for epoch in ("0", "1", "val")] == [EVERYTHING] * 3
    orders = [[line for line in (tmp_path / "0/0").read_text().splitlines() if line[0] == epoch] for epoch in "01"]
    assert [line[4:] for line in orders[0]] != [line[4:] for line in orders[1]], "each epoch has an order of its own"


@pytest.mark.parametrize(
    ("kind", "workers", "devices"),
    [
        (Plain, 2, 3),
        (Drawn, 0, 1),
        pytest.param(ByWorker, 2, 3, marks=pytest.mark.cluster),
        pytest.param(Uneven, 2, 2, marks=pytest.mark.cluster),
    ],
)
def test_a_run_whose_process_is_killed_continues_with_the_other_samples(
    kind: Any, workers: int, devices: int, tmp_path: Path
) -> None:
    """Another number of processes continues as well, unless the stream divides its samples itself."""

    def make(workers: int = workers) -> DataLoader[Any]:
        return DataLoader(kind(), BATCH, num_workers=workers)

    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    with pytest.raises(Exception, match=r"rank 1|process 1|signal|SIGKILL"):
        train(tmp_path, balanced(), 2, make, killed_in=3, callbacks=[saves], enable_checkpointing=True)
    before = noted(tmp_path, before=2)
    assert sum(before.values()) == 4 * BATCH
    counts = StreamCounts()
    options = {"ckpt_path": tmp_path / "step=2.ckpt", "callbacks": [counts]}
    train(tmp_path / "then", balanced(), devices, make, **options)
    assert before + noted(tmp_path / "then") == EVERYTHING
    if kind is Uneven:
        with pytest.raises(Exception, match="2 processes with 2 workers, and Uneven divides its samples among them"):
            train(tmp_path / "other", balanced(), 2, lambda: make(3), **options)


def test_a_loader_that_divides_a_stream_itself_continues_from_its_state_and_begins_new_epochs(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    options = {"max_epochs": 2, "callbacks": [saves], "enable_checkpointing": True}
    train(tmp_path / "whole", balanced(), 2, OwnWay, **options)
    train(tmp_path / "then", balanced(), 2, OwnWay, max_epochs=2, ckpt_path=tmp_path / "step=4.ckpt")
    for epoch, first in (("0", 4), ("1", 0)):
        assert noted(tmp_path / "then", epoch) == noted(tmp_path / "whole", epoch, first=first), epoch
    assert noted(tmp_path / "then", "1") == EVERYTHING
    weights = [torch.load(tmp_path / part / "weights") for part in ("whole", "then")]
    assert all(value.equal(weights[1][key]) for key, value in weights[0].items())


class Evaluates(Module):
    """Module that logs the mean number of the samples, and predicts the numbers."""

    def __init__(self, notes: Path, make: Callable[[], DataLoader[Any]], in_step: bool) -> None:
        super().__init__(notes, make)
        self.in_step = in_step

    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        mean, options = batch[2].double().mean(), {"on_step": self.in_step, "on_epoch": True, "sync_dist": True}
        self.log("mean", mean, batch_size=len(batch[2]), **options)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        numbers: Tensor = batch[2]
        return numbers

    predict_dataloader = Module.val_dataloader


class Writer(BasePredictionWriter):
    """Writer of the predictions of a process, with the positions of the samples in the stream."""

    def __init__(self, notes: Path) -> None:
        super().__init__("epoch")
        self.notes = notes

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Any, batch_indices: Any
    ) -> None:
        torch.save((predictions, batch_indices[0]), self.notes / f"predictions{trainer.global_rank}")


class Rows(StreamCounts):
    """Callback that writes the row of the summary, and the metrics."""

    def __init__(self, notes: Path) -> None:
        super().__init__()
        self.notes = notes

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.global_rank == 0:
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            (self.notes / "rows").write_text(repr((self.summary_rows(), metrics)))


@pytest.mark.parametrize("strategy", [balanced, pytest.param(synchronous, marks=pytest.mark.cluster)])
def test_an_evaluation_and_a_prediction_use_each_sample_once(strategy: Any, tmp_path: Path) -> None:
    divided = "Uneven divides its samples among 2 processes itself"
    whole = "each of 2 processes x 2 workers reads all of Plain and keeps its part"
    for kind, workers, division in ((Uneven, 0, divided), (Plain, 2, whole)):
        for function in ("validate", "predict"):
            notes = tmp_path / f"{kind.__name__} {function}"
            notes.mkdir()
            module = Evaluates(notes, lambda: DataLoader(kind(), BATCH, num_workers=workers), False)  # noqa: B023
            trainer = quiet_trainer(strategy(), 2, callbacks=[Rows(notes), Writer(notes)])
            getattr(trainer, function)(module)
            metrics = {"mean": (SIZE - 1) / 2} if function == "validate" else {}
            expected = [("stream", f"{SIZE} samples\n{division}")], metrics
            assert (notes / "rows").read_text() == repr(expected)
            if function == "validate":
                assert noted(notes, "val") == EVERYTHING
                continue
            results = [torch.load(notes / f"predictions{rank}") for rank in range(2)]
            assert Counter(int(number) for values, _ in results for batch in values for number in batch) == EVERYTHING
            for values, positions in results:
                assert positions == ([batch.tolist() for batch in values] if kind is Plain else [])


def test_uneven_processes_that_wait_for_each_other_in_an_evaluation_are_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("notes").mkdir()
    module = Evaluates(tmp_path / "notes", lambda: DataLoader(Uneven(), BATCH), True)
    error = r"process 1 has 3 batches of Uneven and other processes have more, .*: log at the end of the epoch"
    with pytest.raises(Exception, match=error):
        quiet_trainer(balanced(), 2).validate(module)


def on_a_node(rank: int, port: int, notes: Path) -> None:
    """Train as torchrun's process on one of two nodes with two processes each."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank % 2, "GROUP_RANK": rank // 2, "LOCAL_WORLD_SIZE": 2, "WORLD_SIZE": 4}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="run")
    torch.set_num_threads(1)
    for kind in (Plain, ByWorker):
        part = notes / kind.__name__
        train(part, BalancedDDPStrategy(), 2, lambda kind=kind: DataLoader(kind(), BATCH, num_workers=2), num_nodes=2)


@pytest.mark.cluster
def test_a_stream_is_divided_among_the_processes_of_several_nodes(tmp_path: Path) -> None:
    mp.start_processes(on_a_node, args=(free_port(), tmp_path), nprocs=4, start_method="fork")
    assert [noted(tmp_path / kind.__name__) for kind in (Plain, ByWorker)] == [EVERYTHING] * 2
    for rank in range(4):
        lines = (tmp_path / "Plain" / str(rank)).read_text().splitlines()
        assert {int(number) % 4 for line in lines for number in line.split()[2:]} == {rank}


def test_a_stream_cannot_be_dispatched(tmp_path: Path) -> None:
    dynamic = ParameterServerStrategy(mode="async", data_dispatch="dynamic", start_method="fork")
    with pytest.raises(Exception, match="Plain is a stream without indices, but `data_dispatch: dynamic` assigns"):
        train(tmp_path, dynamic, 2, lambda: DataLoader(Plain(), BATCH))


def test_the_summary_counts_the_samples_of_all_processes(tmp_path: Path) -> None:
    """With ``drop_last`` each process of the uneven stream leaves out its last sample."""

    class Records(StreamCounts):
        def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            rows = [*self.panel_rows(), *self.summary_rows()]
            (tmp_path / f"rows{trainer.global_rank}").write_text(repr(rows))

    def make(size: int) -> DataLoader[Any]:
        return DataLoader(Uneven(), size, drop_last=True)

    train(tmp_path, balanced(), 2, lambda: make(5), max_epochs=2, callbacks=[Records()])
    text = "20 samples, 2 left out by drop_last in each of 2 epochs"
    rows = [("stream", "Uneven divides its samples among 2 processes itself"), ("stream", text)]
    assert [(tmp_path / f"rows{rank}").read_text() for rank in range(2)] == [repr(rows)] * 2
