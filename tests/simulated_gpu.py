"""A simulated GPU: tensors that say they are on `cuda`, and hold their values in the host's memory.

What it computes is, bit for bit, what the CPU computes. It refuses what a GPU refuses, an operation on tensors of both,
and notes each place where the host would wait until the device has computed all that it was told. Copies for which the
host does not wait come as late as they may, and until then their targets hold nothing. Its random numbers are its own.

To torch's C++ such a tensor is one of the host, with `Python` among its dispatch keys: so no driver is ever asked. All
that tells where a tensor is goes by Python. See `simulated_cuda.py` for `torch.cuda` and collectives.
"""

import functools
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

aten = torch.ops.aten
# What waits whatever it is given: its result, or the result's shape, depends on values.
_WAITS = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class MixedError(RuntimeError):
    """An operation was given tensors of the host and of the device."""


class Stream:
    """What the device does in order: copies between host and device as late as it may, all else at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.told = 0  # copies
        self._late: deque[Callable[[], None]] = deque()
        DEVICE.streams.append(self)

    device = property(lambda self: DEVICE.name)

    def tell(self, copy: Callable[[], None]) -> None:
        """Have it copy some time."""
        self._late.append(copy)
        self.told += 1

    def go_on(self, told: int | None = None) -> None:
        """Do what it was told, or the first of that."""
        while self._late and self.told - len(self._late) < (self.told if told is None else told):
            self._late.popleft()()

    def wait_stream(self, other: "Stream") -> None:
        """What it is told from here on comes after all that another one was."""
        if other is not DEVICE.streams[0]:
            other.go_on()

    def wait_event(self, event: Any) -> None:
        """What it is told from here on comes after an event."""
        event.stream.go_on(event.told)

    def record_event(self, event: Any = None) -> Any:
        """Mark what it has been told so far."""
        event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits for it."""
        DEVICE.wait("a stream")
        self.go_on()


class Device:
    """The one of this process.

    Attributes:
        name: `cuda` with its number.
        waits: Where the host has waited since the last :meth:`waits_inside`, and how often.
        random: The state of its random numbers.
        pinned: Pinned memory by its address; held, so that no other gets the address.
        streams: The first is the one that computes.
        stream: The present one.
    """

    stream: Stream

    def __init__(self) -> None:
        self.name = torch.device("cuda", 0)
        self.waits: Counter[str] = Counter()
        self.random = torch.Generator().manual_seed(0).get_state()
        self.pinned: dict[int, Tensor] = {}
        self.streams: list[Stream] = []

    def wait(self, what: str) -> None:
        """The host waits for it."""
        frame = sys._getframe(1)
        inner = outer = None
        while frame is not None:
            name = frame.f_code.co_filename
            if "/cnnstrategies/" in name and "/tests/" not in name:
                inner = inner or frame
            elif "simulated_" not in name and "/torch/" not in name:
                outer = outer or frame
            frame = frame.f_back  # type: ignore[assignment]
        found = inner or outer
        where = "" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"
        self.waits[f"{what} at {where}"] += 1
        self.streams[0].go_on()

    @contextmanager
    def waits_inside(self) -> Iterator[Counter[str]]:
        """Count those inside, apart from others."""
        before, self.waits = self.waits, Counter()
        try:
            yield self.waits
        finally:
            self.waits = before

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from its own random numbers."""
        host = torch.get_rng_state()
        torch.set_rng_state(self.random)
        try:
            yield
        finally:
            self.random = torch.get_rng_state()
            torch.set_rng_state(host)


DEVICE = Device()
DEVICE.stream = Stream()


class GpuTensor(torch.Tensor):
    """A tensor of the device.

    Attributes:
        host: Its values.
    """

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor, requires_grad: bool = False) -> "GpuTensor":
        """One with these values, which it shares."""
        tensor: GpuTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device="cpu",
            requires_grad=requires_grad,
        )
        tensor.host = host
        return tensor

    # These two let a module's parameters be replaced by it, as `.to("cuda")` does.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "GpuTensor":
        return GpuTensor(inner["host"])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.host.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GpuTensor":
        if id(self) not in memo:
            copied = GpuTensor(self.host.detach().clone(), self.requires_grad)
            if _is_parameter(self):
                copied._is_param = True  # type: ignore[attr-defined]
            memo[id(self)] = copied
        found: GpuTensor = memo[id(self)]
        return found

    # What Python asks of it.

    device = property(lambda self: DEVICE.name)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take another's memory and be where that is, as a module's parameters that go back to the host."""
        other, gradient = value.detach().requires_grad_(self.requires_grad), self.grad
        torch.utils.swap_tensors(self, torch.nn.Parameter(other, self.requires_grad) if _is_parameter(self) else other)
        self.grad = gradient

    def get_device(self) -> int:
        return DEVICE.name.index

    def is_pinned(self, *_: Any) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return _to(self, *args, **kwargs)

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return _to(self, "cpu")

    def cuda(self, *_: Any, **__: Any) -> "GpuTensor":
        return self

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def __setitem__(self, place: Any, value: Any) -> None:
        # C++ would copy a number from the host, where CUDA fills.
        value = value if isinstance(value, Tensor) else GpuTensor(torch.tensor(value, dtype=self.dtype))
        super().__setitem__(place, value)

    def as_subclass(self, cls: Any) -> Any:
        """For tensors without values, which stand for others; its own values are on the host."""
        if cls not in _ON_DEVICE:
            _ON_DEVICE[cls] = type(cls.__name__, (cls,), {"device": GpuTensor.device})
        return self.host.as_subclass(_ON_DEVICE[cls])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What Python's functions are asked that are given one."""
        function = {Tensor.to: _to, F.one_hot: _one_hot}.get(func, func)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is computed with it."""
        return _compute(func, args, kwargs or {})


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


class GpuMode(TorchDispatchMode):
    """Makes tensors on `cuda`, in this thread."""

    def __enter__(self) -> Any:
        torch._C._set_only_lift_cpu_tensors(True)  # Else `torch.tensor(..., device="cuda")` would ask a driver.
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute."""
        return _compute(func, args, kwargs or {})


