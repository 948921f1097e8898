"""Faults in a user's code: `verify` names the first value that differs, its rank, and the kind of cause."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import cnnstrategies
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.verifying import forked_runs
from cnnstrategies.verifying.loaded_batches import LoadedBatches
from cnnstrategies.verifying.recorder import RunRole


def is_rank_1() -> bool:
    return os.environ.get("LOCAL_RANK") == "1"


class Plain(LightningModule):
    """A module without a fault."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 4, 3)
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3))
        self.example_input_array = torch.zeros(2, 1, 6, 6)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(self.first(images))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Block(nn.Module):
    """A layer with a random draw in a function, which cannot be turned off from outside."""

    def forward(self, images: Tensor) -> Tensor:
        return images * (torch.rand_like(images) > 0.3)  # Functions for dropout are turned off.


class Masks(Plain):
    def forward(self, images: Tensor) -> Tensor:
        activations = self.first(images)
        return self.net(activations * (activations > activations.median()))


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(self.normalised)

    def normalised(self, layer: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        return output / output.abs().max()


class LosesAGradient(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradient = self.net[1].weight.grad
        assert gradient is not None
        gradient.mul_(0.5 if is_rank_1() else 1.0)


class Rates(Plain):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and is_rank_1():
            self.optimizers().param_groups[0]["lr"] = 0.2  # type: ignore[union-attr]


class Statistics(Plain):
    def on_train_start(self) -> None:
        if is_rank_1():
            self.net[0].running_mean.add_(0.1)


class Ends(Plain):
    """A module whose weights differ on rank 1 only, and only after the last step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and is_rank_1():
            self.first.weight.data.mul_(1.01)


class States(Plain):
    """A module under whose strategies the optimizer's state gets an entry that changes no weight."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.world_size == 2:
            self.optimizers().state[self.first.weight]["extra"] = torch.ones(1)  # type: ignore[union-attr]


class Momentum(Plain):
    """A module whose statistics end differently on rank 1 only, without an effect on its training."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if is_rank_1():
            self.net[0].momentum = 0.5


class Late(Plain):
    """A module with a parameter that is created in the first step, and that DDP does not reduce."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Parameter(self.first.bias.detach().new_ones(1))
            self.optimizers().param_groups[0]["params"].append(self.late)  # type: ignore[union-attr]

    def forward(self, images: Tensor) -> Tensor:
        return self.net(self.first(images) * self.late if hasattr(self, "late") else self.first(images))


class ScaledGradients(Plain):
    def training_step(self, batch: Any, index: int) -> Tensor:
        scores = self(batch[0])
        if scores.requires_grad:
            scores.register_hook(lambda gradient: gradient / gradient.norm())
        return F.cross_entropy(scores, batch[1])


CASES: dict[str, tuple[LightningModule, str, str, str]] = {
    "draw": (
        Plain(Block()),
        "ddp",
        "first: output of net.0, step 1, rank 0: ",
        "a random draw: net.0 (Block) draws random numbers",
    ),
    "statistic": (
        Plain(nn.BatchNorm2d(4, track_running_stats=False)),
        "parameter_server",
        "first: output of net.0, step 1, rank 0: ",
        "a statistic of one process: net.0 (BatchNorm2d) normalises",
    ),
    "code": (
        Masks(),
        "ddp",
        "first: input of net, step 1, rank 0: ",
        "code between first and net, which mixes samples",
    ),
    "hook": (Hooked(), "ddp", "first: input of net, step 1, rank 0: ", "a hook: Hooked.normalised of first changes"),
    "tensor hook": (
        ScaledGradients(),
        "ddp",
        "first: gradient of net.0, step 1, rank 0: ",
        "the backward pass of the code or hooks after net.0",
    ),
    "gradient": (
        LosesAGradient(),
        "hybrid_pipeline",
        "first: final gradient of net.1.weight, step 1, rank 1: ",
        "gradient clipping, or on_before_optimizer_step: the gradient of net.1.weight agrees",
    ),
    "rate": (
        Rates(),
        "spatial",
        "first: weight of first.weight, step 3, rank 1: ",
        "the optimizer's step or gradient clipping on rank 1 only: gradients agree",
    ),
    "buffer of rank 1": (
        Momentum(nn.BatchNorm2d(4)),
        "spatial",
        "first: buffer of net.0.running_mean, step 2, rank 1: ",
        "a buffer that differs between processes: net.0.running_mean",
    ),
    "end of rank 1": (
        Ends(),
        "ddp",
        "first: weight of first.weight, after the last step (3), rank 1: ",
        "the optimizer's step or gradient clipping on rank 1 only: gradients agree",
    ),
    "late": (Late(), "ddp", "first: weight of late, step 2, rank 0: ", "a gradient that is not combined"),
    "buffer": (
        Statistics(nn.BatchNorm2d(4)),
        "parameter_server",
        "first: buffer of net.0.running_mean, step 1, rank 1: ",
        "a buffer that differs between processes: net.0.running_mean",
    ),
}


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images, targets = torch.randn(24, 1, 6, 6, generator=generator), torch.randint(3, (24,), generator=generator)
    return DataLoader(TensorDataset(images, targets), 4)


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_named_with_its_place_and_kind(case: str) -> None:
    module, strategy, first, cause = CASES[case]
    verdict = cnnstrategies.verify(module, loader(), strategy, steps=3)
    assert not verdict.equal
    assert any(note.startswith(first) for note in verdict.notes), verdict
    assert any(note.startswith(f"likely cause: {cause}") for note in verdict.notes), verdict


@pytest.mark.parametrize(
    ("precision", "strategy"), [("32-true", "ddp"), ("bf16-mixed", "hybrid_pipeline"), ("16-mixed", "parameter_server")]
)
def test_rounding_is_measured_in_lower_precisions(precision: Any, strategy: str) -> None:
    verdict = cnnstrategies.verify(Plain(nn.BatchNorm2d(4)), loader(), strategy, steps=3, precision=precision)
    assert verdict.equal, verdict
    sizes = {row.name: float(row.text.split("difference ")[1].split(";")[0]) for row in verdict.rows[:3]}
    assert sizes["weights"] > 1e-9, "the runs are not in float64"
    faulty = Hooked() if strategy != "hybrid_pipeline" else LosesAGradient()
    verdict = cnnstrategies.verify(faulty, loader(), strategy, steps=2, precision=precision)
    assert not verdict.equal, verdict
    place = "input of net, step 1, rank 0"
    if strategy == "hybrid_pipeline":
        place = "final gradient of net.1.weight, step 1, rank 1"
    assert any(note.startswith(f"first: {place}: ") for note in verdict.notes), verdict


@pytest.mark.light
def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="precision=bf16-true: verify trains in one of 64-true, 32-true, bf16"):
        cnnstrategies.verify(Plain(), loader(), precision="bf16-true")  # type: ignore[arg-type]


def test_runs_with_errors_of_rounding_are_made_once_and_traced_runs_save_no_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roles: list[RunRole] = []
    train_in_fork = forked_runs.train_in_fork
    monkeypatch.setattr(
        forked_runs, "train_in_fork", lambda train, role: (roles.append(role), train_in_fork(train, role))
    )
    module, strategy, first, _ = CASES["end of rank 1"]
    verdict = cnnstrategies.verify(module, loader(), strategy, steps=3, precision="32-true")
    assert any(note.startswith(first) for note in verdict.notes), verdict
    assert [role.folder.name for role in roles] == ["tested", "reference", "noise-1", "noise-2", "tested", "reference"]
    assert [role.saves_trace for role in roles] == [False, False, True, True, True, True]
    assert not any(role.saves_steps for role in roles)


def test_a_step_whose_optimizer_states_differ_is_named() -> None:
    verdict = cnnstrategies.verify(States(), loader(), "ddp", steps=3)
    assert verdict.notes[0].startswith("first difference after step 2: optimizer: "), verdict
    assert {row.name for row in verdict.rows if not row.equal} == {"optimizer"}


@pytest.mark.light
def test_runs_load_the_same_batches_if_all_files_of_all_ranks_are_equal(tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder in folders:
        for rank in range(2):
            (folder / str(rank)).mkdir(parents=True)
            torch.save([torch.full((2, 3), rank)], folder / str(rank) / "0.pt")
    assert LoadedBatches(folders[0]).equals(LoadedBatches(folders[1]))
    torch.save([torch.full((2, 3), 5)], folders[1] / "1" / "0.pt")
    assert not LoadedBatches(folders[0]).equals(LoadedBatches(folders[1]))
