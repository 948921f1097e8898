"""A checkpoint is no strategy's own: it is resumed under any other, or on one device; `test_chain.py` evaluates it."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from digit_runs import ADAMW, assert_same_run, train
from test_hybrid_pipeline import hybrid
from test_parameter_server import served


def test_resumes_under_any_other_strategy() -> None:
    """An epoch each under servers, pipelines, DDP and one process, as if one process had not stopped.

    Lightning loads a checkpoint before it converts the module to float64, so each resumption rounds to float32.
    """
    options: dict[str, Any] = {
        "model": {"optimizer": ADAMW, "lr_scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)},
        "data": {"drop_last": True},
    }
    chain: dict[str, tuple[Any, int]] = {
        "2-1": (hybrid(replicas=[2, 1], cuts=["2"], microbatches=4, schedule="gpipe", placement="replicas"), 3),
        "two servers": (served(servers=2), 2),
        "ddp": ("ddp_fork", 2),
        "one": ("auto", 1),
    }
    whole = train("whole", **options, max_epochs=len(chain))
    previous = None
    for epochs, (name, (strategy, devices)) in enumerate(chain.items(), start=1):
        last = train(name, strategy, devices, **options, ckpt_path=previous, max_epochs=epochs)
        previous = Path(name, "last.ckpt").resolve()
    assert_same_run(last, whole, rtol=1e-4)
