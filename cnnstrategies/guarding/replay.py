"""Compute the layers of one microbatch twice, and compare the results."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

FACTOR = 10.0  # Largest ratio of a difference to the difference that an input with errors of rounding makes.


class Replay:
    """Hooks that compute each layer of torch with parameters again, right after its first forward in a batch.

    The second computation begins with the buffers of the first one, and leaves nothing behind. Only global hooks are
    used, because strategies look at the hooks of a user's modules. Layers of other packages are left out, because their
    code may count its calls; layers of torch with parameters draw no random numbers. A layer of which this rank does
    not have all values is left out, because the other ranks do not help to compute it again.

    Args:
        module: The module that is trained.
        is_held: Function that tells whether this rank has the values of a tensor.
        local_code: Function that returns a context for code that only this rank runs.
    """

    def __init__(
        self,
        module: nn.Module,
        is_held: Callable[[Tensor], bool],
        local_code: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._is_held, self._local_code = is_held, local_code
        self._names = {id(layer): name for name, layer in module.named_modules() if _is_known(layer)}
        self._before: dict[int, list[Tensor]] = {}
        self._results: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Begin to compute layers twice."""
        self._handles = [register_module_forward_pre_hook(self._prepare), register_module_forward_hook(self._repeat)]

    def end(self) -> list[str]:
        """Remove the hooks, and return the names of the layers whose two results differ."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        names, flags = list(self._results), list(self._results.values())
        self._results, self._before = {}, {}
        return [name for name, flag in zip(names, torch.stack(flags).tolist(), strict=True) if flag] if flags else []

    def _prepare(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._names.get(id(layer), "") in ("", *self._results) or not layer.training:
            return
        is_plain = all(type(value) is Tensor for value in arguments)
        if is_plain and all(self._is_held(value) for value in (*arguments, *layer.parameters(), *layer.buffers())):
            with self._local_code():
                self._before[id(layer)] = [buffer.clone() for buffer in layer.buffers()]

    @torch.no_grad()
    def _repeat(self, layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        before = self._before.pop(id(layer), None)
        if before is None or type(output) is not Tensor or not self._is_held(output):
            return
        with self._local_code():
            after = [buffer.clone() for buffer in layer.buffers()]
            again = _forward(layer, arguments, before)
            difference = again.float() - output.nan_to_num().float()
            limit = torch.zeros((), device=again.device)
            if again.device.type != "cpu":
                disturbed = _forward(layer, [_disturbed(value) for value in arguments], before)
                limit = FACTOR * (disturbed.float() - again.float()).norm()
            _restore(layer, after)
            self._results[self._names[id(layer)]] = difference.norm() > limit


def _forward(layer: nn.Module, arguments: Any, buffers: list[Tensor]) -> Tensor:
    _restore(layer, buffers)
    result: Tensor = layer.forward(*arguments)
    return result.nan_to_num()


def _restore(layer: nn.Module, values: list[Tensor]) -> None:
    for buffer, value in zip(layer.buffers(), values, strict=True):
        buffer.data.copy_(value)  # Autograd, which may have saved the buffer, must not notice.


def _is_known(layer: nn.Module) -> bool:
    is_leaf = next(layer.children(), None) is None and next(layer.parameters(), None) is not None
    return is_leaf and type(layer).__module__.startswith("torch.nn.modules.")


def _disturbed(value: Tensor) -> Tensor:
    """Return a value with errors of rounding, without random numbers of the run."""
    if not value.is_floating_point():
        return value
    signs = torch.arange(value.numel(), device=value.device).reshape(value.shape) % 3 - 1
    return value * (1 + torch.finfo(value.dtype).eps * signs).to(value.dtype)
