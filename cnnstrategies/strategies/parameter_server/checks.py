"""Checks that refuse the modules, callbacks, optimizers, trainers and hooks with which servers cannot train."""

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

GATHERS = "gather_distributed"  # Options of lightly's losses and memory banks have names that end so.


def check_module(module: LightningModule, options: ParameterServerOptions) -> None:
    """Refuse a module that servers cannot train, by a ConfigurationError."""
    if options.mode != "local" and is_overridden("configure_gradient_clipping", module):
        raise ConfigurationError(
            f"{type(module).__name__}.configure_gradient_clipping would clip each worker's gradient instead of their "
            "mean: let the servers clip by trainer.gradient_clip_val and trainer.gradient_clip_algorithm, or use "
            "strategy ddp"
        )
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"{type(module).__name__} sets automatic_optimization=False, but with strategy parameter_server the "
            "servers make the optimizer's step: set it to True, or use strategy ddp"
        )
    for name, child in module.named_modules():
        if options.mode != "local" and isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ConfigurationError(
                f"{name} is {type(child).__name__}(sparse=True), and the servers take dense gradients: use "
                "sparse=False, mode: local, or strategy ddp"
            )
        for attribute in (key for key, value in vars(child).items() if value is True and key.endswith(GATHERS)):
            raise ConfigurationError(
                f"{name}.{attribute}=True would gather nothing, because strategy parameter_server has no process group "
                "of torch.distributed: set it to False, which compares the images within each process, or use strategy "
                "ddp"
            )


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """Refuse callbacks whose search or average would be wrong, by a ConfigurationError."""
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigurationError(
                "StochasticWeightAveraging writes averaged weights into the network at the end, and the servers' "
                "weights would overwrite them: use Lightning's WeightAveraging or EMAWeightAveraging, or strategy ddp"
            )
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise ConfigurationError(
                f"{type(callback).__name__} cannot search with strategy parameter_server: search on one device "
                "(strategy: auto, devices: 1) with the same global_batch_size, and train without the callback"
            )


def check_optimizers(optimizers: list[Optimizer], options: ParameterServerOptions) -> None:
    """Refuse optimizers that the servers cannot run, by a ConfigurationError."""
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and the servers run one: use its parameter "
            "groups"
        )
    if isinstance(optimizers[0], LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times in a step, which servers cannot do: use SGD, Adam or another "
            "optimizer that takes one gradient, or strategy ddp"
        )
    if options.mode != "local":  # In mode local each worker runs the optimizer itself.
        _check_served(optimizers[0])


def _check_served(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigurationError(
            f"{name} keeps separate weights for training and for evaluation (its methods train and eval), and servers "
            "hold one set: use mode: local, or strategy ddp"
        )
    for number, group in enumerate(hyperparameters(optimizer)):
        for option, value in group.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigurationError(
                    f"{name} has {option}={value} in parameter group {number}, and the servers take finite numbers "
                    "only: set a finite value, or use mode: local or strategy ddp"
                )


def check_dispatch(trainer: Trainer, options: ParameterServerOptions) -> None:
    """Refuse joint actions within an epoch if batches are dispatched dynamically, by a ConfigurationError.

    Workers then make different numbers of steps, and meet only at the end of an epoch.
    """
    if options.data_dispatch == "static":
        return
    for setting, replacement in _within_epochs(trainer):
        raise ConfigurationError(
            f"{setting}: with data_dispatch: dynamic workers make different numbers of steps, and meet only at the end "
            f"of an epoch; use {replacement}, or data_dispatch: static"
        )


def _within_epochs(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yield each setting by which a trainer does something jointly within an epoch, and a replacement for it."""
    if trainer.val_check_interval != 1.0:
        yield f"val_check_interval={trainer.val_check_interval}", "1.0"
    if trainer.max_steps != -1 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        yield f"max_steps={trainer.max_steps}", "max_epochs"
    if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        # Some workers would load the next epoch while other workers are still in this one.
        yield f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}", "0"  # type: ignore[attr-defined]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        argument = acts_within_epochs(callback)
        if argument is not None:
            by_epochs = isinstance(callback, ModelCheckpoint)
            replacement = "every_n_epochs" if by_epochs else "the callback with interval: epoch"
            yield f"{type(callback).__name__} with {argument}", replacement


# A hook sees the gradient of its own worker's images; the servers take the mean afterwards. A linear function (to
# scale, mask, add or drop gradients) gives the same result before and after the mean. A norm, a clamp or a test for NaN
# does not.
HOOKS = ("on_after_backward", "on_before_optimizer_step")
# Names of torch's functions. The names of operators and of functions that work in place are derived from these.
PRODUCTS = ("mul", "multiply", "matmul", "masked_fill", "where")  # Linear if only one operand is a gradient.
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
    """Refuse nonlinear functions of gradients in the user's hooks between backward and the optimizer's step."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return HookContexts((module, *callbacks), HOOKS, partial(Linear, names))


class Linear(TorchFunctionMode):
    """Mode in which a function that is not linear in gradients is refused.

    Args:
        names: Names of the parameters, by their ids.
        hook: Name of the user's hook that runs in this mode.
    """

    def __init__(self, names: dict[int, str], hook: str) -> None:
        super().__init__()
        self._hook = hook
        self._names = names
        # The name of a gradient's parameter, for each gradient and each tensor that is computed from gradients.
        self._gradients: TensorOrigins[str] = TensorOrigins()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Check the arguments of a function, and call it."""
        kwargs = kwargs or {}
        parameters = self._parameters_of((*args, *kwargs.values()))
        if parameters and not self._is_linear(func, args, parameters):
            self._refuse(parameters[0], func)
        result = func(*args, **kwargs)
        if func == Tensor.grad.__get__:  # type: ignore[union-attr]
            parameters = [self._names[id(args[0])]] if id(args[0]) in self._names else []
        if parameters:
            self._gradients.record(parameters[0], (result, *args[: func.__name__.endswith("_")]))
        return result

    def _parameters_of(self, values: Iterable[Any]) -> list[str]:
        """Return the names of the parameters whose gradients are among some values."""
        return [name for tensor in tensors_in(values) if (name := self._gradients.origin_of(tensor, ""))]

    def _is_linear(self, func: Callable[..., Any], args: Sequence[Any], parameters: Sequence[str]) -> bool:
        if func.__name__ in TO_PYTHON or func.__name__ == "__bool__":
            return False
        name = func.__name__.removeprefix("_foreach_").strip("_")
        if func.__name__.startswith("__") and name[:1] in ("r", "i") and name[1:] in (*PRODUCTS, *QUOTIENTS, *LINEAR):
            name = name[1:]  # `__rmul__` and `__imul__` are `mul`.
        if name in QUOTIENTS:
            return len(parameters) == 1 and not self._parameters_of(args[1:])
        if name in PRODUCTS:
            return len(parameters) == 1 or func.__name__.startswith("_foreach_")
        return name in LINEAR

    def _refuse(self, name: str, func: Any) -> NoReturn:
        raise ConfigurationError(
            f"{self._hook} computes {func.__name__} of the gradient of {name}, which comes from this worker's images "
            "alone: the servers take the mean later, so only linear functions (to scale, mask, add or drop gradients) "
            "give the result of one device; to clip, set Trainer(gradient_clip_val=...), or use mode: async or local, "
            "or strategy ddp"
        )
