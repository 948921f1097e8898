"""What the workers of a parameter server send, receive and wait for, and who is there."""

from dataclasses import replace

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.paramserver.worker.connections import Counters
from cnnstrategies.strategies.protocol import facts_of


class ServerTraffic(Callback):
    """Logs a worker's traffic with the servers at the end of each training epoch; under other strategies nothing.

    ``servers/sent_mb`` and ``servers/received_mb`` are megabytes per step, ``servers/waited_ms`` is the time per step
    in which the worker had nothing to do but wait for parameters, ``servers/staleness`` the updates that others made
    between the values that a step was computed with and its own update: means over the workers.
    ``servers/workers`` and ``servers/alive`` are the workers and servers that take part, ``servers/losses`` the
    processes that were lost so far. With ``combine_per_node``, ``servers/dropped`` is the share of a worker's steps
    that were made without it: the mean over the workers.
    """

    def __init__(self) -> None:
        self._last = Counters()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = Counters()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        facts, last = facts_of(trainer.strategy), self._last
        now = facts.traffic
        if now is None:
            return
        sums = {
            "sent_mb": (now.bytes_sent - last.bytes_sent) / 1e6,
            "received_mb": (now.bytes_received - last.bytes_received) / 1e6,
            "waited_ms": (now.seconds_waited - last.seconds_waited) * 1e3,
            "staleness": now.staleness - last.staleness,
        }
        if facts.may_skip_steps:
            sums["dropped"] = now.dropped - last.dropped
        figures = torch.tensor([*sums.values()], dtype=torch.float64) / max(now.steps - last.steps, 1)
        self._last = replace(now)
        counts = self._members(trainer)  # Before the others know that this worker is here, and may leave.
        means = trainer.strategy.reduce(figures, reduce_op="mean")
        pl_module.log_dict({f"servers/{name}": float(mean) for name, mean in zip(sums, means, strict=True)})
        pl_module.log_dict({f"servers/{name}": float(count) for name, count in counts.items()})

    @staticmethod
    def _members(trainer: Trainer) -> dict[str, int]:
        membership = facts_of(trainer.strategy).membership
        if membership is None:
            return {}
        workers, servers = membership.members
        return {"workers": workers, "alive": servers, "losses": membership.losses}
