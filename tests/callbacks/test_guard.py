"""The guard finds planted faults and names them, is silent otherwise, and does not change what is trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import quiet_trainer
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from ranks import run_apart
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.callbacks import Guard
from cnnstrategies.guarding.findings import Finding


class Digits(LightningModule):
    """Training of a small network with batch normalisation and dropout on random images."""

    def __init__(self) -> None:
        super().__init__()
        seed_everything(1, verbose=False)
        self.network = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(4 * 36, 5)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, targets = batch
        return nn.functional.cross_entropy(self.network(images), targets)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.network(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def images(count: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(count, 1, 8, 8, generator=generator), torch.randint(5, (count,), generator=generator)
    )
    return DataLoader(data, 4, shuffle=True)


def findings_of(
    folder: Path,
    module: Callable[[], LightningModule],
    *callbacks: Callback,
    guard: Guard | None = None,
    strategy: Any = "auto",
    devices: int = 1,
    steps: int = 60,
    **options: Any,
) -> list[list[Finding]]:
    """Return the findings of the guard on each rank of a training in a process of its own."""

    class Report(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            torch.save(watch.findings, folder / f"findings-{trainer.global_rank}")
            state = trainer.strategy.lightning_module_state_dict()
            if trainer.is_global_zero:
                torch.save(state, folder / "weights")

    watch = guard or Guard(every=20)

    def train() -> None:
        trainer = quiet_trainer(
            strategy,
            devices,
            callbacks=[*callbacks, watch, Report()],
            max_steps=steps,
            use_distributed_sampler=True,
            **options,
        )
        trainer.fit(module(), images(160), images(8))

    folder.mkdir(exist_ok=True)
    run_apart(train)
    return [torch.load(folder / f"findings-{rank}", weights_only=False) for rank in range(devices)]


def test_a_sound_training_has_no_finding(tmp_path: Path) -> None:
    assert findings_of(tmp_path / "1", Digits) == [[]]
    assert findings_of(tmp_path / "2", Digits, strategy="ddp_fork", devices=2) == [[], []]


class Flip(Callback):
    def __init__(self, name: str, rank: int = 1, step: int = 30) -> None:
        self.name, self.rank, self.step = name, rank, step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            value = pl_module.get_parameter(self.name).data.view(-1)
            value[:1].view(torch.int32).bitwise_xor_(1 << 5)


def test_a_flipped_bit_of_a_weight_on_one_rank(tmp_path: Path) -> None:
    ranks = findings_of(tmp_path, Digits, Flip("network.5.bias"), strategy="ddp_fork", devices=2)
    for rank in ranks:
        assert [(f.check, f.rank, f.step, f.tensor) for f in rank] == [
            ("replicas", 1, 40, "network.5.bias"),
            ("replicas", 1, 60, "network.5.bias"),
        ]
