"""What the workers of a parameter server send, receive and wait for."""

from dataclasses import astuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.paramserver.counters import Counters


class ServerTraffic(Callback):
    """Logs a worker's traffic with the servers at the end of each training epoch; under other strategies nothing.

    ``servers/sent_mb`` and ``servers/received_mb`` are megabytes per step, ``servers/waited_ms`` is the time per step
    in which the worker had nothing to do but wait for parameters: means over the workers.
    """

    def __init__(self) -> None:
        self._last = Counters()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = Counters()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = getattr(trainer.strategy, "counters", None)
        if not isinstance(now, Counters):
            return
        sent, received, waited, steps = (a - b for a, b in zip(astuple(now), astuple(self._last), strict=True))
        self._last = Counters(*astuple(now))
        figures = torch.tensor([sent / 1e6, received / 1e6, waited * 1e3], dtype=torch.float64) / max(steps, 1)
        means = trainer.strategy.reduce(figures, reduce_op="mean")
        names = ("sent_mb", "received_mb", "waited_ms")
        pl_module.log_dict({f"servers/{name}": float(mean) for name, mean in zip(names, means, strict=True)})
