"""Hooks find the gradients of their own worker's images: what is linear commutes with the mean that servers take.

To scale, mask, add up or leave out gradients is the same before that mean as after it. A norm, a clamp or a test for
NaN is not, and is refused.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.licences import own_hooks

HOOKS = ("on_after_backward", "on_before_optimizer_step")
READS = ("__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "item", "tolist", "numpy")
# By the names of torch's functions, without those of the forms that are in place or operators.
PRODUCTS = ("mul", "multiply", "matmul", "masked_fill", "where")
LINEAR = (
    "add", "sub", "subtract", "neg", "negative", "sum", "mean", "cumsum", "cat", "stack", "lerp", "zero", "copy",
    "clone", "detach", "contiguous", "view", "reshape", "flatten", "t", "permute", "transpose", "expand", "to",
    "cpu", "cuda", "float", "double", "unsqueeze", "squeeze", "chunk", "split", "unbind", "zeros_like", "ones_like",
    "empty_like", "getitem", "setitem", "get", "set", "delete", "size", "dim", "numel", "is_floating_point", "len",
    "hash", "repr", "stride", "is_contiguous", "element_size", "data_ptr", "iter", "pos", "requires_grad",
    "deepcopy",
)  # fmt: skip


class GradientWatch:
    """Watches the hooks of a module and its callbacks between backward and the optimizer's step.

    Args:
        module: What is trained.
        callbacks: The trainer's.
    """

    def __init__(self, module: LightningModule, callbacks: Iterable[Callback]) -> None:
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._wrapped: list[tuple[Any, str]] = []
        for one in (module, *callbacks):
            for name in own_hooks(one, HOOKS):
                vars(one)[name] = partial(self._run, f"{type(one).__name__}.{name}", getattr(one, name))
                self._wrapped.append((one, name))

    def end(self) -> None:
        """Watch no more."""
        for one, name in self._wrapped:
            vars(one).pop(name, None)

    def _run(self, hook: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with Linear(hook, self._names):
            return function(*args, **kwargs)


class Linear(TorchFunctionMode):
    """Refuses what is not linear in gradients.

    Args:
        hook: Whose code runs inside.
        names: The name of each parameter, by its id.
    """

    def __init__(self, hook: str, names: dict[int, str]) -> None:
        super().__init__()
        self._hook = hook
        self._names = names
        self._gradients: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # and what is made of them, by id

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """See what a function is given, and call it.

        Raises:
            ConfigurationError: It is not linear in a gradient.
        """
        kwargs = kwargs or {}
        given = [self._of(tensor) for tensor in _tensors((*args, *kwargs.values()))]
        found = [name for name in given if name]
        if found and not self._is_linear(func, args, found):
            self._refuse(found[0], func)
        result = func(*args, **kwargs)
        if func == Tensor.grad.__get__:  # type: ignore[union-attr]
            found = [self._names.get(id(args[0]), "")]
        changed = args[:1] if func.__name__.endswith("_") else ()
        for tensor in _tensors((result, *changed)) if found and found[0] else ():
            if not isinstance(tensor, nn.Parameter):
                self._gradients[id(tensor)] = weakref.ref(tensor), found[0]
        return result

    def _is_linear(self, func: Any, args: Sequence[Any], found: Sequence[str]) -> bool:
        if func.__name__ in READS:
            return False
        name = func.__name__.removeprefix("_foreach_").strip("_")
        if name in ("div", "truediv", "true_divide", "itruediv"):
            return len(found) == 1 and not any(self._of(tensor) for tensor in _tensors(args[1:]))
        if name.removeprefix("r").removeprefix("i") in PRODUCTS or name in PRODUCTS:
            return len(found) == 1 or func.__name__.startswith("_foreach_")
        return any(one in LINEAR for one in (name, name[1:] if name[:1] in ("r", "i") else name))

    def _of(self, tensor: Tensor) -> str:
        """The parameter whose gradient a tensor is made of, or nothing."""
        noted = self._gradients.get(id(tensor))
        return noted[1] if noted is not None and noted[0]() is tensor else ""

    def _refuse(self, name: str, func: Any) -> None:
        raise ConfigurationError(
            f"{self._hook} computes {func.__name__} of the gradient of {name}: with strategy parameter_server in "
            "common steps that is of its own worker's images until the servers have taken the mean, so only what is "
            "linear is as on one device (to scale, mask, add, leave out); to clip set Trainer(gradient_clip_val=...), "
            "or use mode async or local, or strategy ddp"
        )


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
