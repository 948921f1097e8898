"""Which submodule a pipeline divides, and what it asks of module, callbacks and optimizers; checked before training."""

from collections.abc import Iterable

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from cnnstrategies._lightning_private import is_compiled_whole
from cnnstrategies._torch_private import is_compiled, put_module
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import WHOLE, has_own_forward, network_at, own_forward
from cnnstrategies.optimizer_trial import (
    attribute_with_tensors,
    draws_random_numbers,
    mixes_parameters,
    values_after_steps,
)
from cnnstrategies.pipeline.losses import ADVICE
from cnnstrategies.pipeline.stage import check_backend
from cnnstrategies.strategies.hybrid_pipeline.first_samples import is_attached
from cnnstrategies.strategies.hybrid_pipeline.placeholders import COMPILE_STAGES
from cnnstrategies.strategies.shadow import same_random_numbers

_REMEDY = (
    "with strategy hybrid_pipeline each stage's optimizer has its own ones alone; use SGD, AdamW or another one that "
    "treats each parameter by itself, or strategy ddp"
)


def find_network(module: LightningModule, named: str | None) -> str:
    """The path of the submodule that a pipeline divides.

    It is the one that the user has named; by default the child that has all of the module's parameters, or all that are
    trainable; else the module's own ``forward``, whose path is empty.
    """
    path = _outermost(module) if named is None else _checked(module, named)
    _refuse_aliases(module, path)
    return path


def put_network(module: nn.Module, path: str, network: nn.Module) -> None:
    """Put another module in the place of a submodule."""
    if path == WHOLE:
        own = own_forward(module)
        own.come_back(module) if network is own else own.give_way(module, network)
        return
    parent, _, name = path.rpartition(".")
    put_module(module.get_submodule(parent), name, network)


def _outermost(module: LightningModule) -> str:
    kind = type(module).__name__
    everything = set(module.parameters())
    trainable = {parameter for parameter in everything if parameter.requires_grad}
    children = {name: set(child.parameters()) for name, child in module.named_children()}
    for wanted in (everything, trainable):
        if wanted:
            found = [name for name, own in children.items() if wanted <= own]
            if found:
                return found[0]
    if trainable and has_own_forward(module):
        return WHOLE
    own = [name for name, _ in module.named_parameters(recurse=False)]
    having = [name for name, parameters in children.items() if parameters & trainable]
    if not having:
        raise ConfigurationError(
            f"strategy hybrid_pipeline divides one submodule of {kind}, and none has parameters to train: build it in "
            "__init__ or configure_model (setup runs in each process, after it is looked at)"
        )
    owners = ", ".join(f"self.{name}" for name in (*own[:3], *having))
    raise ConfigurationError(
        f"strategy hybrid_pipeline divides one submodule that has all trainable parameters, and those of {kind} are "
        f"shared out over {owners}: have the module's own forward call them, and the steps "
        "self(images), once, with several views of the images as several inputs; or freeze the others and name one "
        "with the strategy's option submodule; or use strategy ddp, which takes them as they are"
    )


def _checked(module: LightningModule, named: str) -> str:
    modules = dict(module.named_modules(remove_duplicate=False))
    if not named or named not in modules:
        close = [path for path in modules if path and path.count(".") <= named.count(".")]
        raise ConfigurationError(
            f"submodule={named!r}: {type(module).__name__} has no submodule of this name; it has {', '.join(close[:8])}"
        )
    return named


def _refuse_aliases(module: LightningModule, path: str) -> None:
    """Refuse a module that has the network's parameters in a second place, where no stage would be put."""
    if path == WHOLE:
        return
    kind = type(module).__name__
    inside = set(module.get_submodule(path).parameters())
    for other, child in module.named_modules(remove_duplicate=False):
        related = f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}.")
        if other and not related and not inside.isdisjoint(child.parameters()):
            raise ConfigurationError(
                f"{kind}.{other} shares parameters with {kind}.{path}: strategy hybrid_pipeline puts a stage in the "
                f"place of {path} alone; call self.{path} in the steps and leave out self.{other}"
            )


