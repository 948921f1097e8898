"""What a pipeline asks of a LightningModule; checked before any process starts."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from cnnstrategies.errors import ConfigurationError


def check_module(module: LightningModule) -> nn.Module:
    """Refuse a module that a pipeline cannot train.

    Returns:
        Its ``network``.

    Raises:
        ConfigurationError: Something is missing or cannot be divided; the message names it.
    """
    name = type(module).__name__
    network: Any = getattr(module, "network", None)
    if not isinstance(network, nn.Module):
        raise ConfigurationError(
            f"strategy hybrid_pipeline divides the nn.Module self.network, and {name} has "
            f"{'none' if network is None else type(network).__name__}: {_remedy(module)}, and call "
            "self.network(images) once per step"
        )
    if any(not parameter.numel() for parameter in network.parameters()):
        raise ConfigurationError(
            f"parts of {name}.network are gone: an earlier run with strategy hybrid_pipeline has failed and left each "
            "rank its own stage alone; build the module anew and go on from the last checkpoint"
        )
    if not callable(getattr(module, "loss", None)):
        raise ConfigurationError(
            f"{name} has no method loss(outputs, targets): strategy hybrid_pipeline computes each microbatch's mean "
            "loss with it in the last stage; add it and use it in training_step"
        )
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{name} sets automatic_optimization=False: strategy hybrid_pipeline runs forward and backward itself; "
            "leave it on, or use strategy ddp"
        )
    inside = set(network.parameters())
    children = [(path, child) for path, child in module.named_modules(remove_duplicate=False) if "." not in path]
    shared = [
        path for path, child in children if path not in ("", "network") and not inside.isdisjoint(child.parameters())
    ]
    if shared:
        raise ConfigurationError(
            f"{name}.{shared[0]} shares parameters with {name}.network: strategy hybrid_pipeline puts a stage in the "
            f"place of network alone; call self.network in the steps and leave out self.{shared[0]}"
        )
    outside = [name for name, p in module.named_parameters() if p.requires_grad and p not in inside]
    if outside:
        raise ConfigurationError(
            f"{name} has trainable parameters outside network ({', '.join(outside[:3])}): move them into the network, "
            "since each stage trains its own part of that only"
        )
    return network


def _remedy(module: LightningModule) -> str:
    """What to do in a module without a network."""
    candidates = [f"self.{name}" for name, child in module.named_children() if any(True for _ in child.parameters())]
    if not candidates:
        return "set it in __init__ (not in configure_model)"
    if len(candidates) == 1:
        return f"rename {candidates[0]} to self.network"
    return f"make one nn.Module self.network of {', '.join(candidates)}, or rename one of them if it is all"


def check_optimizers(optimizers: list[Optimizer]) -> None:
    """Refuse optimizers that need all parameters at once.

    Raises:
        ConfigurationError: There is one.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "LBFGS needs the gradients of all stages at once: use SGD, Adam or another optimizer that treats each "
                "parameter by itself, or strategy ddp"
            )


def check_loss(returned: Tensor, trained: float) -> None:
    """Refuse a step whose loss is another than what the last stage has trained.

    Both come from the same outputs, so they differ by the rounding of sums alone.

    Args:
        returned: What ``training_step`` returned.
        trained: The mean of the module's ``loss`` over the microbatches.

    Raises:
        ConfigurationError: They are not the same.
    """
    allowed = {torch.float64: 1e-9, torch.float32: 1e-4}.get(returned.dtype, 0.03)
    loss = float(returned)
    if trained == trained and abs(loss - trained) > allowed * max(abs(trained), 1e-3):
        raise ConfigurationError(
            f"training_step returned the loss {loss:.7g}, but the mean of loss(outputs, targets) over the "
            f"microbatches is {trained:.7g}: a pipeline trains loss() alone, which must be all of what training_step "
            "returns and a mean over samples that count alike (no ignore_index, no class weights, no sum)"
        )
