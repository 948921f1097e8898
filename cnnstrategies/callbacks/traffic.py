"""Callback that logs the traffic, the waiting times and the membership of a parameter server."""

import warnings
from dataclasses import replace

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.paramserver.worker.counters import Counters
from cnnstrategies.strategies.protocol import facts_of


class ServerTraffic(Callback):
    """Callback that logs the workers' traffic with the servers at the end of each training epoch.

    Under a strategy other than ``parameter_server`` nothing is logged.

    Means over the workers:

    - ``servers/sent_mb`` and ``servers/received_mb``: megabytes per step.
    - ``servers/waited_ms``: time per step in which the worker did nothing but wait for parameters.
    - ``servers/staleness``: number of updates that other workers made between the pull of a step's parameters and the
      step's own update.
    - ``servers/dropped``: fraction of the steps in which the servers did not use the worker's gradient. It is only
      logged if the workers of a node combine their gradients (``combine_per_node``).

    Numbers for the whole run:

    - ``servers/workers`` and ``servers/alive``: number of current workers, and number of current servers.
    - ``servers/losses``: number of processes that the run has lost so far.
    """

    def __init__(self) -> None:
        self._last = Counters()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = Counters()
        # All workers log the same values, so Lightning's advice to average the values over the workers does not apply.
        warnings.filterwarnings("ignore", r".*`self\.log\('servers/")

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
        # Read the numbers of workers and servers before `reduce`, because other workers may leave the run after
        # `reduce`.
        counts = self._members(trainer)
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
