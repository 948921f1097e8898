"""Tests of networks that `configure_model` builds: each rank holds only its own stage, and values equal one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline import placed_module
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart, run_ranks


class Network(nn.Sequential):
    """A network of three stages that branches on a shape, which needs no values."""

    def __init__(self, norm: bool) -> None:
        middle = nn.BatchNorm2d(40) if norm else nn.Identity()
        super().__init__(nn.Conv2d(1, 40, 3), middle, nn.Tanh(), nn.Conv2d(40, 4, 3), nn.Tanh(), nn.Linear(16, 3))
        nn.init.trunc_normal_(self[0].weight, std=0.3)
        nn.init.trunc_normal_(self[3].weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:5]:
            x = layer(x)
        if x.shape[-1] < 2:
            raise ValueError("the images are too small")
        return self[5](x.flatten(1))


class Module(LightningModule):
    """A user's module that builds its network in `configure_model`."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.network: nn.Module | None = None

    def configure_model(self) -> None:
        if self.network is None:
            self.network = self.build()

    def build(self) -> nn.Module:
        return Network(self.norm)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.network(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class OnMeta(Module):
    def build(self) -> nn.Module:
        with torch.device("meta"):
            return super().build()


class OnMetaAtOnce(OnMeta):
    def __init__(self) -> None:
        super().__init__()
        self.configure_model()


class AnotherEachTime(Module):
    count = 0

    def build(self) -> nn.Module:
        type(self).count += 1
        return nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(type(self).count + 3)))


class Teacher(Module):
    """A module with a scale outside of the network, a teacher made in `configure_model`, and a loss of both."""

    def configure_model(self) -> None:
        if self.network is None:
            super().configure_model()
            self.teacher = self.build().requires_grad_(False)
            self.scale = nn.Parameter(torch.rand(()) + self.network[3].bias.detach().sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.network(batch[0])
        loss = F.cross_entropy(outputs, batch[1]) + self.scale * F.mse_loss(outputs, self.teacher(batch[0]))
        self.log("loss", loss, on_epoch=True, on_step=False)
        for slow, fast in zip(self.teacher.parameters(), self.network.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)
        return loss


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 1, 6, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(images, torch.randint(3, (32,), generator=generator)), 16)


def trainer_of(replicas: list[int], epochs: int, name: str, **options: Any) -> Trainer:
    strategy: Any = "auto"
    if dist.is_initialized():  # The ranks have the environment of a cluster's launcher.
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": str(sum(replicas))}
    if replicas:
        unequal = {"microbatches": replicas[0] ** 2, "shares": [3, *[1] * (sum(replicas) - 1)]}
        options = {"cuts": ["1", "3"][: len(replicas) - 1], **unequal, **options}
        strategy = HybridPipelineStrategy(replicas=replicas, submodule="network", **options)
    return quiet_trainer(
        strategy,
        sum(replicas) or 1,
        max_epochs=epochs,
        precision="64-true",
        callbacks=[ModelCheckpoint(dirpath=name, filename="last", enable_version_counter=False)],
        enable_checkpointing=True,
        use_distributed_sampler=False,
    )


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


def saved(name: str) -> dict[str, Any]:
    checkpoint = torch.load(f"{name}/last.ckpt", weights_only=True)
    states = checkpoint["optimizer_states"][0]["state"]
    return checkpoint["state_dict"] | {
        f"{index}.{key}": value for index in states for key, value in states[index].items()
    }


def held_by(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if not parameter.is_meta}


def fit(module: Module, replicas: list[int], epochs: int, name: str, resume: str | None = None) -> Any:
    """Return the metrics of a fit, and the names of the parameters that this rank then holds."""
    trainer = trainer_of(replicas, epochs, name)
    trainer.fit(module, loader(), ckpt_path=resume)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, held_by(module)


def fit_and_validate(module: Module, replicas: list[int], name: str) -> Any:
    """Fit, validate what the fit has left, and validate the last checkpoint.

    Returns:
        The metrics of fit with the loss of the validations, and the names of the parameters that this rank holds.
    """
    trainer = trainer_of(replicas, 2, name)
    trainer.fit(module, loader(), loader())
    held = held_by(module)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    (now,) = trainer.validate(module, loader(), verbose=False)
    (again,) = trainer.validate(module, loader(), ckpt_path=f"{name}/last.ckpt", verbose=False)
    assert held_by(module) == held
    assert_same(now["val_loss"], again["val_loss"])
    return {**logged, "validated": now["val_loss"]}, held


