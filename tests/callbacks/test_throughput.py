from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cnnstrategies.callbacks import throughput
from cnnstrategies.callbacks.throughput import SamplesPerSecond


def test_first_step_and_validation_are_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(throughput, "time", SimpleNamespace(monotonic=lambda: now[0]))
    two_ranks = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda value, reduce_op: 2 * value)
    trainer: Any = SimpleNamespace(strategy=two_ranks, is_last_batch=False)
    logged: dict[str, float] = {}
    module: Any = SimpleNamespace(log=lambda name, value, **_: logged.update({name: value}))
    callback = SamplesPerSecond()

    def step(seconds: float) -> None:
        now[0] += seconds
        callback.on_train_batch_end(trainer, module, None, {"names": ["of a file"] * 8, "images": torch.zeros(8, 3)}, 0)

    for epoch in range(2):
        callback.on_train_epoch_start(trainer, module)
        if epoch == 0:
            step(100.0)
        step(1.0)
        now[0] += 50.0
        callback.on_validation_end(trainer, module)
        step(1.0)
        callback.on_train_epoch_end(trainer, module)
        assert logged["samples_per_s"] == 2 * (8 + 8) / (1.0 + 1.0)
    assert callback.mean == 16
