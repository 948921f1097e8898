"""The order in which the stages run forwards and backwards: GPipe's, or 1F1B for modules that declare their loss."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.declared_loss import NAME, DeclaredLoss
from cnnstrategies.pipeline.loss_verdict import settle_late
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.pipeline.timetable import Schedule
from cnnstrategies.strategies.differences import has_mean_loss
from cnnstrategies.strategies.hybrid_pipeline.logs import PlacedLogs

FIRST_ORDER: Schedule = "gpipe"  # The order of the first step, which shows whether the module trains its declared loss.
# The methods on which the gradients of the network's result depend, and the packages whose code never changes them.
_OF_STEPS = ("training_step", NAME, "loss_weight", "backward")
_OWN = ("cnnstrategies.models.", "lightning.")


def order_of(module: LightningModule, schedule: Schedule) -> Schedule:
    """Return the order of most steps of a module, if the module's loss is as declared.

    Args:
        module: The module.
        schedule: The strategy's option ``schedule``.
    """
    return "1f1b" if schedule == "1f1b" and callable(getattr(module, NAME, None)) else "gpipe"


def check_run_ahead(run_ahead: bool | None, module: LightningModule, schedule: Schedule) -> None:
    """Refuse ``run_ahead`` for a module whose steps do not run in the order 1F1B.

    Raises:
        ConfigurationError: The option has no effect.
    """
    if run_ahead and order_of(module, schedule) != "1f1b":
        remedy = "schedule: 1f1b" if schedule != "1f1b" else f"give {type(module).__name__} a method {NAME}()"
        raise ConfigurationError(
            "run_ahead=True: all forwards of a step run before the first backward, so no stage can hold more "
            f"microbatches than it holds anyway; leave run_ahead out, or {remedy}"
        )


def declare_loss(
    placed: PlacedNetwork, module: LightningModule, logs: PlacedLogs, schedule: Schedule, saves_memory: bool
) -> None:
    """Let the stages run in the order 1F1B if the module declares its loss. All ranks must call this.

    Args:
        placed: The module's divided network.
        module: The module.
        logs: The module's logs.
        schedule: The strategy's option ``schedule``.
        saves_memory: See `DeclaredLoss`.
    """
    if order_of(module, schedule) == "gpipe":
        return

    def scale() -> Tensor | float:
        scaler = getattr(module.trainer.precision_plugin, "scaler", None)
        device = placed.runner.transport.device
        return 1.0 if scaler is None else scaler.scale(torch.ones((), device=device))

    weight: Any = module.loss_weight if has_mean_loss(module) else None
    on_device = placed.places.devices is not None
    placed.declared = DeclaredLoss(
        module,
        placed.places,
        placed.ranks[-1],
        weight,
        logs.silent,
        scale,
        saves_memory,
        settles_late=on_device and has_own_steps(module),
    )


def has_own_steps(module: LightningModule) -> bool:
    """Whether the training step and the loss of a module are this package's own, and no user's class overrides them."""
    functions = [getattr(getattr(module, name, None), "__func__", None) for name in _OF_STEPS]
    return all(getattr(function, "__module__", "").startswith(_OWN) for function in functions)


def settle_verdicts(placed: PlacedNetwork) -> None:
    """Read all verdicts on gradients that no step has waited for. All ranks must call this."""
    settle_late(placed.places, placed.ranks[-1], placed.declared)


def tell_news(placed: PlacedNetwork) -> None:
    """Tell the user in which order the stages run from now on, if a step has shown it."""
    declared = placed.declared
    if declared is None or declared.news is None:
        return
    (text, is_warning), declared.news = declared.news, None
    if is_warning:
        rank_zero_warn(text)
    else:
        rank_zero_info(text)


def describe_order(placed: PlacedNetwork, module: LightningModule, schedule: Schedule) -> str:
    """Return a text for the start panel. The arguments are those of :func:`declare_loss`."""
    if schedule == "gpipe":
        return "gpipe, as configured"
    declared, name = placed.declared, type(module).__name__
    again = placed.runner.activation_checkpointing != "never"
    stores = f"each stage stores the {'inputs' if again else 'activations'} of all microbatches"
    if declared is None:
        return f"gpipe, so {stores}: for 1f1b, give {name} a method loss(outputs, targets) that training_step calls"
    if declared.reason is not None:
        return f"gpipe, so {stores}: {declared.reason}"
    return f"gpipe in the first step, then 1f1b if training_step trains {name}.loss(outputs, targets), a mean"