def start(folder: Path, norm: bool) -> None:
    torch.manual_seed(9)
    fit(Module(norm), [], 1, f"{folder}/start")


def run(folder: Path, replicas: list[int], norm: bool, how: str) -> Any:
    """Fit and validate, go on from a checkpoint of one process, or train with a teacher."""
    torch.manual_seed(7)
    placed_module.SMALL = 64  # So that parts of checkpoints are received in files.
    match how:
        case "fit":
            return fit_and_validate(Module(norm), replicas, f"{folder}/{replicas}")
        case "resume":
            return fit(Module(norm), replicas, 2, f"{folder}/{replicas}", f"{folder}/start/last.ckpt")
        case _:
            return fit(Teacher(), replicas, 1, f"{folder}/{replicas}")


# Replicas need several microbatches, in which batch normalisation would have other statistics.
@pytest.mark.parametrize(
    ("replicas", "norm", "how"),
    [
        ([1, 1, 1], True, "fit"),
        pytest.param([1, 1, 1], True, "resume", marks=pytest.mark.cluster),
        pytest.param([1, 1, 1], False, "teacher", marks=pytest.mark.cluster),
        pytest.param([2, 1], False, "resume", marks=pytest.mark.cluster),
        pytest.param([2, 1], False, "teacher", marks=pytest.mark.cluster),
    ],
    ids=str,
)
def test_stages_that_are_built_separately_equal_one_process(
    tmp_path: Path, replicas: list[int], norm: bool, how: str
) -> None:
    if how == "resume":
        run_apart(start, tmp_path, norm)
    expected, names = run_apart(run, tmp_path, [], norm, how)
    ranks = run_ranks(sum(replicas), run, tmp_path, replicas, norm, how)
    assert_same(saved(f"{tmp_path}/{replicas}"), saved(f"{tmp_path}/[]"))
    for logged, _ in ranks:
        assert_same(logged, expected)
    held = [names for _, names in ranks]
    assert set.union(*held) == names
    of_stages = [{name for name in part if name.startswith(("network", "teacher"))} for part in held]
    if replicas == [1, 1, 1]:
        assert sum(map(len, of_stages)) == len(set.union(*of_stages)), "no two ranks hold the same parameter"


def refused(module: LightningModule, **options: Any) -> str:
    trainer = trainer_of([2, 1], 1, "never", **options)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(module, loader())
    return str(caught.value)


def test_options_that_need_the_whole_network_are_refused_first() -> None:
    assert "name the cuts, or build it in __init__" in refused(Module(), cuts=None)
    assert "use start_method popen" in refused(Module(), start_method="fork")
    assert "OnMetaAtOnce.network.0.weight is on the meta device" in refused(OnMetaAtOnce())


def own_part(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Fit with a different seed on each rank.

    Returns:
        The parameters that a rank then holds, and error messages of later calls.
    """
    torch.manual_seed(dist.get_rank())
    module, trainer = Module(), trainer_of([2, 1], 1, f"{folder}/drawn")
    trainer.fit(module, loader())
    part = {name: parameter.detach() for name, parameter in module.named_parameters() if not parameter.is_meta}
    with pytest.raises(ConfigurationError) as late:
        trainer.save_checkpoint("late.ckpt")
    return part, [str(late.value), *(refused(module) for module in (OnMeta(), AnotherEachTime()))]


def test_replicas_start_equal_and_refusals_name_what_a_rank_cannot_build_or_save(tmp_path: Path) -> None:
    (first, messages), (second, _), (last, _) = run_ranks(3, own_part, tmp_path)
    assert first.keys() == second.keys()
    assert first.keys().isdisjoint(last)
    for name in first:
        assert torch.equal(first[name], second[name]), name
    late, on_meta, another = messages
    assert "let ModelCheckpoint save it during fit" in late
    assert "on the meta device: build it without torch.device('meta')" in on_meta
    assert "AnotherEachTime.configure_model builds a different network each time" in another