# What Python asks


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if not isinstance(tensor, GpuTensor):
        return tensor.to(*args, **kwargs)
    copy = kwargs.pop("copy", False)
    device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
    dtype = dtype or tensor.dtype
    if device is not None and device.type != "cuda":
        moved: Tensor = _ToHost.apply(tensor, device, dtype, non_blocking)
        return moved
    if dtype == tensor.dtype and form is None and not copy:
        return tensor
    converted: Tensor = aten._to_copy.default(tensor, dtype=dtype, memory_format=form)
    return converted


class _ToHost(torch.autograd.Function):
    """A copy to the host, or to `meta`; C++ would take the device's tensor for one of the host already."""

    @staticmethod
    def forward(ctx: Any, tensor: GpuTensor, device: torch.device, dtype: torch.dtype, non_blocking: bool) -> Tensor:
        ctx.dtype = tensor.dtype
        moved = tensor.host.detach().to(device, dtype, copy=True)
        if device.type == "cpu" and non_blocking:
            _pin(moved)  # As torch does.
            _to_pinned(moved, moved.clone())
        elif device.type == "cpu":
            DEVICE.wait("a copy to the host")
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].to(DEVICE.name, ctx.dtype), None, None, None


def _one_hot(tensor: GpuTensor, num_classes: int = -1) -> Tensor:
    if num_classes == -1:
        DEVICE.wait("one_hot without the number of classes")
    return GpuTensor(F.one_hot(tensor.host, num_classes))


_ON_DEVICE: dict[type, type] = {}


# What is computed


def _compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in _leaves((*args, *kwargs.values())) if isinstance(leaf, Tensor)]
    on_device = any(isinstance(one, GpuTensor) for one in tensors)
    device = kwargs.get("device")
    device = None if device is None else torch.device(device)
    if func.namespace == "c10d":
        return _COLLECTIVE[0](func, args, kwargs)
    if func is aten._pin_memory.default or kwargs.get("pin_memory"):
        made = args[0].clone() if func is aten._pin_memory.default else func(*args, **{**kwargs, "pin_memory": False})
        return _pin(made)
    if func is aten._to_copy.default and device is not None and device.type == "cuda" and not on_device:
        _from_host(args[0], kwargs.get("non_blocking", False))
        kwargs = {key: value for key, value in kwargs.items() if key != "non_blocking"}
    elif not on_device and (device is None or device.type != "cuda"):
        return func(*args, **kwargs)
    elif func is aten.copy_.default:
        return _copy(*args, **kwargs)
    elif on_device:
        _look_at(func, args, tensors)
    if device is not None and device.type == "meta":
        return _plain(func, args, kwargs)
    own = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if device is not None:
        own["device"] = torch.device("cpu")
    if torch.Tag.nondeterministic_seeded in func.tags and own.get("generator") is None:
        with DEVICE.drawing():
            result = _plain(func, args, own)
    else:
        result = _plain(func, args, own)
    if func is aten._local_scalar_dense.default:
        return result
    kind = _result_of(func) if on_device else "new"
    if kind == "the first argument":
        return args[0]
    wrapped = _map(lambda one: GpuTensor(one) if type(one) is Tensor else one, result)
    return wrapped if kind == "new" else return_and_correct_aliasing(func, args, kwargs, wrapped)


