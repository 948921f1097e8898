"""Tests of networks that `configure_model` builds under the whole step: each rank holds only its own stage."""

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

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline import placed_module
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart, run_ranks
from tests.strategies.test_own_stage import AnotherEachTime, Module, OnMeta, OnMetaAtOnce, assert_same, loader, saved


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


def trainer_of(replicas: list[int], epochs: int, name: str, **options: Any) -> Trainer:
    strategy: Any = "auto"
    if dist.is_initialized():  # The ranks have the environment of a cluster's launcher.
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": str(sum(replicas))}
    if replicas:
        options = {"cuts": ["1", "3"][: len(replicas) - 1], "microbatches": replicas[0] ** 2, **options}
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


def programs(folder: Path, replicas: list[int], has_teacher: bool) -> list[Any]:
    """Train a network with batch normalisation, and go on from a checkpoint of one process; or train with a teacher."""
    torch.manual_seed(7)
    if has_teacher:
        return [fit(Teacher(), replicas, 1, f"{folder}/{replicas}")]
    placed_module.SMALL = 64  # So that parts of checkpoints are received in files.
    first = fit_and_validate(Module(True), replicas, f"{folder}/{replicas}")
    return [first, fit(Module(True), replicas, 2, f"{folder}/on {replicas}", f"{folder}/start/last.ckpt")]


def start(folder: Path) -> None:
    torch.manual_seed(9)
    fit(Module(True), [], 1, f"{folder}/start")


# Replicas need several microbatches, in which batch normalisation would have other statistics.
@pytest.mark.parametrize(
    ("replicas", "has_teacher"),
    [
        pytest.param([1, 1, 1], False, marks=pytest.mark.cluster),
        pytest.param([1, 1, 1], True, marks=pytest.mark.cluster),
        pytest.param([2, 1], True, marks=pytest.mark.cluster),
    ],
    ids=str,
)
def test_stages_that_are_built_separately_equal_one_process(
    tmp_path: Path, replicas: list[int], has_teacher: bool
) -> None:
    if not has_teacher:
        run_apart(start, tmp_path)
    expected = run_apart(programs, tmp_path, [], has_teacher)
    ranks = run_ranks(sum(replicas), programs, tmp_path, replicas, has_teacher)
    for name in ("",) if has_teacher else ("", "on "):
        assert_same(saved(f"{tmp_path}/{name}{replicas}"), saved(f"{tmp_path}/{name}[]"))
    for number, (logged, names) in enumerate(expected):
        for rank in ranks:
            assert_same(rank[number][0], logged)
        held = [rank[number][1] for rank in ranks]
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
