"""Facts about a run for the callback Guard: which checks apply, the schedules' learning rates, and the samplers."""

from typing import Any, Literal

from lightning.pytorch import Trainer
from torch.optim.lr_scheduler import LRScheduler

from cnnstrategies._lightning_private import averages_models
from cnnstrategies._torch_private import is_compiled
from cnnstrategies.guarding.rates import ScheduledRate
from cnnstrategies.guarding.watch import WatchedRun
from cnnstrategies.strategies.protocol import StrategyFacts, facts_of

Check = Literal[
    "replicas", "forwards", "losses", "finite", "history", "moves", "rates", "calls", "modes", "replay", "batches",
    "samples", "checkpoint",
]  # fmt: skip


def applied_checks(facts: StrategyFacts, ranks: int) -> dict[Check, bool]:
    """Return which checks apply under a strategy.

    Args:
        facts: Facts about the strategy.
        ranks: Number of ranks.
    """
    steps_together = facts.steps_in_lockstep and ranks > 1
    has_whole_networks = facts.step_kind in ("replica", "worker") and not facts.divides_values
    return {
        "replicas": facts.replicas_agree and steps_together,
        "forwards": facts.replicas_agree and steps_together and has_whole_networks and not facts.may_skip_steps,
        "losses": True,
        "finite": True,
        "history": True,
        "moves": not facts.shards_parameters,
        "rates": True,
        "calls": facts.step_kind != "worker" and not facts.shards_parameters,
        "modes": True,
        "replay": not (facts.shards_parameters or facts.divides_values),
        "batches": steps_together and facts.ranks_per_batch < ranks and not facts.has_global_batches,
        "samples": facts.step_kind != "stages" and not facts.divides_values,
        "checkpoint": True,
    }


def watched_run(trainer: Trainer) -> WatchedRun:
    """Return a rank's place in the run, and the promises of its strategy."""
    facts = facts_of(trainer.strategy)
    applied = applied_checks(facts, trainer.world_size)
    return WatchedRun(
        rank=trainer.global_rank,
        holders=facts.holders_of,
        sees_gradients=facts.step_kind != "worker",
        reads_weights=applied["moves"],
        replicas_agree=applied["replicas"] and not averages_models(trainer.strategy),
        counts_alike=not facts.may_skip_steps,
        may_skip=getattr(trainer.precision_plugin, "scaler", None) is not None,
        compares_forwards=applied["forwards"] and not is_compiled_in_part(trainer),
    )


def is_compiled_in_part(trainer: Trainer) -> bool:
    """Return whether a layer is compiled, or the module or a callback asks for this."""
    owners = (trainer.lightning_module, *trainer.callbacks)  # type: ignore[attr-defined]  # set outside the class
    asks = any(getattr(owner, "compile_backend", None) is not None for owner in owners)
    return asks or any(is_compiled(layer) for layer in trainer.lightning_module.modules())


def scheduled_rates(trainer: Trainer) -> list[ScheduledRate]:
    """Return the learning rates of optimizers with one schedule, and those that their schedules have computed."""
    schedulers: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
    optimizers = [getattr(scheduler, "optimizer", None) for scheduler in schedulers]
    rates = []
    for index, (scheduler, optimizer) in enumerate(zip(schedulers, optimizers, strict=True)):
        if not isinstance(scheduler, LRScheduler) or sum(other is optimizer for other in optimizers) > 1:
            continue
        for number, (group, rate) in enumerate(
            zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=False)
        ):
            name = f"parameter group {number} of schedule {index}"
            rates.append(ScheduledRate(name, float(group["lr"]), float(rate), scheduler.last_epoch))
    return rates
