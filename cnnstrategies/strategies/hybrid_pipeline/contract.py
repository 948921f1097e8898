"""Which submodule a pipeline divides, and what it asks of module, callbacks and optimizers; checked before training."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from cnnstrategies._lightning_private import is_compiled_whole
from cnnstrategies._torch_private import is_compiled, put_module
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import WHOLE, has_own_forward, network_at, own_forward
from cnnstrategies.pipeline.losses import ADVICE
from cnnstrategies.pipeline.stage import check_backend
from cnnstrategies.strategies.hybrid_pipeline.comparison import is_attached
from cnnstrategies.strategies.hybrid_pipeline.placeholders import COMPILE_STAGES
from cnnstrategies.strategies.hybrid_pipeline.shadow import same_random_numbers

# The size of each step's gradients: some optimizers mix parameters only where those are large, or after several steps
# that have led them the same way.
_SIZES = (1.0, 1.0, 1.0, 1.0, 1.0, 1e4, 1e-3)
_FEW = 4  # parameters from the beginning and the end of each group
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
                f"{type(callback).__name__} gives parameters of the whole network to the optimizer: with strategy "
                "hybrid_pipeline give it all from the beginning, and freeze and unfreeze them in on_train_epoch_start "
                "(requires_grad_)"
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
    """Refuse an optimizer whose step of a parameter depends on others.

    A copy of it steps with all of some made-up parameters, and others with a half of these each.
    """
    name = type(optimizer).__name__
    kept = [
        key for key, value in vars(optimizer).items() if key not in ("state", "param_groups") and _has_tensors(value)
    ]
    if kept:
        raise ConfigurationError(f"{name} keeps tensors of all parameters in {kept[0]}, beside its state: {_REMEDY}")
    try:
        with same_random_numbers(device):
            whole, *halves = [_stepped(optimizer, device, half) for half in (None, 0, 1)]
    except Exception as error:
        rank_zero_warn(f"{name} was not tried with made-up parameters, as it fails on them: {error!r}")
        return
    for own in halves:
        if any(not torch.allclose(own[place], whole[place], rtol=1e-12, atol=1e-15) for place in own):
            raise ConfigurationError(
                f"{name} changes a parameter by what others and their gradients are, as where it has a norm or a step "
                f"size of all: {_REMEDY}"
            )


def _stepped(optimizer: Optimizer, device: torch.device, half: int | None) -> dict[int, Tensor]:
    """The made-up parameters after some steps of a copy: all of them, or every second."""
    generator = torch.Generator().manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        shape = [min(size, 3) for size in parameter.shape]
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        made[id(parameter)] = nn.Parameter(values.to(device))
    tried: Any = object.__new__(type(optimizer))
    # A learning rate scheduler has put a function in the place of `step` that steps the optimizer itself.
    attributes = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state")}
    vars(tried).update(copy.deepcopy(attributes, dict(made)))
    tried.state = type(optimizer.state)(dict)
    chosen: list[nn.Parameter] = []
    for group in tried.param_groups:
        some = group["params"]
        some = some if len(some) <= 2 * _FEW else [*some[:_FEW], *some[-_FEW:]]
        chosen += some
        group["params"] = some
        if "lr" in group:
            group["lr"] = group.get("initial_lr", group["lr"]) or 1e-2  # It may be 0 at the start of a warm-up.
    places = {parameter: place for place, parameter in enumerate(chosen) if half is None or place % 2 == half}
    for group in tried.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter in places]
    getattr(tried, "train", lambda: None)()  # Of those without a schedule.
    gradients = _gradients(chosen, generator)
    for step in gradients:
        _step(tried, chosen, step)
    return {place: parameter.detach().clone() for parameter, place in places.items()}


def _gradients(parameters: Sequence[nn.Parameter], generator: torch.Generator) -> list[list[Tensor]]:
    way = [torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one) for one in parameters]
    return [[size * one for one in way] for size in _SIZES]


def _step(optimizer: Any, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    def closure() -> Tensor:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient + 0.1 * parameter.detach()
        return torch.ones(())

    closure()  # Some take the gradients before they call it.
    with torch.enable_grad():
        optimizer.step(closure)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.ndim and leaf.numel() for leaf in tree_leaves(value))
