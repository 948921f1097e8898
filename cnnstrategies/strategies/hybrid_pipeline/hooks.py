"""Hooks and callbacks under a pipeline, which find one stage's weights and gradients.

What they do with each parameter by itself is right. What would need those of all stages, such as a norm over all
gradients or an average of the network, is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.divided_module import DividedModule
from cnnstrategies.strategies.observer_hooks import TO_PYTHON, HookContexts, TensorOrigins, tensors_in

# What runs while the network is divided. What is transferred are batches; what is saved and loaded is whole.
_ELSEWHERE = ("on_before_batch_transfer", "on_after_batch_transfer", "on_save_checkpoint", "on_load_checkpoint")
_HOOKS = (
    *("backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *{name for name in (*dir(Callback), *dir(LightningModule)) if name.startswith("on_") and name not in _ELSEWHERE},
)
_NOWHERE: frozenset[str] = frozenset()
_PARTS = "with strategy hybrid_pipeline a rank has those of its own stage alone"
_REMEDY = (
    "change and read each parameter by itself; to clip by a norm set Trainer(gradient_clip_val=...) or call "
    "self.clip_gradients, which take all stages' gradients; or use strategy ddp"
)
_AVERAGE = "to average weights use lightning.pytorch.callbacks.EMAWeightAveraging or WeightAveraging"


class HookWatch:
    """Watches the hooks of a module and its callbacks, from the set-up to :meth:`end`."""

    def __init__(self, divided: DividedModule) -> None:
        self._divided = divided
        self._own = divided.names_of_parameters
        self._running: list[_Watched] = []
        self._handle = divided.stand_in.register_state_dict_pre_hook(self._refuse_state)  # type: ignore[no-untyped-call]
        self._hooks = HookContexts([divided.module, *divided.callbacks], _HOOKS, self.watching)

    def end(self) -> None:
        """Watch no more."""
        self._handle.remove()
        self._hooks.end()

    @contextmanager
    def watching(self, hook: str) -> Iterator[None]:
        """Refuse what the code inside, a hook or a step, cannot do right."""
        watched = _Watched(hook, self._divided.path, self._own)
        self._running.append(watched)
        try:
            with watched:
                yield
        finally:
            self._running.pop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the strategy does what a hook has asked it for, with all stages."""
        pausing = [watched for watched in self._running if not watched.paused]
        for watched in pausing:
            watched.paused = True
        try:
            yield
        finally:
            for watched in pausing:
                watched.paused = False

    def _refuse_state(self, *_: Any) -> None:
        if self._running and not self._running[-1].paused:
            raise ConfigurationError(
                f"{self._running[-1].hook} takes the state dict of self.{self._divided.path}: with strategy "
                "hybrid_pipeline a rank has its own stage's alone; call trainer.save_checkpoint, or, on every rank, "
                f"trainer.strategy.lightning_module_state_dict(), which gives rank 0 the whole; {_AVERAGE}"
            )


class _Watched(TorchFunctionMode):
    """Knows of every tensor from which parameters its values come.

    Args:
        own: The name of each of the stage's parameters, by its id; the stage's part of an average has the same.
    """

    def __init__(self, hook: str, path: str, own: Mapping[int, str]) -> None:
        super().__init__()
        self.hook = hook
        self.paused = False
        self._path = path
        self._own = own
        self._names = frozenset(own.values())
        self._origins: TensorOrigins[frozenset[str]] = TensorOrigins()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, unless it puts several parameters together, or makes a number of one."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        given = (*args, *kwargs.values())
        if name.startswith("_foreach_"):
            origins = [self._origin(one, name) for one in _item_by_item(given)]
            result = func(*args, **kwargs)
            for place, origin in enumerate(origins):
                self._note(origin, args[0][place], result[place] if result is not None else None)
            return result
        origin = self._origin(given, name)
        if name in TO_PYTHON and origin & self._names and args[0].dtype != torch.bool:
            self._refuse(f"makes numbers of {self._path}.{min(origin)} ({name})", _REMEDY)
        result = func(*args, **kwargs)
        self._note(origin, result, args[0] if name in ("__setitem__", "__set__") else None)
        return result

    def _origin(self, given: Iterable[Any], name: str) -> frozenset[str]:
        """From which parameters the values come; those of truth values count only where there are no others."""
        tensors = list(tensors_in(given))
        if len(tensors) < 2:
            return self._all_of(tensors)
        numbers = [tensor for tensor in tensors if tensor.dtype != torch.bool]
        origin = self._all_of(numbers)
        own = origin & self._names
        if own and len(origin) > 1:
            if origin - own:
                self._refuse(
                    f"computes with {self._path}.{min(own)} and a parameter of another module ({name}), as a copy of "
                    f"{self._path} has",
                    _AVERAGE,
                )
            some = " and ".join(f"{self._path}.{one}" for one in sorted(own)[:2])
            self._refuse(f"computes with {some} together ({name}), as for a norm or a statistic", _REMEDY)
        return origin or self._all_of(tensors)

    def _all_of(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        return _NOWHERE.union(*(self._of(tensor) for tensor in tensors))

    def _of(self, tensor: Tensor) -> frozenset[str]:
        if id(tensor) in self._own:
            return frozenset({self._own[id(tensor)]})
        if isinstance(tensor, nn.Parameter):
            return frozenset({f"parameter {id(tensor)}"})
        return self._origins.origin_of(tensor, _NOWHERE)

    def _note(self, origin: frozenset[str], *results: Any) -> None:
        if origin:
            self._origins.record(origin, results)

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise ConfigurationError(f"{self.hook} {what}: {_PARTS}; {remedy}")


def _item_by_item(given: Sequence[Any]) -> Iterator[list[Any]]:
    """What belongs to each item of the lists that torch's functions for many tensors take."""
    lists = [one for one in given if isinstance(one, (list, tuple))]
    others = [one for one in given if not isinstance(one, (list, tuple))]
    for place in range(len(lists[0])):
        yield [*(one[place] for one in lists if place < len(one)), *others]
