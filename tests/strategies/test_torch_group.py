"""``torch.distributed`` under the parameter server: rank, world size and collectives, and losses that gather."""

import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanMetric

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.strategies import BalancedDDPStrategy, CompressedDDPStrategy, ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.torch_group import WorkerExchange, close_worker_group, open_worker_group
from tests.conftest import quiet_trainer

SIZE = 48
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"mode": "async"},
    "ssp": {"mode": "ssp", "staleness": 2},
    "local": {"mode": "local", "sync_every": 2},
}
OTHERS: dict[str, Callable[[], Strategy]] = {
    "ddp_fp16": lambda: CompressedDDPStrategy("fp16", start_method="fork"),
    "ddp_balanced": lambda: BalancedDDPStrategy(start_method="fork"),
}


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.sin(torch.arange(4, dtype=torch.float64) + index), torch.tensor(index)


class Stream(IterableDataset[Any]):
    """Stream of the samples of this rank, which asks ``torch.distributed`` or the environment."""

    def __init__(self, by_group: bool) -> None:
        self.by_group = by_group

    def __iter__(self) -> Iterator[Any]:
        if self.by_group:
            rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        else:
            rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD"])
        return iter([Samples()[index] for index in range(rank, SIZE, world)])


class DividedData(LightningModule):
    """Module with a loader for each way to divide the data. It records which samples each loader has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.seen: dict[str, list[int]] = defaultdict(list)

    def train_dataloader(self) -> dict[str, DataLoader[Any]]:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        os.environ |= {"LOCAL_RANK": str(rank), "WORLD": str(world)}
        samples = Samples()
        return {
            "sampler": DataLoader(samples, 4, sampler=DistributedSampler(samples)),
            "subset": DataLoader(Subset(samples, range(rank, SIZE, world)), 4),
            "stream by the group": DataLoader(Stream(by_group=True), 4, num_workers=1),
            "stream by the environment": DataLoader(Stream(by_group=False), 4),
            "whole": DataLoader(samples, 4, shuffle=True),
        }

    def prepare_data(self) -> None:
        """Do nothing. Lightning waits for rank 0 with a group of its own."""

    def training_step(self, batch: dict[str, list[Tensor]], index: int) -> Tensor:
        for name, (_, numbers) in batch.items():
            self.seen[name] += numbers.tolist()
        return self.net(batch["sampler"][0]).square().mean()

    def on_train_epoch_end(self) -> None:
        dist.barrier()
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, dict(self.seen))
        # A metric that is not a submodule uses torch's own group.
        plain = [MeanMetric()]
        plain[0].update(torch.tensor(self.seen["subset"], dtype=torch.float64))
        facts = [dist.get_rank(), dist.get_world_size(), dist.get_backend(), plain[0].compute().item()]
        Path(f"seen-{self.global_rank}.json").write_text(json.dumps([everyones, facts]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fork(**options: Any) -> ParameterServerStrategy:
    return ParameterServerStrategy(start_method="fork", **options)


def trainer_of(strategy: Any, **options: Any) -> Trainer:
    return quiet_trainer(strategy, 2, max_epochs=1, precision="64-true", **options)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.cluster if mode == "ssp" else ()) for mode in MODES]
)
def test_each_sample_is_loaded_once_however_the_users_code_divides_the_data(mode: str) -> None:
    """With the Trainer's defaults, Lightning would divide the subset's part again by a sampler of its own."""
    trainer_of(fork(**MODES[mode])).fit(DividedData())
    for rank in range(2):
        everyones, facts = json.loads(Path(f"seen-{rank}.json").read_text())
        assert facts == [rank, 2, "coordinator", pytest.approx((SIZE - 1) / 2)]
        for name in everyones[0]:
            assert Counter(everyones[0][name] + everyones[1][name]) == Counter(range(SIZE)), name
    assert not dist.is_initialized(), "the process that has started the ranks has no group"


class OwnPart(DividedData):
    """Module with a single loader, of this rank's part of the data."""

    def train_dataloader(self) -> Any:
        return super().train_dataloader()["subset"]

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.seen["subset"] += batch[1].tolist()
        return self.net(batch[0]).square().mean()


