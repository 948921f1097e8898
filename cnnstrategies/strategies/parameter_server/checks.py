"""What the parameter server cannot train or use of modules, callbacks, optimizers, trainers and hooks."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.overrides import TorchFunctionMode

from cnnstrategies._lightning_private import acts_within_epochs
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.specification import hyperparameters
from cnnstrategies.strategies.observer_hooks import TO_PYTHON, HookContexts, TensorOrigins, tensors_in
from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions

GATHERS = "gather_distributed"  # The end of the names of such options of losses and memories, as lightly has them.


def check_module(module: LightningModule, options: ParameterServerOptions) -> None:
    """Refuse a module that the parameter server cannot train."""
    if options.mode != "local" and is_overridden("configure_gradient_clipping", module):
        raise ConfigurationError(
            f"{type(module).__name__}.configure_gradient_clipping would clip each worker's own gradient, and not their "
            "mean: with strategy parameter_server the servers clip; set trainer.gradient_clip_val and "
            "trainer.gradient_clip_algorithm, or use strategy ddp"
        )
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} sets automatic_optimization=False: with strategy parameter_server the servers "
            "make the optimizer's step; leave it on, or use strategy ddp"
        )
    for name, child in module.named_modules():
        if options.mode != "local" and isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ConfigurationError(
                f"{name} is {type(child).__name__}(sparse=True), and the servers take dense gradients: use "
                "sparse=False, mode: local, or strategy ddp"
            )
        for attribute in (one for one, value in vars(child).items() if value is True and one.endswith(GATHERS)):
            raise ConfigurationError(
                f"{name}.{attribute}=True gathers the outputs of all processes, and strategy parameter_server has no "
                "process group of torch.distributed, without which such a loss gathers nothing: set it to False, which "
                "compares a process's own images, or use strategy ddp"
            )


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks that search or average, and could not do it right."""
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigurationError(
                "StochasticWeightAveraging puts averaged weights into the network at the end, and the servers' would "
                "take their place: use Lightning's WeightAveraging or EMAWeightAveraging, or strategy ddp"
            )
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise ConfigurationError(
                f"{type(callback).__name__}: search on one device, with strategy: auto and devices: 1, and train "
                "without it; global_batch_size stays what it is"
            )


def check_optimizers(optimizers: list[Optimizer], options: ParameterServerOptions) -> None:
    """Refuse what the servers cannot do."""
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"configure_optimizers gave {len(optimizers)} optimizers: the servers run one; use its parameter groups"
        )
    if isinstance(optimizers[0], LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times in a step, which servers cannot: use SGD, Adam or another "
            "optimizer that takes one gradient, or strategy ddp"
        )
    if options.mode != "local":  # There each worker runs its own.
        _check_served(optimizers[0])


