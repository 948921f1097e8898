"""A simulated GPU: tensors that claim to be on `cuda` and hold their values in the host's memory.

It computes exactly what the CPU computes, bit for bit. Like a GPU, it refuses operations that mix tensors of the host
and of the device. It counts each place where the host would wait until the device has done all queued work. Copies for
which the host does not wait happen as late as possible, and until then their targets hold NaN. The device has a random
number generator of its own.

To torch's C++ code such a tensor is a host tensor with the dispatch key `Python`, so no driver is ever asked. Every
question about a tensor's device is answered in Python. See `simulated_cuda.py` for `torch.cuda` and collectives.
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

from cnnstrategies.pipeline import untouched
from cnnstrategies.placed import call_site, foreign
from cnnstrategies.placed.runner import OperationRunner
from cnnstrategies.spatial import rows_tensor
from cnnstrategies.spatial.rows_tensor import RowsTensor
from tests.runner.device_order import READ, Message

aten = torch.ops.aten
# Operations for which the host always waits, because their result or its shape depends on values.
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
HOST = torch.device("cpu", 0)
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class MixedError(RuntimeError):
    """An operation that mixes tensors of the host and of the device."""


class Stream:
    """A queue of work on the device, done in order.

    Copies between host and device are done as late as possible, everything else at once.

    Attributes:
        queued: Number of copies that were ever queued.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.queued = 0
        self._late: deque[Callable[[], None]] = deque()
        DEVICE.streams.append(self)

    device = property(lambda self: DEVICE.name)

    def queue(self, copy: Callable[[], None]) -> None:
        """Queue a copy, which is done when somebody waits for it."""
        self._late.append(copy)
        self.queued += 1

    def go_on(self, count: int | None = None) -> None:
        """Do the queued copies: all of them, or only the first `count` of all that were ever queued."""
        while self._late and self.queued - len(self._late) < (self.queued if count is None else count):
            self._late.popleft()()

    def wait_stream(self, other: "Stream") -> None:
        """Do later work of this stream after all that another stream has queued so far."""
        if other is not DEVICE.streams[0]:
            other.go_on()

    def wait_event(self, event: Any) -> None:
        """Do later work of this stream after an event."""
        event.stream.go_on(event.copies)

    def record_event(self, event: Any = None) -> Any:
        """Return an event that marks the work queued so far."""
        event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all queued work."""
        DEVICE.wait("a stream")
        self.go_on()


class Device:
    """The simulated GPU of this process.

    Attributes:
        name: `cuda` with the index of the GPU.
        waits: Number of times that the host has waited, by place, since :meth:`waits_inside` was entered last.
        random: State of the device's random number generator.
        pinned: By address: tensors in pinned memory. They are kept so that no other memory gets the address.
        streams: All streams; the first stream computes.
        stream: The current stream.
        sync_debug_mode: What a wait of the host does: "error" raises an error; see `torch.cuda.set_sync_debug_mode`.
        messages: Messages of this rank's host and device, and waits of the host, in the order of the program.
    """

    stream: Stream

    def __init__(self) -> None:
        self.name = torch.device("cuda", 0)
        self.waits: Counter[str] = Counter()
        self.random = torch.Generator().manual_seed(0).get_state()
        self.pinned: dict[int, Tensor] = {}
        self.streams: list[Stream] = []
        self.sync_debug_mode: int | str = "default"
        self.messages: list[Message] = []

    def wait(self, cause: str) -> None:
        """Count that the host waits, with the line of the package or of the test that causes it."""
        if self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {cause}")
        frame = sys._getframe(1)
        inner = outer = None
        while frame is not None:
            name = frame.f_code.co_filename
            if "/cnnstrategies/" in name and "/tests/" not in name:
                inner = inner or frame
            elif "simulated_" not in name and "/torch/" not in name:
                outer = outer or frame
            frame = frame.f_back  # type: ignore[assignment]
        user_frame = inner or outer
        where = "" if user_frame is None else f"{user_frame.f_code.co_filename}:{user_frame.f_lineno}"
        self.waits[f"{cause} at {where}"] += 1
        self.messages.append(Message(READ))
        self.streams[0].go_on()

    @contextmanager
    def waits_inside(self) -> Iterator[Counter[str]]:
        """Count the waits inside the context separately."""
        before, self.waits = self.waits, Counter()
        try:
            yield self.waits
        finally:
            self.waits = before

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw random numbers from the device's generator inside the context."""
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
    """A tensor on the device.

    Attributes:
        host: The host tensor that holds the values.
    """

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor, requires_grad: bool = False) -> "GpuTensor":
        """Return a device tensor that shares the values of a host tensor."""
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

    # `.to("cuda")` needs these two methods to replace a module's parameters by device tensors.
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
        copy_of_self: GpuTensor = memo[id(self)]
        return copy_of_self

    # Attributes and methods that Python code uses

    device = property(lambda self: DEVICE.name)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take the storage and the device of another tensor, as when a module's parameters move back to the host."""
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
        # C++ code would copy a number from the host; CUDA fills the tensor without a copy.
        value = value if isinstance(value, Tensor) else GpuTensor(torch.tensor(value, dtype=self.dtype))
        super().__setitem__(place, value)

    def as_subclass(self, cls: Any) -> Any:
        """Return a tensor of another class, for placeholders without values; this tensor's values are on the host."""
        if cls not in _ON_DEVICE:
            _ON_DEVICE[cls] = type(cls.__name__, (cls,), {"device": GpuTensor.device})
        return self.host.as_subclass(_ON_DEVICE[cls])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a Python function on device tensors."""
        function = {Tensor.to: _to, F.one_hot: _one_hot}.get(func, func)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation on device tensors. Foreign tensors and divided tensors have rules of their own."""
        if has_foreign(args) or has_divided(args, kwargs):
            return NotImplemented
        return _compute(func, args, kwargs or {})


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


