"""The whole step in each precision of Lightning, compared with one device."""

import os
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.pipeline.early_sums import EarlySums
from cnnstrategies.pipeline.replicas import StageReplicas
from cnnstrategies.strategies import HybridPipelineStrategy
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart, run_ranks
from tests.strategies.whole_step_cases.base import CLASSES, Block

BATCHES = 6
OVERFLOW = 2  # Index of the batch in whose backward a gradient of the first stage is infinite.


class Program(LightningModule):
    """A classifier with a layer outside of the divided network, which clips gradients and writes down what it reads."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), Block(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        self.net = nn.Sequential(*layers, nn.Linear(32, 16))
        self.head = nn.Linear(16, CLASSES)
        self.norms: list[float] = []
        self.overflows = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        self.overflows = batch_idx == OVERFLOW and self.current_epoch == 0
        outputs = self.head(F.relu(self.net(images)))
        loss = F.cross_entropy(outputs.float() if outputs.dtype == torch.float16 else outputs, targets)
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class Scales(Callback):
    """Makes a gradient infinite, and writes down the loss scales."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        parameter = next(pl_module.net.parameters())
        parameter.register_hook(lambda gradient: gradient * float("inf") if pl_module.overflows else gradient)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]


class Drifting(Program):
    """A program whose losses differ between ranks, as copies of a loss may differ in the last bit on GPUs.

    At the end, each rank of the last stage has its own copies of parameters in ``copies``.
    """

    copies: dict[str, Tensor]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = torch.tensor(1 + 1e-3 * self.trainer.global_rank)
        loss = super().training_step(batch, batch_idx)
        return loss + factor * sum(parameter.square().sum() for parameter in self.parameters())

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.places.local():
            if self.trainer.global_rank:
                parts = {"head": self.head, "net": self.net[5]}
                self.copies = {name: part.weight.detach().clone() for name, part in parts.items()}


class Trained(NamedTuple):
    """Result of a training.

    Attributes:
        state: State dict of the module.
        norms: Norms of all gradients in each step of the optimizer, after the division by the loss scale.
        scales: The loss scale after each batch.
        saved: State of the precision plugin in the checkpoint.
        steps: Number of steps of the optimizer.
        loss: Mean loss of the last epoch.
        sums: Number of times that gradients were summed over replicas on this rank.
        copies: Number of times that gradients were copied from the first replica to this rank, or from this rank.
    """

    state: dict[str, Tensor]
    norms: list[float]
    scales: list[float]
    saved: Any
    steps: int
    loss: float
    sums: int
    copies: int