@functools.cache
def _result_of(func: Any) -> str:
    """What an operation returns, where that is plain: torch takes a millisecond to find out for each."""
    returned, given = func._schema.returns, func._schema.arguments
    if any(isinstance(one.type, torch.ListType) for one in returned):
        return "another"  # This schema does not tell what lists are views of.
    if not any(one.alias_info for one in returned):
        return "new"
    written = [one.alias_info is not None and one.alias_info.is_write for one in (*returned, *given)]
    in_place = written == [True, True, *[False] * (len(given) - 1)] and torch.Tag.inplace_view not in func.tags
    return "the first argument" if in_place else "another"


def _leaves(value: Any) -> Iterator[Any]:
    for one in value:
        if isinstance(one, list | tuple):
            yield from _leaves(one)
        else:
            yield one


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_map(function, one) for one in value])
    return function(value)


def _look_at(func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Refuse what is mixed, and note where it waits."""
    if func in _WAITS:
        DEVICE.wait(str(func))
    indices = [one for one in args[1] if one is not None] if func in _INDEXING else []
    if not all(map(is_on_device, indices)):
        DEVICE.wait("an index of the host")
    if any(one.dtype in (torch.bool, torch.uint8) for one in indices):
        DEVICE.wait("an index by a mask")
    for one in tensors:
        # As on a GPU, but for scalars of the host; indices may be anywhere.
        if one.ndim and not is_on_device(one) and one.device.type != "meta" and not any(one is i for i in indices):
            shapes = [(tuple(each.shape), each.device.type) for each in tensors]
            raise MixedError(f"{func}: tensors of the host and of the device: {shapes}")


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if DEVICE.stream is not DEVICE.streams[0] and non_blocking and is_on_device(target) != is_on_device(source):
        _copy_beside(target, source)
        return target
    if is_on_device(target) and not is_on_device(source):
        _from_host(source, non_blocking)
    elif is_on_device(source) and not is_on_device(target):
        if non_blocking and _is_pinned(target):
            _to_pinned(target, _unwrap(source).clone())
            return target
        DEVICE.wait("a copy to the host")
    _unwrap(target).copy_(_unwrap(source))
    return target


def _copy_beside(target: Tensor, source: Tensor) -> None:
    """By a side stream: what is in the source when it comes to that."""
    assert all(is_on_device(one) or _is_pinned(one) for one in (target, source)), "memory that is not pinned"
    to, from_ = _held_by_others(_unwrap(target)), _held_by_others(_unwrap(source))
    _spoil(to())
    DEVICE.stream.tell(lambda: to().copy_(from_()))


def _held_by_others(tensor: Tensor) -> Callable[[], Tensor]:
    """A tensor, as long as others keep its memory; without them the device would use that again."""
    memory = StorageWeakRef(tensor.untyped_storage())
    place, dtype = (tensor.storage_offset(), tensor.shape, tensor.stride()), tensor.dtype

    def get() -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
        assert storage is not None, "memory was freed that a copy on a side stream uses"
        return torch.empty(0, dtype=dtype).set_(storage, *place)

    return get


def _to_pinned(target: Tensor, value: Tensor) -> None:
    """By the stream that computes: it comes late, and is of this moment."""
    _spoil(target)
    DEVICE.stream.tell(lambda: target.detach().copy_(value))


def _spoil(tensor: Tensor) -> None:
    """Nobody is to use what is there before the copy is over."""
    tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 113)


def _from_host(source: Tensor, non_blocking: bool) -> None:
    """By the stream that computes, which has it in time; but the host is not to change it before."""
    if source.device.type != "cpu" or not source.numel():
        return
    if not (non_blocking and _is_pinned(source)):
        DEVICE.wait("a copy from the host" + ("" if _is_pinned(source) else "'s memory that is not pinned"))
        return
    given, value = source.detach(), _bytes(source).clone()

    def check() -> None:
        assert torch.equal(_bytes(given), value), "pinned memory was written to that is being copied"

    DEVICE.stream.tell(check)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def is_on_device(tensor: Tensor) -> bool:
    """Whether it is the device's."""
    return isinstance(tensor, GpuTensor)


def _pin(tensor: Tensor) -> Tensor:
    DEVICE.pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in DEVICE.pinned


def _unwrap(value: Any) -> Any:
    return value.host if isinstance(value, GpuTensor) else value


def _plain(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(*_map(_unwrap, args), **{name: _map(_unwrap, value) for name, value in kwargs.items()})


_COLLECTIVE: list[Callable[..., Any]] = [_plain]