class GpuMode(TorchDispatchMode):
    """A mode in which this thread can create tensors on `cuda`."""

    def __enter__(self) -> Any:
        torch._C._set_only_lift_cpu_tensors(True)  # Otherwise `torch.tensor(..., device="cuda")` would ask a driver.
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation."""
        if has_foreign(args):
            return func(*args, **(kwargs or {}))
        if has_divided(args, kwargs):
            with GpuMode():  # The rules also create tensors on the device.
                return RowsTensor.__torch_dispatch__(func, types, args, kwargs)
        return _compute(func, args, kwargs or {})


# Python functions


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if not claims_device(tensor):
        return Tensor.to(tensor, *args, **kwargs)
    copy = kwargs.pop("copy", False)
    device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
    dtype = dtype or tensor.dtype
    if device is not None and device.type != "cuda":
        moved: Tensor = _ToHost.apply(tensor, device, dtype, non_blocking, form)
        return moved
    if dtype == tensor.dtype and form is None and not copy:
        return tensor
    converted: Tensor = aten._to_copy.default(tensor, dtype=dtype, memory_format=form)
    return converted


class _ToHost(torch.autograd.Function):
    """A copy to the host or to `meta`; C++ code would believe that the device tensor is on the host already."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device, dtype: torch.dtype, late: bool, form: Any) -> Tensor:
        ctx.dtype = tensor.dtype
        # Modes see this operation, as on a GPU. The index of the host distinguishes it from operations of C++ code.
        target = HOST if device.type == "cpu" else device
        moved: Tensor = aten._to_copy.default(tensor, device=target, dtype=dtype, non_blocking=late, memory_format=form)
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].to(DEVICE.name, ctx.dtype), None, None, None, None


def _one_hot(tensor: GpuTensor, num_classes: int = -1) -> Tensor:
    if num_classes == -1:
        DEVICE.wait("one_hot without the number of classes")
    return GpuTensor(F.one_hot(tensor.host, num_classes))


_ON_DEVICE: dict[type, type] = {}


# Operations


