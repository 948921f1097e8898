"""What a pipeline asks of a LightningModule; checked before any process starts."""

from collections.abc import Iterable

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from cnnstrategies._lightning_private import is_compiled_whole
from cnnstrategies._torch_private import is_compiled
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import WHOLE, network_at
from cnnstrategies.pipeline.losses import ADVICE
from cnnstrategies.pipeline.stage import check_backend
from cnnstrategies.strategies.hybrid_pipeline.example import is_attached
from cnnstrategies.strategies.hybrid_pipeline.find_network import find_network
from cnnstrategies.strategies.hybrid_pipeline.images import COMPILE_STAGES
from cnnstrategies.strategies.hybrid_pipeline.optimizer_trial import try_optimizer


def check_module(module: LightningModule, named: str | None = None) -> str:
    """Refuse a module that a pipeline cannot train.

    Args:
        module: The module.
        named: The path of the submodule that is to be divided, where the user has named it.

    Returns:
        The path of that submodule.

    Raises:
        ConfigurationError: Something is missing or cannot be divided; the message names it.
    """
    name = type(module).__name__
    path = find_network(module, named)
    network = network_at(module, path)
    if any(not parameter.numel() for parameter in network.parameters()):
        raise ConfigurationError(
            f"parts of {name}.{path} are gone: an earlier run with strategy hybrid_pipeline has failed and left each "
            "rank its own stage alone; build the module anew and go on from the last checkpoint"
        )
    _check_kind(module, path, network)
    _check_calls(module, path)
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{name} sets automatic_optimization=False: strategy hybrid_pipeline runs forward and backward itself; "
            "leave it on, or use strategy ddp"
        )
    inside = set(network.parameters())
    outside = [name for name, p in module.named_parameters() if p.requires_grad and p not in inside]
    if outside and path == WHOLE:
        raise ConfigurationError(
            f"{name} has trainable parameters that its forward does not use ({', '.join(outside[:3])}): call them "
            "there, or freeze them (requires_grad_(False)), since each stage trains its own part of "
            "what self(x) computes; or use strategy ddp"
        )
    if outside:
        raise ConfigurationError(
            f"{name} has trainable parameters outside {path} ({', '.join(outside[:3])}): move them into it, since "
            "each stage trains its own part of that only"
        )
    return path


def _check_kind(module: LightningModule, path: str, network: nn.Module) -> None:
    """Refuse networks that cannot be cut by what they are."""
    for kind in type(network).__mro__:
        if kind.__module__.startswith("torchvision.models.detection."):
            raise ConfigurationError(
                f"{type(module).__name__}.{path} is a {kind.__name__} of torchvision: it takes lists of images and "
                "boxes and computes its losses in forward, so that there is nothing to cut between images and "
                "outputs; use strategy ddp (a pipeline trains networks that map images to outputs, from which the "
                "step computes the loss)"
            )
    compiled = [f".{path}.{name}".rstrip(".") for name, child in network.named_modules() if is_compiled(child)]
    if compiled or is_compiled_whole(module):
        raise ConfigurationError(
            f"{type(module).__name__}{compiled[0] if compiled else ''} is compiled: {COMPILE_STAGES}"
        )


def _check_calls(module: LightningModule, path: str) -> None:
    """Refuse a module that is set to give its network each batch twice."""
    if getattr(module, "test_time_flips", False):
        raise ConfigurationError(
            f"test_time_flips=true gives {type(module).__name__}.{path} each batch twice, and a pipeline runs once for "
            "it: leave it out, and evaluate the checkpoint with it on one device or with strategy ddp"
        )


def compile_backend_of(module: LightningModule) -> str | None:
    """With which ``torch.compile`` backend the stages are to be compiled; None for none.

    It is the ``compile_backend`` of one of the package's modules, or of a
    :class:`~cnnstrategies.callbacks.ComputeSettings`.

    Raises:
        ConfigurationError: Stages cannot run with it.
    """
    callbacks = module.trainer.callbacks if is_attached(module) else []  # type: ignore[attr-defined]
    asked = [getattr(one, "compile_backend", None) for one in (module, *callbacks)]
    backend = next((one for one in asked if one is not None), None)
    check_backend(backend)
    return backend


def check_callbacks(callbacks: Iterable[Callback], whole: bool) -> None:
    """Refuse callbacks that need the whole network.

    Args:
        callbacks: The trainer's.
        whole: Whether each rank has built it.

    Raises:
        ConfigurationError: There is one.
    """
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigurationError(
                "StochasticWeightAveraging averages whole networks: with strategy hybrid_pipeline use "
                "lightning.pytorch.callbacks.EMAWeightAveraging or WeightAveraging"
            )
        if isinstance(callback, ModelPruning):
            raise ConfigurationError(
                f"{type(callback).__name__} chooses among the weights of the whole network and puts others in their "
                "places: train with strategy hybrid_pipeline first, and prune with strategy ddp from the checkpoint"
            )
        if isinstance(callback, BaseFinetuning) and not whole:
            raise ConfigurationError(
                f"{type(callback).__name__} sees the whole network, of which each rank has its own stage alone where "
                "configure_model builds it: build it in __init__, or freeze there what is not to be trained"
            )


def check_optimizers(optimizers: list[Optimizer], device: torch.device) -> None:
    """Refuse optimizers that need all parameters at once.

    Args:
        optimizers: The trainer's, which have the parameters of all stages.
        device: Where they will step.

    Raises:
        ConfigurationError: There is one.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ConfigurationError(
                "LBFGS needs the gradients of all stages at once: use SGD, Adam or another optimizer that treats each "
                "parameter by itself, or strategy ddp"
            )
        try_optimizer(optimizer, device)


def check_loss(returned: Tensor, trained: float, by_method: bool) -> None:
    """Refuse a step whose loss is another than what the last stage has trained.

    Both come from the same outputs, so they differ by the rounding of sums alone.

    Args:
        returned: What ``training_step`` returned for the batch.
        trained: What the parts of the microbatches add up to; not a number where their gradients alone do.
        by_method: Whether they are means of the module's ``loss``.

    Raises:
        ConfigurationError: They are not the same.
    """
    allowed = {torch.float64: 1e-9, torch.float32: 1e-4}.get(returned.dtype, 0.03)
    loss = float(returned)
    if trained != trained or abs(loss - trained) <= allowed * max(abs(trained), 1e-3):
        return
    if by_method:
        raise ConfigurationError(
            f"training_step returned the loss {loss:.7g}, but the mean of loss(outputs, targets) over the "
            f"microbatches, weighted by loss_weight(targets), is {trained:.7g}: where a module has loss_weight, a "
            "pipeline trains loss() alone, which must be all of what training_step returns and such a mean; or leave "
            "out loss_weight"
        )
    raise ConfigurationError(
        f"training_step returned the loss {loss:.7g}, but what the microbatches add to it is {trained:.7g}: how much "
        f"a sample counts in it depends on what the network returns for others. {ADVICE}"
    )
