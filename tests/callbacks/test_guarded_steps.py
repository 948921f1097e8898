"""The guard finds errors that all ranks make alike: in gradients, clipping, schedules, statistics, modes and states."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from cnnstrategies.callbacks import Guard
from cnnstrategies.guarding.calls import ScheduleHistory, ScheduleState
from tests.callbacks.test_guard import Small, images, train
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart


class Scheduled(Small):
    """Training with a schedule and clipped gradients."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def factor(self, step: int) -> float:
        return 1 - step / 100


class Wrong(Scheduled):
    """Training that keeps its gradients, clips too late, steps its schedule twice, and validates in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone[1].momentum = 0.0

    def optimizer_zero_grad(self, *_: Any) -> None:
        pass

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        pass

    def on_train_batch_end(self, *_: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        self.lr_schedulers().step()  # type: ignore[union-attr]

    def on_validation_model_eval(self) -> None:
        pass


class Still(Scheduled):
    """Training whose schedule makes no steps, with a learning rate that is rounded to 0."""

    def lr_scheduler_step(self, *_: Any) -> None:
        pass

    def factor(self, step: int) -> float:
        return float(-step // 1)


class Slow(Small):
    """Training with small updates."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-6)


class Rounds(Callback):
    """Callback that keeps weights in bfloat16."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.data = parameter.data.bfloat16().float()


def checks(ranks: list[list[Any]]) -> set[tuple[str, str]]:
    return {(check, tensor) for rank in ranks for check, _, _, tensor in rank}


def test_steps_that_are_made_in_a_wrong_way(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.01, "val_check_interval": 10}
    assert checks(train(tmp_path / "sound", Scheduled, **options)) == set()
    assert checks(train(tmp_path / "wrong", Wrong, **options)) == {
        ("calls", "gradients"),
        ("calls", "the norm of gradients"),
        ("rates", "the learning rate's schedule"),
        ("moves", "backbone.1"),
        ("modes", "backbone.1 (and 1 others)"),
    }
    assert checks(train(tmp_path / "slow", Slow)) == set()
    assert checks(train(tmp_path / "rounded", Slow, Rounds())) == {("moves", "weights")}
    rates = {("rates", "the learning rate"), ("rates", "the learning rate's schedule")}
    assert checks(train(tmp_path / "still", Still)) == rates


@pytest.mark.parametrize("has_states", [True, False])
def test_a_checkpoint_without_states_is_found_when_it_is_saved_and_when_it_is_loaded(
    has_states: bool, tmp_path: Path
) -> None:
    class Forgets(Scheduled):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if not has_states:
                checkpoint["optimizer_states"] = checkpoint["lr_schedulers"] = []

    saved = train(tmp_path / "saved", Forgets, enable_checkpointing=True, default_root_dir=tmp_path)
    file = next(tmp_path.rglob("*.ckpt"))

    def resume() -> None:
        guard = Guard(every=20)
        trainer = quiet_trainer("auto", 1, callbacks=[guard], max_steps=90)
        trainer.fit(Scheduled(), images(160), ckpt_path=file)
        torch.save(guard.findings, tmp_path / "resumed")

    run_apart(resume)
    loaded = {(finding.check, finding.tensor) for finding in torch.load(tmp_path / "resumed", weights_only=False)}
    if has_states:
        assert [checks(saved), loaded] == [set(), set()]
    else:
        assert {check for check, _ in checks(saved)} == {"checkpoint"}
        assert loaded == {("checkpoint", "the optimizer's state"), ("checkpoint", "the learning rate's schedule")}


@pytest.mark.light
@pytest.mark.parametrize(
    ("made", "result"), [([0, 3, 6, 9], None), ([0, 6, 12, 18], (12, 6)), ([5, 5, 5, 5], (0, 6)), ([0, 3, 8, 10], None)]
)
def test_a_schedule_is_compared_with_the_steps_that_were_due(made: list[int], result: tuple[int, int] | None) -> None:
    history = ScheduleHistory()
    results = [history.wrong([ScheduleState(1, number, 3 * check)]) for check, number in enumerate(made)]
    assert results == [None, None, result, None]