def loader(rank: int, parts: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    images, targets = torch.randn(8 * BATCHES, 3, 8, 8, generator=generator), torch.arange(8 * BATCHES) % CLASSES
    return DataLoader(TensorDataset(images[rank::parts], targets[rank::parts]), 8 // parts)


def train(precision: str, strategy: Any, devices: int) -> Trained:
    torch.manual_seed(0)
    sums, sum_in_place, finish = [], StageReplicas.sum_in_place, EarlySums.finish
    copies, copy_from_first = [], StageReplicas.copy_from_first

    def counted(replicas: StageReplicas, gradients: Any) -> None:
        sums.append(len(gradients))
        sum_in_place(replicas, gradients)

    def counted_early(early: EarlySums, parameters: Any, parts: Any) -> None:
        sums.append(len(parts))
        finish(early, parameters, parts)

    def counted_copies(replicas: StageReplicas, gradients: Any) -> None:
        copies.extend([gradients] if gradients else [])
        copy_from_first(replicas, gradients)

    StageReplicas.sum_in_place = counted  # type: ignore[method-assign]
    StageReplicas.copy_from_first = counted_copies  # type: ignore[method-assign]
    EarlySums.finish = counted_early  # type: ignore[method-assign]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) if precision == "16-mixed" else None
    # The precision is a plugin because `precision="16-mixed"` becomes bf16 on CPUs.
    options: dict[str, Any] = {"precision": precision}
    if scaler is not None:
        options = {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
        options["accumulate_grad_batches"] = 2
    scales = Scales()
    callbacks = [] if scaler is None else [scales]
    parts = strategy.loading_processes(devices) if devices > 1 else 1
    module = Program()
    batches = loader(dist.get_rank() % parts if devices > 1 else 0, parts)
    options |= {"gradient_clip_val": 0.5, "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy, devices, max_epochs=1, callbacks=callbacks, **options)
    trainer.fit(module, batches)
    if scaler is None:
        loss = float(trainer.callback_metrics["loss_epoch"])
        StageReplicas.sum_in_place = sum_in_place  # type: ignore[method-assign]
        counts = len(sums), len(copies)
        return Trained(module.state_dict(), module.norms, [], {}, trainer.global_step, loss, *counts)
    path = f"{precision}{devices}.ckpt"
    trainer.save_checkpoint(path)
    if devices > 1:
        dist.barrier()
    saved = torch.load(path, weights_only=False)
    trainer.fit_loop.max_epochs = 2
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0, "_growth_tracker": 0})
    trainer.fit(module, batches, ckpt_path=path)
    loss = float(trainer.callback_metrics["loss_epoch"])
    StageReplicas.sum_in_place = sum_in_place  # type: ignore[method-assign]
    return Trained(
        module.state_dict(),
        module.norms,
        scales.scales,
        saved["MixedPrecision"],
        trainer.global_step,
        loss,
        len(sums),
        len(copies),
    )


def alone(precisions: list[str]) -> list[Trained]:
    return [train(precision, "auto", 1) for precision in precisions]


def on_rank(precisions: list[str]) -> tuple[list[Trained], dict[str, Tensor]]:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": "3"}
    results = [train(precision, whole_step(), 3) for precision in precisions]
    module = Drifting()
    quiet_trainer(whole_step(), 3, max_epochs=1, use_distributed_sampler=False).fit(module, loader(0, 1))
    return results, getattr(module, "copies", {})


def whole_step() -> HybridPipelineStrategy:
    return HybridPipelineStrategy(replicas=[1, 2], cuts=["1"], microbatches=4, submodule="net")


# Largest difference of a parameter and relative difference of a norm, for each precision.
LIMITS = {"64-true": 1e-12, "bf16-mixed": 1e-2, "bf16-true": 3e-2, "16-true": 3e-3, "16-mixed": 2e-3}


@pytest.mark.parametrize(
    "precisions",
    [
        ["64-true", "16-mixed"],
        pytest.param(["bf16-mixed", "bf16-true", "16-true"], marks=pytest.mark.cluster),
    ],
    ids=" ".join,
)
def test_each_precision_trains_as_on_one_device(precisions: list[str]) -> None:
    expected: list[Trained] = run_apart(alone, precisions)
    ranks = run_ranks(3, on_rank, precisions)
    for rank, (results, _) in enumerate(ranks):
        for precision, single, several in zip(precisions, expected, results, strict=True):
            text = f"{precision} on rank {rank}"
            for name, value in single.state.items():
                assert several.state[name].dtype == value.dtype, text
                torch.testing.assert_close(
                    several.state[name], value, rtol=0, atol=LIMITS[precision], msg=f"{text}: {name}"
                )
            assert several.norms == pytest.approx(single.norms, rel=20 * LIMITS[precision], nan_ok=True), text
            assert several.loss == pytest.approx(single.loss, rel=LIMITS[precision]), text
            assert (several.scales, several.saved, several.steps) == (single.scales, single.saved, single.steps), text
            steps = single.steps if rank else 0
            assert several.sums == steps, f"{text}: once for each step of the optimizer"
            assert several.copies == steps, f"{text}: the gradients of the head"
    copies, others = ranks[1][1], ranks[2][1]
    assert all(torch.equal(copies[name], others[name]) for name in ("head", "net")), "replicas have equal parameters"
    if "16-mixed" not in precisions:
        return
    mixed = expected[-1]
    assert mixed.scales[:4] == [1024.0, 1024.0, 1024.0, 512.0], "the second step is skipped"
    assert mixed.saved["scale"] == mixed.scales[BATCHES - 1]