def _compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in _leaves((*args, *kwargs.values())) if isinstance(leaf, Tensor)]
    on_device = any(isinstance(tensor, GpuTensor) for tensor in tensors)
    device = kwargs.get("device")
    device = None if device is None else torch.device(device)
    if func.namespace == "c10d":
        return _COLLECTIVE[0](func, args, kwargs)
    if func.overloadpacket is aten.to:  # Below autograd, torch has not replaced it by `_to_copy` yet.
        with GpuMode():
            return func.decompose(*args, **kwargs)
    if func is aten._pin_memory.default or kwargs.get("pin_memory"):
        made = args[0].clone() if func is aten._pin_memory.default else func(*args, **{**kwargs, "pin_memory": False})
        return _pin(made)
    if func is aten._to_copy.default and device == HOST and on_device:
        options = {name: kwargs[name] for name in ("dtype", "non_blocking", "memory_format") if name in kwargs}
        return _to_host(args[0], **options)
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
    host_kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    if device is not None:
        host_kwargs["device"] = torch.device("cpu")
    if torch.Tag.nondeterministic_seeded in func.tags and host_kwargs.get("generator") is None:
        with DEVICE.drawing():
            result = _plain(func, args, host_kwargs)
    else:
        result = _plain(func, args, host_kwargs)
    if func is aten._local_scalar_dense.default:
        return result
    kind = _result_of(func) if on_device else "new"
    if kind == "the first argument":
        return args[0]
    wrapped = _map(lambda tensor: GpuTensor(tensor) if type(tensor) is Tensor else tensor, result)
    return wrapped if kind == "new" else return_and_correct_aliasing(func, args, kwargs, wrapped)


@functools.cache
def _result_of(func: Any) -> str:
    """Return whether an operation returns a new tensor, its first argument, or something else ("another").

    torch's own answer takes a millisecond for each operation.
    """
    results, arguments = func._schema.returns, func._schema.arguments
    if any(isinstance(value.type, torch.ListType) for value in results):
        return "another"  # The schema does not say of which tensors the list's entries are views.
    if not any(value.alias_info for value in results):
        return "new"
    written = [value.alias_info is not None and value.alias_info.is_write for value in (*results, *arguments)]
    in_place = written == [True, True, *[False] * (len(arguments) - 1)] and torch.Tag.inplace_view not in func.tags
    return "the first argument" if in_place else "another"


def _leaves(value: Any) -> Iterator[Any]:
    for entry in value:
        if isinstance(entry, list | tuple):
            yield from _leaves(entry)
        else:
            yield entry


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_map(function, entry) for entry in value])
    return function(value)


def _look_at(func: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> None:
    """Refuse operations that mix host and device, and count the waits of an operation."""
    if func in _WAITS:
        DEVICE.wait(str(func))
    indices = [tensor for tensor in args[1] if tensor is not None] if func in _INDEXING else []
    if not all(map(is_on_device, indices)):
        DEVICE.wait("an index of the host")
    if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in indices):
        DEVICE.wait("an index by a mask")
    for tensor in tensors:
        # As on a GPU: scalars of the host are allowed, and indices may be on any device.
        if (
            tensor.ndim
            and not is_on_device(tensor)
            and tensor.device.type != "meta"
            and not any(tensor is i for i in indices)
        ):
            shapes = [(tuple(each.shape), each.device.type) for each in tensors]
            raise MixedError(f"{func}: tensors of the host and of the device: {shapes}")