def check_module(module: LightningModule, named: str | None = None) -> str:
    """Refuse a module that a pipeline cannot train; gives the path of the submodule that is divided."""
    name = type(module).__name__
    path = find_network(module, named)
    network = network_at(module, path)
    if any(not parameter.numel() for parameter in network.parameters()):
        raise ConfigurationError(
            f"parts of {name}.{path} are gone: an earlier run with strategy hybrid_pipeline has failed and left each "
            "rank its own stage alone; build the module anew and go on from the last checkpoint"
        )
    _check_kind(module, path, network)
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{name} sets automatic_optimization=False: strategy hybrid_pipeline runs forward and backward itself; "
            "leave it on, or use strategy ddp"
        )
    inside = set(network.parameters())
    outside = [name for name, p in module.named_parameters() if p.requires_grad and p not in inside]
    if outside:
        where = "that its forward does not use" if path == WHOLE else f"outside {path}"
        raise ConfigurationError(
            f"{name} has trainable parameters {where} ({', '.join(outside[:3])}): call them there, or freeze them "
            "(requires_grad_(False)), since each stage trains its own part of that only; or use strategy ddp"
        )
    return path


def _check_kind(module: LightningModule, path: str, network: nn.Module) -> None:
    """Refuse networks that cannot be cut by what they are."""
    compiled = [f".{path}.{name}".rstrip(".") for name, child in network.named_modules() if is_compiled(child)]
    if compiled or is_compiled_whole(module):
        raise ConfigurationError(
            f"{type(module).__name__}{compiled[0] if compiled else ''} is compiled: {COMPILE_STAGES}"
        )


def compile_backend_of(module: LightningModule) -> str | None:
    """With which ``torch.compile`` backend the stages are to be compiled, as module or callbacks say; None for none."""
    callbacks = module.trainer.callbacks if is_attached(module) else []  # type: ignore[attr-defined]
    asked = [getattr(one, "compile_backend", None) for one in (module, *callbacks)]
    backend = next((one for one in asked if one is not None), None)
    check_backend(backend)
    return backend


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that need the whole network, by a ConfigurationError."""
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
        if isinstance(callback, BaseFinetuning):
            raise ConfigurationError(
                f"{type(callback).__name__} adds parameters to the optimizer during training, which does not work with "
                "strategy hybrid_pipeline: pass all parameters to the optimizer in configure_optimizers, and freeze "
                "and unfreeze them with requires_grad_ in on_train_epoch_start, or use ddp or parameter_server"
            )


def check_optimizers(optimizers: list[Optimizer], device: torch.device) -> None:
    """Refuse optimizers that need all parameters at once, where they will step, by a ConfigurationError."""
    for optimizer in optimizers:
        try_optimizer(optimizer, device)


def check_loss(returned: Tensor, trained: float, by_method: bool) -> None:
    """Refuse a step whose loss is another than what the last stage has trained.

    Both come from the same outputs, so they differ by the rounding of sums alone. What was trained, the sum of the
    microbatches' parts, is not a number where their gradients alone add up.
    """
    allowed = {torch.float64: 1e-9, torch.float32: 1e-4}.get(returned.dtype, 0.03)
    loss = float(returned)
    if trained != trained or abs(loss - trained) <= allowed * max(abs(trained), 1e-3):
        return
    why = (
        "where a module has loss_weight, a pipeline trains loss() alone, which must be all of what training_step "
        "returns, and a mean weighted by loss_weight(targets); or leave out loss_weight"
        if by_method
        else f"how much a sample counts in it depends on what the network returns for others. {ADVICE}"
    )
    raise ConfigurationError(
        f"training_step returned the loss {loss:.7g}, but what the microbatches add to it is {trained:.7g}: {why}"
    )


def try_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Refuse an optimizer whose step of a parameter depends on others."""
    name = type(optimizer).__name__
    kept = attribute_with_tensors(optimizer)
    if kept is not None:
        raise ConfigurationError(f"{name} keeps tensors of all parameters in {kept}, beside its state: {_REMEDY}")
    try:
        with same_random_numbers(device):
            whole = values_after_steps(optimizer, device)
            mixes = mixes_parameters(optimizer, whole, device)
            draws = draws_random_numbers(optimizer, whole, device)
    except Exception as error:
        rank_zero_warn(f"{name} was not tried with made-up parameters, as it fails on them: {error!r}")
        return
    if mixes:
        raise ConfigurationError(
            f"{name} changes a parameter by what others and their gradients are, as where it has a norm or a step "
            f"size of all: {_REMEDY}"
        )
    if draws:
        raise ConfigurationError(
            f"{name} draws random numbers in its steps, and each stage would draw different ones: {_REMEDY}"
        )
