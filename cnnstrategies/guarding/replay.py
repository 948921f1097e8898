"""Compute the layers of one microbatch twice, and compare the results."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from cnnstrategies.recording.steps import StepReader

FACTOR = 10.0  # Largest ratio of a difference to the difference that an input with errors of rounding makes.


class Replay(StepReader):
    """Reader that computes each layer of torch with parameters again, right after its first forward in a batch.

    The second computation begins with the buffers of the first one, and leaves nothing behind. Layers of other packages
    are left out, because their code may count its calls; layers of torch with parameters draw no random numbers. A
    layer of which this rank does not have all values is left out, because the other ranks do not help to compute it
    again.

    Args:
        module: The module that is trained.
        is_held: Function that tells whether this rank has the values of a tensor.
        local_code: Function that returns a context for code that only this rank runs.
        every: Number of steps from one step whose layers are computed again to the next.
    """

    def __init__(
        self,
        module: nn.Module,
        is_held: Callable[[Tensor], bool],
        local_code: Callable[[], AbstractContextManager[None]],
        every: int,
    ) -> None:
        self._is_held, self._local_code, self._every = is_held, local_code, every
        self._names = {id(layer): name for name, layer in module.named_modules() if _is_known(layer)}
        self._before: dict[int, list[Tensor]] = {}
        self._results: dict[str, Tensor] = {}

    @override
    def begin_batch(self, batch: Any, index: int) -> None:
        self.follows_calls = self.step % self._every == 0

    def take(self) -> list[str]:
        """Return the names of the layers whose two results differ."""
        names, flags = list(self._results), list(self._results.values())
        self._results, self._before = {}, {}
        return [name for name, flag in zip(names, torch.stack(flags).tolist(), strict=True) if flag] if flags else []

    @override
    def before_call(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._names.get(id(module), "") in ("", *self._results) or not module.training:
            return
        is_plain = all(type(value) is Tensor for value in arguments)
        if is_plain and all(self._is_held(value) for value in (*arguments, *module.parameters(), *module.buffers())):
            with self._local_code():
                self._before[id(module)] = [buffer.clone() for buffer in module.buffers()]

    @override
    @torch.no_grad()
    def after_call(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        before = self._before.pop(id(module), None)
        if before is None or type(output) is not Tensor or not self._is_held(output):
            return
        with self._local_code():
            after = [buffer.clone() for buffer in module.buffers()]
            again = _forward(module, arguments, before)
            difference = again.float() - output.nan_to_num().float()
            limit = torch.zeros((), device=again.device)
            if again.device.type != "cpu":
                disturbed = _forward(module, [_disturbed(value) for value in arguments], before)
                limit = FACTOR * (disturbed.float() - again.float()).norm()
            _restore(module, after)
            self._results[self._names[id(module)]] = difference.norm() > limit


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
