"""Hooks find the gradients of their own worker's images: what is linear commutes with the mean that servers take.

To scale, mask, add up or leave out gradients is the same before that mean as after it. A norm, a clamp or a test for
NaN is not, and is refused.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.licences import READS, Origins, WatchedHooks, tensors_in

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


def watch_gradients(module: LightningModule, callbacks: Iterable[Callback]) -> WatchedHooks:
    """Watch the hooks of a module and its callbacks between backward and the optimizer's step."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return WatchedHooks((module, *callbacks), HOOKS, partial(Linear, names))


class Linear(TorchFunctionMode):
    """Refuses what is not linear in gradients."""

    def __init__(self, names: dict[int, str], hook: str) -> None:
        super().__init__()
        self._hook = hook
        self._names = names
        self._gradients: Origins[str] = Origins()  # The name of its parameter for each, and for what is made of it.

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
            self._gradients.note(found[0], (result, *args[: func.__name__.endswith("_")]))
        return result

    def _found(self, values: Iterable[Any]) -> list[str]:
        """The parameters whose gradients are among some values."""
        return [name for tensor in tensors_in(values) if (name := self._gradients.of(tensor, ""))]

    def _is_linear(self, func: Callable[..., Any], args: Sequence[Any], found: Sequence[str]) -> bool:
        if func.__name__ in READS or func.__name__ == "__bool__":
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