def _to_host(
    tensor: GpuTensor,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    form = torch.preserve_format if memory_format is None else memory_format
    moved = tensor.host.detach().to(dtype or tensor.dtype, copy=True, memory_format=form)
    if non_blocking:
        _pin(moved)  # torch also allocates the target in pinned memory.
        _to_pinned(moved, moved.clone())
    else:
        DEVICE.wait("a copy to the host")
    return moved


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
    """Copy on a side stream, late: the target gets the values that the source has at that time."""
    assert all(is_on_device(tensor) or _is_pinned(tensor) for tensor in (target, source)), "memory that is not pinned"
    to, from_ = _held_by_others(_unwrap(target)), _held_by_others(_unwrap(source))
    _spoil(to())
    DEVICE.stream.queue(lambda: to().copy_(from_()))


def _held_by_others(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns the tensor, or fails if nobody else has kept the tensor's storage.

    A real device would reuse the memory of a storage that nobody keeps.
    """
    memory = StorageWeakRef(tensor.untyped_storage())
    place, dtype = (tensor.storage_offset(), tensor.shape, tensor.stride()), tensor.dtype

    def get() -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
        assert storage is not None, "memory was freed that a copy on a side stream uses"
        return torch.empty(0, dtype=dtype).set_(storage, *place)

    return get


def _to_pinned(target: Tensor, value: Tensor) -> None:
    """Copy on the stream that computes, late, but with the values of the present."""
    _spoil(target)
    DEVICE.stream.queue(lambda: target.detach().copy_(value))


def _spoil(tensor: Tensor) -> None:
    """Fill a copy's target with wrong values, so that a use before the end of the copy is noticed."""
    tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 113)


def _from_host(source: Tensor, non_blocking: bool) -> None:
    """Copy from the host on the stream that computes, and check later that the host has not changed the source."""
    if source.device.type != "cpu" or not source.numel():
        return
    if not (non_blocking and _is_pinned(source)):
        DEVICE.wait("a copy from the host" + ("" if _is_pinned(source) else "'s memory that is not pinned"))
        return
    copied, value = source.detach(), _bytes(source).clone()

    def check() -> None:
        assert torch.equal(_bytes(copied), value), "pinned memory was written to that is being copied"

    DEVICE.stream.queue(check)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def is_on_device(tensor: Tensor) -> bool:
    """Return whether a tensor is on the device."""
    return isinstance(tensor, GpuTensor)


def has_foreign(args: Sequence[Any]) -> bool:
    """Return whether a foreign tensor is among the arguments of an operation."""
    return any(isinstance(leaf, foreign.ForeignTensor) for leaf in _leaves(args))


def has_divided(args: Sequence[Any], kwargs: Any) -> bool:
    """Return whether a divided tensor is among the arguments of an operation."""
    return next(rows_tensor.rows_in(args, kwargs or {}), None) is not None


def claims_device(tensor: Tensor) -> bool:
    """Return whether a tensor is on the device, or is a foreign or divided tensor that claims to be there."""
    return isinstance(tensor, GpuTensor) or vars(tensor).get("on_gpu", False) is True


def restore_device_tensors() -> None:
    """Let the package restore tensors on the device, although they are not of the class `Tensor`."""
    restorer = untouched._restore_tensor

    def restorer_of(tensor: Tensor) -> Any:
        if not isinstance(tensor, GpuTensor) or _is_parameter(tensor):
            return restorer(tensor)
        host, before = tensor.host.detach(), tensor.host.detach().clone()

        def restore() -> dict[str, bool]:
            if torch.equal(host, before):
                return {}
            host.copy_(before)
            return {"": False}

        return restore

    untouched._restore_tensor = restorer_of


def claim_tensors_without_storage() -> None:
    """Make foreign and divided tensors claim to be on the device where C++ code believes that they are on the host."""
    create, run_operation = foreign.tensor_without_storage, OperationRunner.run
    is_on_host: Any = Tensor.device

    def without_storage(
        kind: type[Tensor], shape: Any, stride: Any, dtype: torch.dtype, device: Any, requires_grad: bool = False
    ) -> Any:
        on_gpu = torch.device(device).type == "cuda"
        tensor = create(kind, shape, stride, dtype, torch.device("cpu"), requires_grad)
        tensor.on_gpu = on_gpu
        return tensor

    def run(runner: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._to_copy.default and claims_device(args[0]) and kwargs.get("device") == torch.device("cpu"):
            kwargs = {**kwargs, "device": None}  # To C++ code, the device of the operand is the host.
        return run_operation(runner, func, args, kwargs)

    def device_of(tensor: Any) -> torch.device:
        device: torch.device = DEVICE.name if tensor.on_gpu else is_on_host.__get__(tensor)
        return device

    # Messages must not name the lines of this file, which only ranks with values run.
    call_site._NEVER = (*call_site._NEVER, __file__)
    call_site._LIBRARIES = (*call_site._LIBRARIES, __file__)
    foreign.tensor_without_storage = rows_tensor.tensor_without_storage = without_storage  # type: ignore[attr-defined]
    OperationRunner.run = run  # type: ignore[method-assign]
    attributes = {
        "device": property(device_of),
        "is_cuda": property(lambda tensor: tensor.on_gpu),
        "is_cpu": property(lambda tensor: not tensor.on_gpu),
        "get_device": lambda tensor: DEVICE.name.index if tensor.on_gpu else -1,
        "to": _to,
        "cpu": lambda tensor, *_, **__: _to(tensor, "cpu"),
        "cuda": lambda tensor, *_, **__: _to(tensor, DEVICE.name),
    }
    for cls in (foreign.ForeignTensor, RowsTensor):
        for name, value in attributes.items():
            setattr(cls, name, value)


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
