"""Checks for ``parameter_server``: modules, callbacks, optimizers, settings and hooks that do not work with servers."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.overrides import TorchFunctionMode

from cnnstrategies._lightning_private import acts_within_epochs, is_compiled_whole
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.optimizer_check import ServedOptimizer, check_on_servers
from cnnstrategies.paramserver.specification import hyperparameters
from cnnstrategies.strategies.parameter_server.observer_hooks import TO_PYTHON, HookContexts, TensorOrigins, tensors_in
from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions

GATHERS = "gather_distributed"  # lightly's options with this suffix make losses gather tensors from all processes.


def check_module(module: LightningModule, options: ParameterServerOptions) -> None:
    """Raise a ConfigurationError for a module that cannot be trained with parameter servers."""
    if options.mode != "local" and is_overridden("configure_gradient_clipping", module):
        raise ConfigurationError(
            f"{type(module).__name__}.configure_gradient_clipping would clip each worker's gradient, not the mean of "
            "the gradients: remove the method, so that the servers clip by trainer.gradient_clip_val and "
            "trainer.gradient_clip_algorithm, or use strategy ddp"
        )
    if not module.automatic_optimization:
        _check_manual(module, options)
    for name, child in module.named_modules():
        if options.mode != "local" and isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ConfigurationError(
                f"{name} is {type(child).__name__}(sparse=True), but the servers accept dense gradients only: use "
                "sparse=False, `mode: local`, or strategy ddp"
            )
        for attribute in (key for key, value in vars(child).items() if value is True and key.endswith(GATHERS)):
            if not options.aggregates:
                raise ConfigurationError(
                    f"{name}.{attribute}=True gathers tensors of all workers in each step, but in `mode: "
                    f"{options.mode}` each worker makes its own steps: set {attribute} to False, so that only the "
                    "images of the same process are compared, or use `mode: sync` or strategy ddp"
                )


def _check_manual(module: LightningModule, options: ParameterServerOptions) -> None:
    manual = f"{type(module).__name__} sets automatic_optimization=False, which does not work with"
    if options.mode == "local":
        raise ConfigurationError(f"{manual} `mode: local`: use `mode: sync`, `async` or `ssp`, or strategy ddp")
    if is_compiled_whole(module):
        raise ConfigurationError(
            f"{manual} torch.compile of the whole module, because compiled code would read optimizers whose state the "
            "servers hold: compile the module's networks, or use strategy ddp"
        )
    if options.combine_per_node:
        raise ConfigurationError(f"{manual} `combine_per_node: true`: set it to false, or use strategy ddp")


def check_callbacks(callbacks: Iterable[Callback]) -> None:
    """Raise a ConfigurationError for a callback of Lightning that does not work with parameter servers."""
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigurationError(
                "StochasticWeightAveraging writes averaged weights into the network at the end, but the servers' "
                "weights would overwrite them: use Lightning's WeightAveraging or EMAWeightAveraging, or strategy ddp"
            )
        if isinstance(callback, BatchSizeFinder | LearningRateFinder):
            raise ConfigurationError(
                f"{type(callback).__name__} does not work with strategy parameter_server: run it on one device "
                "(`strategy: auto`, `devices: 1`) with the same global_batch_size, and then train without the callback"
            )


def check_optimizers(optimizers: list[Optimizer], options: ParameterServerOptions) -> list[ServedOptimizer]:
    """Return how the servers run each optimizer. Raise a ConfigurationError if they cannot run one of them."""
    if not optimizers:
        raise ConfigurationError("configure_optimizers returned no optimizer: return at least one")
    served = [_check_optimizer(optimizer, options) for optimizer in optimizers]
    joint = [type(o).__name__ for o, way in zip(optimizers, served, strict=True) if way.is_joint]
    if joint and len(optimizers) > 1:
        raise ConfigurationError(
            f"{joint[0]} changes a parameter depending on other parameters or their gradients, which servers cannot do "
            f"with {len(optimizers)} optimizers: use an optimizer that treats each parameter by itself, or strategy ddp"
        )
    return served


def _check_optimizer(optimizer: Optimizer, options: ParameterServerOptions) -> ServedOptimizer:
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            "LBFGS evaluates the loss several times in a step, which servers cannot do: use SGD, Adam or another "
            "optimizer that needs one gradient in each step, or strategy ddp"
        )
    # In mode local each worker runs the optimizer itself, so the servers need not support it.
    if options.mode == "local":
        return ServedOptimizer()
    served = _check_served(optimizer)
    if not options.aggregates:  # The servers count the updates, because each worker counts only its own steps.
        served = replace(served, counters={})
    if served.is_joint and (not options.aggregates or options.replication > 1):
        setting, remedy = (
            (f"replication: {options.replication}", "replication: 1")
            if options.aggregates
            else (f"mode: {options.mode}", "mode: sync")
        )
        raise ConfigurationError(
            f"{type(optimizer).__name__} changes a parameter depending on other parameters or their gradients, so "
            f"one server makes the steps of all parameters together, which does not work with `{setting}`: use "
            f"`{remedy}`, an optimizer that treats each parameter by itself, or strategy ddp"
        )
    return served


def check_importable(optimizer: Optimizer, options: ParameterServerOptions, forked: bool) -> None:
    """Raise a ConfigurationError for an optimizer class that the servers cannot import.

    Args:
        optimizer: The module's optimizer.
        options: The strategy's options.
        forked: Whether the servers are forked from the process that has imported the class. Otherwise the servers are
            other programs.
    """
    kind = type(optimizer)
    if options.mode == "local" or (forked and not options.endpoints):
        return
    if kind.__module__ in ("__main__", "__mp_main__"):
        raise ConfigurationError(
            f"{kind.__name__} is defined in the script or notebook itself, but the servers are other programs, which "
            "import the optimizer's class: move the class to a module that the script imports, or use strategy "
            "parameter_server_fork or ddp"
        )


def _check_served(optimizer: Optimizer) -> ServedOptimizer:
    name = type(optimizer).__name__
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigurationError(
            f"{name} keeps separate weights for training and for evaluation (its methods train and eval), but servers "
            "hold one set of weights: use `mode: local`, or strategy ddp"
        )
    for number, group in enumerate(hyperparameters(optimizer)):
        for option, value in group.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigurationError(
                    f"{name} has {option}={value} in parameter group {number}, but the servers accept finite numbers "
                    "only: set a finite value, or use `mode: local` or strategy ddp"
                )
    return check_on_servers(optimizer)


def check_dispatch(trainer: Trainer, options: ParameterServerOptions) -> None:
    """Raise a ConfigurationError for settings of a trainer that do not work with ``data_dispatch: dynamic``.

    With ``dynamic`` the workers make different numbers of steps, so they can validate, save or stop together only at
    the end of an epoch.
    """
    if options.data_dispatch == "static":
        return
    for setting, replacement in _within_epochs(trainer):
        raise ConfigurationError(
            f"{setting}: with `data_dispatch: dynamic` each worker makes its own number of steps, and the workers wait "
            f"for each other only at the end of an epoch; use {replacement}, or `data_dispatch: static`"
        )


def _within_epochs(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yield the settings that make all workers wait for each other within an epoch.

    Each setting is a pair of texts for an error message: the setting with its value, and what to use instead.
    """
    if trainer.val_check_interval != 1.0:
        yield f"val_check_interval={trainer.val_check_interval}", "1.0"
    if trainer.max_steps != -1 and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        yield f"max_steps={trainer.max_steps}", "max_epochs"
    if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        # Some workers would create the loader of the next epoch while other workers still train in the current epoch.
        yield f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}", "0"  # type: ignore[attr-defined]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        argument = acts_within_epochs(callback)
        if argument is not None:
            by_epochs = isinstance(callback, ModelCheckpoint)
            replacement = "every_n_epochs" if by_epochs else "the callback with interval: epoch"
            yield f"{type(callback).__name__} with {argument}", replacement