def _check_served(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigurationError(
            f"{name} keeps other weights for training than for evaluation (its methods train and eval), and servers "
            "have one set: use mode: local, or strategy ddp"
        )
    for number, group in enumerate(hyperparameters(optimizer)):
        for option, value in group.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigurationError(
                    f"{name} has {option}={value} in parameter group {number}: the servers take finite numbers only; "
                    "give another, or use mode: local or strategy ddp"
                )


def check_dispatch(trainer: Trainer, options: ParameterServerOptions) -> None:
    """Refuse a training that counts steps, or stops for something within an epoch, while workers take what they can."""
    if options.data_dispatch == "static":
        return
    for what, instead in _within_epochs(trainer):
        raise ConfigurationError(
            f"{what}: with data_dispatch: dynamic workers make different numbers of steps, and are together only at "
            f"the end of an epoch; use {instead}, or data_dispatch: static"
        )


def _within_epochs(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """What a trainer does within an epoch, and what it could do in its place."""
    if trainer.val_check_interval != 1.0:
        yield f"val_check_interval={trainer.val_check_interval}", "1.0"
    if trainer.max_steps != -1 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        yield f"max_steps={trainer.max_steps}", "max_epochs"
    if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        # Some would ask for the loader of the next epoch while others are in this one.
        yield f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}", "0"  # type: ignore[attr-defined]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        argument = acts_within_epochs(callback)
        if argument is not None:
            instead = "every_n_epochs" if isinstance(callback, ModelCheckpoint) else "the callback with interval: epoch"
            yield f"{type(callback).__name__} with {argument}", instead


# Hooks find the gradients of their own worker's images. What is linear is the same before the mean that servers take as
# after it: to scale, mask, add up or leave out gradients. A norm, a clamp or a test for NaN is not.
HOOKS = ("on_after_backward", "on_before_optimizer_step")
# By the names of torch's functions, without those of the forms that are in place or operators.
PRODUCTS = ("mul", "multiply", "matmul", "masked_fill", "where")  # of a gradient and what is none
QUOTIENTS = ("div", "truediv", "true_divide")
LINEAR = (
    "add", "sub", "subtract", "neg", "negative", "sum", "mean", "cumsum", "cat", "stack", "lerp", "zero", "copy",
    "clone", "detach", "contiguous", "view", "reshape", "flatten", "t", "permute", "transpose", "expand", "to",
    "cpu", "cuda", "float", "double", "unsqueeze", "squeeze", "chunk", "split", "unbind", "zeros_like", "ones_like",
    "empty_like", "getitem", "setitem", "get", "set", "delete", "size", "dim", "numel", "is_floating_point", "len",
    "hash", "repr", "stride", "is_contiguous", "element_size", "data_ptr", "iter", "pos", "requires_grad",
    "deepcopy",
)  # fmt: skip


def watch_gradients(module: LightningModule, callbacks: Iterable[Callback]) -> HookContexts:
    """Watch the hooks of a module and its callbacks between backward and the optimizer's step."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return HookContexts((module, *callbacks), HOOKS, partial(Linear, names))


class Linear(TorchFunctionMode):
    """Refuses what is not linear in gradients."""

    def __init__(self, names: dict[int, str], hook: str) -> None:
        super().__init__()
        self._hook = hook
        self._names = names
        self._gradients: TensorOrigins[str] = (
            TensorOrigins()
        )  # The name of its parameter for each, and for what is made of it.

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """See what a function is given, and call it."""
        kwargs = kwargs or {}
        found = self._found((*args, *kwargs.values()))
        if found and not self._is_linear(func, args, found):
            self._refuse(found[0], func)
        result = func(*args, **kwargs)
        if func == Tensor.grad.__get__:  # type: ignore[union-attr]
            found = [self._names[id(args[0])]] if id(args[0]) in self._names else []
        if found:
            self._gradients.record(found[0], (result, *args[: func.__name__.endswith("_")]))
        return result

    def _found(self, values: Iterable[Any]) -> list[str]:
        """The parameters whose gradients are among some values."""
        return [name for tensor in tensors_in(values) if (name := self._gradients.origin_of(tensor, ""))]

    def _is_linear(self, func: Callable[..., Any], args: Sequence[Any], found: Sequence[str]) -> bool:
        if func.__name__ in TO_PYTHON or func.__name__ == "__bool__":
            return False
        name = func.__name__.removeprefix("_foreach_").strip("_")
        if func.__name__.startswith("__") and name[:1] in ("r", "i") and name[1:] in (*PRODUCTS, *QUOTIENTS, *LINEAR):
            name = name[1:]  # As of `__rmul__` and `__imul__`.
        if name in QUOTIENTS:
            return len(found) == 1 and not self._found(args[1:])
        if name in PRODUCTS:
            return len(found) == 1 or func.__name__.startswith("_foreach_")
        return name in LINEAR

    def _refuse(self, name: str, func: Any) -> NoReturn:
        raise ConfigurationError(
            f"{self._hook} computes {func.__name__} of the gradient of {name}: with strategy parameter_server in "
            "common steps that is of its own worker's images until the servers have taken the mean, so only what is "
            "linear is as on one device (to scale, mask, add, leave out); to clip set Trainer(gradient_clip_val=...), "
            "or use mode async or local, or strategy ddp"
        )
