"""Report of the times at which this process waits for other processes, whoever makes it wait.

A step of one rank contains waits for other ranks: in the all-reduce of gradients, in DDP's broadcast of buffers, in
Lightning's reduction of logged values, in the user's own barriers, and in pulls from parameter servers. A rank that
waits looks as slow as the rank for which it waits. Measurements of a rank's own time therefore subtract the waits.

Watchers are told when each wait begins and ends:

- While there is a watcher, the methods of torch's class ``ProcessGroup`` that run a collective, ``Work.wait`` and
  ``Future.wait`` report their waits. Every Python function that runs a collective calls these methods.
- DDP broadcasts buffers in C++. :func:`report_forwards` reports the time from the start of DDP's forward to the start
  of the wrapped module's forward.
- Code of this package that waits in another way uses :func:`waiting`.

DDP also waits in C++ for the all-reduce of gradients, at the end of backward. Only a communication hook of DDP knows
when this wait begins, so a strategy with such a hook measures this wait itself.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from cnnstrategies._torch_private import COLLECTIVES, is_in_backward


class WaitWatcher(Protocol):
    """An object that is told about each wait of the thread that trains.

    Waits do not overlap: a wait inside another wait is not reported. On a GPU, a collective may return before it has
    run. The device then waits between the two calls, and events that are recorded in the calls measure this wait.
    """

    def begin_waiting(self, kind: str) -> None:
        """Act on the begin of a wait.

        Args:
            kind: What the process waits for: the name of a method of ``ProcessGroup`` such as ``allreduce``, or
                ``buffers`` for DDP's broadcast, or ``servers``.
        """

    def end_waiting(self) -> None:
        """Act on the end of the wait."""


class _Waits:
    """The waits of this process: its watchers, and the replaced methods of torch."""

    def __init__(self) -> None:
        self.watchers: list[WaitWatcher] = []
        self.thread = 0  # The thread that trains.
        self.depth = 0  # Number of nested waits that have begun and not ended.
        self.kind = "collective"  # Kind of the collective that was started last.
        self.replaced: list[tuple[Any, str, Any]] = []

    def is_training(self) -> bool:
        """Return whether the calling thread is the thread that trains, or a thread in which autograd runs backward."""
        return threading.get_ident() == self.thread or is_in_backward()

    def begin(self, kind: str) -> None:
        self.depth += 1
        if self.depth == 1:
            for watcher in self.watchers:
                watcher.begin_waiting(kind)

    def end(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            for watcher in self.watchers:
                watcher.end_waiting()


_waits = _Waits()
# Files whose functions report a wait: the frames between a watcher and the method of torch that waits.
_REPORTING = (__file__, contextlib.__file__)


@contextmanager
def waiting(kind: str) -> Generator[None]:
    """Report that this process waits for other processes while the context is open."""
    if not _waits.watchers or not _waits.is_training():
        yield
        return
    _waits.begin(kind)
    try:
        yield
    finally:
        if _waits.watchers:  # Otherwise the last watcher was removed in this context.
            _waits.end()


def watch(watcher: WaitWatcher) -> None:
    """Tell a watcher about all waits of the calling thread from now on, until :func:`unwatch` is called."""
    _waits.thread = threading.get_ident()
    if not _waits.watchers:
        _waits.depth = 0
        for name in COLLECTIVES:
            if name in vars(dist.ProcessGroup):  # Some names are only in newer versions of torch.
                _replace(dist.ProcessGroup, name, _reporting_collective)
        # The futures of collectives are objects of the class from which torch.futures.Future is derived.
        for waiter in (dist.Work, torch.futures.Future.__base__):
            _replace(waiter, "wait", _reporting_wait)
    _waits.watchers.append(watcher)


def unwatch(watcher: WaitWatcher) -> None:
    """Tell a watcher no longer about waits. Without watchers, torch's own methods are restored."""
    if watcher in _waits.watchers:
        _waits.watchers.remove(watcher)
    if not _waits.watchers:
        for owner, name, method in _waits.replaced:
            setattr(owner, name, method)
        _waits.replaced.clear()


def _replace(owner: Any, name: str, reporting: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> None:
    # A method of a C++ class only binds its object if the descriptor itself is restored.
    _waits.replaced.append((owner, name, vars(owner)[name]))
    setattr(owner, name, reporting(getattr(owner, name), name))


def _reporting_collective(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        _waits.kind = name
        with waiting(name):
            return function(*args, **kwargs)

    return collective


def _reporting_wait(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wait(*args: Any, **kwargs: Any) -> Any:
        with waiting(_waits.kind):
            return function(*args, **kwargs)

    return wait


def only_starts(frame: FrameType | None) -> bool:
    """Return whether a reported wait is a call that only starts a collective, and does not wait for other ranks.

    Args:
        frame: The innermost frame of the call stack at the begin of the wait, in a method of a watcher.
    """
    while frame is not None and frame.f_code.co_filename in _REPORTING:
        if frame.f_code.co_name == "collective":
            return True
        frame = frame.f_back
    return False


def report_forwards(model: Any) -> tuple[RemovableHandle, ...]:
    """Report DDP's broadcast of buffers in each forward. Return handles that end the reports.

    The wrapped module must be called through its ``__call__``, as DDP does. There are no handles if the model is not
    wrapped by DDP, or has no buffers.
    """
    if not isinstance(model, DistributedDataParallel) or not model.broadcast_buffers or not [*model.buffers()]:
        return ()
    return model.register_forward_pre_hook(_begin_forward), model.module.register_forward_pre_hook(_end_forward)


# The hooks are functions of this module, so that copies and pickles of the module contain only their names.
_forward_waits = threading.local()


def _begin_forward(model: torch.nn.Module, args: Any) -> None:
    if _waits.watchers and _waits.is_training() and not getattr(_forward_waits, "open", False):
        _forward_waits.open = True
        _waits.begin("buffers")


def _end_forward(module: torch.nn.Module, args: Any) -> None:
    if getattr(_forward_waits, "open", False):
        _forward_waits.open = False
        if _waits.watchers:
            _waits.end()