# Names of the hooks that run between backward and the optimizer's step. They see the gradient of one worker's images,
# because the servers compute the mean over the workers later. A linear function (to scale, mask, add or drop gradients)
# may be applied before the mean, because the result is the same. A norm, a clamp or a test for NaN gives a different
# result.
HOOKS = ("on_after_backward", "on_before_optimizer_step")
# Names of torch's functions that are linear in gradients. `_is_linear` also accepts the in-place variants and operators
# of these functions, such as `mul_` and `__rmul__` for `mul`.
# `PRODUCTS`: linear if only one argument was computed from gradients.
# `QUOTIENTS`: linear if only the dividend was computed from gradients.
# `LINEAR`: linear in all arguments, or independent of the tensors' values.
PRODUCTS = ("mul", "multiply", "matmul", "masked_fill", "where")
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
    """Make the user's hooks in `HOOKS` raise a ConfigurationError if they compute a nonlinear function of gradients.

    With manual optimization the same holds for the method ``training_step``.

    Returns:
        The wrapper of the hooks. Its method ``end`` restores the original hooks.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    hooks = HOOKS if module.automatic_optimization else (*HOOKS, "training_step")
    return HookContexts((module, *callbacks), hooks, partial(Linear, names))


class Linear(TorchFunctionMode):
    """Mode of torch that raises a ConfigurationError when a user's hook computes a nonlinear function of gradients.

    Args:
        names: Name of each parameter, by the parameter's ``id()``.
        hook: Class and method of the user's hook that runs in this mode, for the error message.
    """

    def __init__(self, names: dict[int, str], hook: str) -> None:
        super().__init__()
        self._hook = hook
        self._names = names
        # For each gradient, and each tensor that was computed from gradients: the name of one of the parameters whose
        # gradients were used. The error message contains this name.
        self._gradients: TensorOrigins[str] = TensorOrigins()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Check whether torch's function `func` is linear in gradients, and call the function."""
        kwargs = kwargs or {}
        parameters = self._parameters_of((*args, *kwargs.values()))
        if parameters and not self._is_linear(func, args, parameters):
            self._refuse(parameters[0], func)
        result = func(*args, **kwargs)
        if func == Tensor.grad.__get__:  # type: ignore[union-attr]
            parameters = [self._names[id(args[0])]] if id(args[0]) in self._names else []
        if func is torch.autograd.grad:
            wanted = tensors_in([args[1] if len(args) > 1 else kwargs["inputs"]])
            parameters = [self._names[id(tensor)] for tensor in wanted if id(tensor) in self._names]
        if parameters:
            self._gradients.record(parameters[0], (result, *args[: func.__name__.endswith("_")]))
        return result

    def _parameters_of(self, values: Iterable[Any]) -> list[str]:
        """Return the name of a parameter for each tensor in `values` that was computed from gradients."""
        return [name for tensor in tensors_in(values) if (name := self._gradients.origin_of(tensor, ""))]

    def _is_linear(self, func: Callable[..., Any], args: Sequence[Any], parameters: Sequence[str]) -> bool:
        if func.__name__ in TO_PYTHON:
            return False
        name = func.__name__.removeprefix("_foreach_").strip("_")
        if func.__name__.startswith("__") and name[:1] in ("r", "i") and name[1:] in (*PRODUCTS, *QUOTIENTS, *LINEAR):
            name = name[1:]  # Reflected and in-place operators, such as `__rmul__` and `__imul__`, count as `mul`.
        if name in QUOTIENTS:
            return len(parameters) == 1 and not self._parameters_of(args[1:])
        if name in PRODUCTS:
            return len(parameters) == 1 or func.__name__.startswith("_foreach_")
        return name in LINEAR

    def _refuse(self, name: str, func: Any) -> NoReturn:
        raise ConfigurationError(
            f"{self._hook} computes {func.__name__} of the gradient of {name}, which comes from this worker's images "
            "alone: the servers compute the mean over the workers later, so only linear functions (to scale, mask, add "
            "or drop gradients) give the same result as on one device; to clip, set Trainer(gradient_clip_val=...), or "
            "call self.clip_gradients in manual optimization; otherwise use `mode: async`, `mode: local` or strategy "
            "ddp"
        )