@pytest.mark.parametrize("name", [pytest.param("ddp_fp16", marks=pytest.mark.cluster), "ddp_balanced"])
def test_lightning_does_not_divide_a_ranks_part_of_the_data_again(name: str) -> None:
    """With the Trainer's defaults, Lightning would put a sampler of its own into the loader."""
    trainer_of(OTHERS[name]()).fit(OwnPart())
    parts = [json.loads(Path(f"seen-{rank}.json").read_text())[0][rank]["subset"] for rank in range(2)]
    assert parts == [list(range(rank, SIZE, 2)) for rank in range(2)]


class Contrast(LightningModule):
    """A contrastive loss as in SimCLR: the embeddings of all ranks' images are compared with each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def contrast(self, first: Tensor, second: Tensor) -> Tensor:
        logits = nn.functional.normalize(first, dim=1) @ nn.functional.normalize(second, dim=1).T
        return nn.functional.cross_entropy(logits / 0.1, torch.arange(len(logits)))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        views = self.net(batch[0]), self.net(batch[0].roll(1, dims=1))
        by_torch = [torch.cat(functional.all_gather(view)) for view in views]
        by_lightning = [self.all_gather(view, sync_grads=True).flatten(0, 1) for view in views]
        return self.contrast(*by_torch) + self.contrast(*by_lightning)

    def train_dataloader(self) -> DataLoader[Any]:
        images = torch.stack([Samples()[index][0] for index in range(SIZE)])
        return DataLoader(TensorDataset(images), 4, sampler=DistributedSampler(images, shuffle=False))  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional")
def test_a_contrastive_loss_over_all_ranks_trains_the_weights_of_ddp() -> None:
    weights = []
    # If each step is followed by an outer step, mode local makes the steps of ddp.
    for strategy in ("ddp_fork", fork(), fork(mode="local", sync_every=1)):
        module = Contrast()
        trainer_of(strategy).fit(module)
        weights.append(module.net.state_dict())
    for served in weights[1:]:
        torch.testing.assert_close(served, weights[0], rtol=1e-12, atol=1e-12)


def test_a_contrastive_loss_is_refused_by_name_in_a_mode_without_common_steps() -> None:
    with pytest.raises(Exception, match=r"all_gather was called within a training step, but in `mode: async`") as error:
        trainer_of(fork(mode="async")).fit(Contrast())
    assert "use `mode: sync` or strategy ddp" in str(error.value)


def exchange_of(present: list[int], **facts: Any) -> WorkerExchange:
    """Return an exchange of worker 0 of two workers, of which some take part in collectives."""
    strategy: Any = SimpleNamespace(
        steps_in_lockstep=True,
        is_in_batch=True,
        world_size=2,
        options=SimpleNamespace(mode="ssp"),
        collectives=SimpleNamespace(present=present),
        gather=lambda value, operation: dict.fromkeys(present, value),
        reduce=lambda tensor, reduce_op: tensor,
    )
    vars(strategy).update(facts)
    return WorkerExchange(strategy)


def test_a_collective_without_a_lost_worker_ends_the_run_unless_it_is_a_barrier() -> None:
    exchange = exchange_of([0])
    exchange.barrier("barrier")
    for use in (lambda: exchange.gather([], "all_gather"), lambda: exchange.reduce(torch.ones(1), "sum", "all_reduce")):
        with pytest.raises(RunEnded, match="needs the tensors of all workers, but the run has lost worker 1"):
            use()
    assert exchange_of([0, 1]).gather([], "all_gather") == [[], []]


def test_collectives_are_refused_where_workers_do_not_step_together(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange_of([0, 1]).check("all_reduce")
    exchange_of([0, 1], steps_in_lockstep=False, is_in_batch=False).check("all_reduce")
    with pytest.raises(ConfigurationError, match="all_reduce was called within a training step, but in `mode: ssp`"):
        exchange_of([0, 1], steps_in_lockstep=False).check("all_reduce")
    exchange = exchange_of([0, 1])
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(ConfigurationError, match=r"a loader's worker process: .* set num_workers to 0"):
        exchange.check("all_reduce")


def test_a_group_of_the_users_script_is_kept(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert not open_worker_group(ParameterServerStrategy())
    assert dist.get_backend() == "gloo"


def test_a_group_can_be_opened_again_and_leaves_the_tracebacks_as_they_were() -> None:
    hook = sys.excepthook
    for _ in range(2):
        assert open_worker_group(SimpleNamespace(global_rank=5, world_size=2, alone=True))  # type: ignore[arg-type]
        assert (dist.get_rank(), dist.get_world_size()) == (5, 2), "a joiner's rank is not below the world size"
        assert sys.excepthook is hook
        close_worker_group()
        close_worker_group()
