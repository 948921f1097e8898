"""`torch.cuda`, autocast and NCCL of a simulated GPU; see `simulated_gpu.py`.

`simulate` cannot be undone. Call it only in processes that were forked for a test.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from cnnstrategies import _torch_private
from tests.runner.device_order import END, P2P, Message
from tests.runner.simulated_gpu import (
    _COLLECTIVE,
    DEVICE,
    GpuMode,
    GpuTensor,
    Stream,
    _plain,
    _spoil,
    _unwrap,
    claim_tensors_without_storage,
    is_on_device,
    restore_device_tensors,
)


class Generator:
    """The random number generator of the device, as torch's generators."""

    device = property(lambda self: DEVICE.name)

    def get_state(self) -> Tensor:
        """Return the generator's state."""
        return DEVICE.random.clone()

    def set_state(self, state: Tensor) -> None:
        """Set the generator's state."""
        DEVICE.random = state.clone()

    def manual_seed(self, seed: int) -> "Generator":
        """Set the generator's state from a seed."""
        DEVICE.random = torch.Generator().manual_seed(seed).get_state()
        return self


class Event:
    """A mark in a stream.

    Attributes:
        stream: The stream in which the event was recorded.
        copies: Number of copies that were queued on the stream before the event.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream = DEVICE.streams[0]
        self.copies = 0
        self._queries = 2

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work that a stream has queued so far."""
        self.stream = stream or DEVICE.stream
        self.copies = self.stream.queued
        self._queries = 0

    def query(self) -> bool:
        """Whether the marked work is done: False for the first query, and True for the second.

        So every event is seen pending once, and code that polls an event ends.
        """
        self._queries += 1
        if self._queries > 1:
            self.stream.go_on(self.copies)
        return self._queries > 1

    def elapsed_time(self, later: "Event") -> float:
        """Return 1 millisecond: a simulated device takes no time of its own."""
        assert later._queries > 1, "the later event must be complete"
        return 1.0

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        if self._queries < 2:
            DEVICE.wait("an event")
        self._queries = 2
        self.stream.go_on(self.copies)


def simulate(index: int = 0, devices: int = 1) -> GpuMode:
    """Give this process a simulated GPU until the process ends.

    Args:
        index: Index of the GPU.
        devices: Number of GPUs of the machine.

    Returns:
        A context manager: enter it in the thread that creates tensors on the GPU. Other threads can only compute with
        tensors that exist.
    """
    DEVICE.name = torch.device("cuda", index)
    _simulate_cuda(devices)
    _simulate_autocast()
    _simulate_first_gradients()
    _simulate_groups()
    _keep_mode()
    claim_tensors_without_storage()
    restore_device_tensors()
    if dist.is_available():
        _simulate_nccl()
    return GpuMode()


def _simulate_cuda(devices: int) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)  # Parameters and gradients change their class.
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]  # Needed for "cuda" without an index.
    torch.backends.cudnn.enabled = False
    if torch.backends.cuda.is_built():
        # Autograd would ask CUDA's driver for contexts. It asks only the first accelerator, which is now this backend.
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend("nothing")

    def synchronize(*_: Any) -> None:
        DEVICE.wait("the device")
        for stream in DEVICE.streams:
            stream.go_on()

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, DEVICE.stream = DEVICE.stream, stream
        try:
            yield
        finally:
            DEVICE.stream = before

    generator = Generator()

    def seed(number: int) -> None:
        generator.manual_seed(number)

    def put_state(state: Tensor, *_: Any) -> None:
        generator.set_state(state)

    def set_sync_debug_mode(mode: int | str) -> None:
        DEVICE.sync_debug_mode = mode

    replaced = {
        "set_sync_debug_mode": set_sync_debug_mode,
        "_initialized": True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_available": lambda: True,
        "is_initialized": lambda: False,  # So the simulated GPU may be used after a fork.
        "device_count": lambda: devices,
        "current_device": lambda: DEVICE.name.index,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "stream": on,
        "current_stream": lambda device=None: DEVICE.stream,
        "default_stream": lambda device=None: DEVICE.streams[0],
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: DEVICE.random.clone(),
        "set_rng_state": put_state,
        "get_rng_state_all": lambda: [DEVICE.random.clone()],
        "default_generators": (generator,) * devices,
        "set_rng_state_all": lambda states: put_state(states[0]),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
        "mem_get_info": lambda device=None: (0, 0),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "simulated",
        "is_bf16_supported": lambda *_, **__: True,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.synchronize = synchronize
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch._C._get_accelerator = lambda: torch.device("cuda")  # type: ignore[assignment]


def _simulate_groups() -> None:
    """Let `clip_grad_norm_` find the devices of gradients, which it otherwise asks C++ code for."""
    module: Any = torch.nn.utils.clip_grad
    group = module._group_tensors_by_device_and_dtype

    def grouped(lists: Any, *args: Any, **kwargs: Any) -> Any:
        groups = group(lists, *args, **kwargs)
        return {(tensors[0][0].device, dtype): (tensors, at) for (_, dtype), (tensors, at) in groups.items()}

    module._group_tensors_by_device_and_dtype = grouped


def _keep_mode() -> None:
    """Keep the simulated GPU where the package disables all modes, because its own modes are not wanted."""
    context: Any = _torch_private.without_modes
    enter, leave = context.__enter__, context.__exit__

    def enter_but_keep(self: Any) -> None:
        enter(self)
        self.kept = GpuMode() if any(isinstance(mode, GpuMode) for mode in self._modes) else nullcontext()
        self.kept.__enter__()

    def leave_kept(self: Any, *error: Any) -> None:
        self.kept.__exit__(*error)
        leave(self, *error)

    context.__enter__, context.__exit__ = enter_but_keep, leave_kept


def _simulate_autocast() -> None:
    """Use the CPU's autocast for `cuda`: torch's C++ code sees tensors of the host."""
    autocast, is_enabled, dtype = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype

    def kind_of(kind: str) -> str:
        return "cpu" if kind == "cuda" else kind

    class Autocast(autocast):  # type: ignore[misc, valid-type]
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(kind_of(device_type), *args, **kwargs)

    torch.autocast = torch.amp.autocast = torch.amp.autocast_mode.autocast = Autocast  # type: ignore[misc, assignment]
    torch.is_autocast_enabled = lambda kind="cuda": is_enabled(kind_of(kind))
    torch.get_autocast_dtype = lambda kind: dtype(kind_of(kind))


def _simulate_first_gradients() -> None:
    """Put the first gradients of a backward from graph edges on the device.

    For an edge, unlike a tensor, C++ code decides on which device the gradient is created.
    """
    make_gradients = torch.autograd._make_grads

    def made(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        gradients = make_gradients(outputs, *args, **kwargs)
        pairs = zip(outputs, gradients, strict=True)
        return tuple(GpuTensor(g) if type(g) is Tensor and isinstance(o, GradientEdge) else g for o, g in pairs)

    torch.autograd._make_grads = made


class Posted:
    """A message that a device sends in the background. Its tensor has wrong values until the device waits for it.

    Args:
        tensor: The tensor on the device.
        begin: Function that begins to send or to receive another tensor, and returns a work.
        receives: Whether the message overwrites the tensor.
        is_in_batch: Whether the message belongs to a batch of sends and receives.
    """

    def __init__(
        self, tensor: Tensor, begin: Callable[[Tensor], Any], receives: bool, is_in_batch: bool = False
    ) -> None:
        self._host, self._receives, self._is_in_batch = _unwrap(tensor), receives, is_in_batch
        self._value = self._host.clone()
        if receives:
            _spoil(self._host)
        self._work = begin(GpuTensor(self._value))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any) -> bool:
        """Let the device wait for the message."""
        self._work.wait(*args)
        if self._receives:
            self._host.copy_(self._value)
        else:
            assert torch.equal(self._host, self._value), "a tensor was written to that is being sent"
        if self._is_in_batch and DEVICE.messages[-1].kind != END:
            DEVICE.messages.append(Message(END))
        return True


def _simulate_nccl() -> None:
    """Make gloo groups claim to be NCCL groups, except groups that are created for gloo.

    A collective on a host tensor in an NCCL group, or on a device tensor in a gloo group, raises an AssertionError.
    Messages are noted in their order. A batch of sends and receives has not arrived before it is waited for.
    """
    new_group, all_reduce, batch = dist.new_group, dist.all_reduce, dist.batch_isend_irecv
    on_host, in_batch = set(), [False]

    def make(
        ranks: Iterable[int] | None = None, timeout: Any = None, backend: str | None = None, **_: Any
    ) -> dist.ProcessGroup | int | None:
        group: dist.ProcessGroup | int | None = new_group(None if ranks is None else list(ranks), timeout)
        if backend == "gloo" and isinstance(group, dist.ProcessGroup):
            on_host.add(group.group_name)
        return group

    def backend_of(group: dist.ProcessGroup | None = None) -> str:
        return "gloo" if group is not None and group.group_name in on_host else "nccl"

    def collective(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs))
        groups = [dist.ProcessGroup.unbox(leaf) for leaf in leaves if _is_group(leaf)]  # type: ignore[attr-defined]
        backend = backend_of(groups[0])
        for leaf in leaves:
            if isinstance(leaf, Tensor) and is_on_device(leaf) != (backend == "nccl"):
                raise AssertionError(f"{func} in a group of {backend}, of a tensor on {leaf.device}")
        if not in_batch[0]:
            members = tuple(dist.get_process_group_ranks(groups[0]))
            name = groups[0].group_name
            DEVICE.messages.append(Message(func._schema.name, name, members, is_on_device=backend == "nccl"))
        if backend == "nccl" and func is torch.ops.c10d.barrier.default:
            DEVICE.wait("a barrier")
        return _plain(func, args, kwargs)

    def post(operations: list[dist.P2POp]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        members, is_on_device = tuple(dist.get_process_group_ranks(group)), backend_of(group) == "nccl"
        rank, pairs = group.rank(), set()
        for operation in operations:
            pair = (rank, operation.group_peer) if operation.op is dist.isend else (operation.group_peer, rank)
            pairs.add((members[pair[0]], members[pair[1]]))
        DEVICE.messages.append(Message(P2P, group.group_name, members, frozenset(pairs), is_on_device))
        in_batch[0] = True
        works = [posted(operation) for operation in operations] if is_on_device else batch(operations)
        in_batch[0] = False
        return works

    def posted(operation: dist.P2POp) -> "Posted":
        def begin(tensor: Tensor) -> Any:
            sent = dist.P2POp(operation.op, tensor, group=operation.group, group_peer=operation.group_peer)
            return batch([sent])[0]

        return Posted(operation.tensor, begin, operation.op is dist.irecv, is_in_batch=True)

    def reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> dist.Work | None:
        if is_on_device(tensor) and kwargs.get("async_op"):
            return Posted(tensor, lambda value: all_reduce(value, op, *args, **kwargs), receives=True)  # type: ignore[return-value]
        if op != dist.ReduceOp.AVG or tensor.is_floating_point():
            return all_reduce(tensor, op, *args, **kwargs)
        all_reduce(tensor, dist.ReduceOp.SUM, *args, **kwargs)  # gloo cannot average integers.
        tensor.floor_divide_(dist.get_world_size())
        return None

    def device_of_objects(group: dist.ProcessGroup | None = None) -> str:
        return "cpu" if backend_of(group) == "gloo" else str(DEVICE.name)

    _COLLECTIVE[0] = collective
    for module in (dist, dist.distributed_c10d):
        module.new_group, module.get_backend, module.all_reduce = make, backend_of, reduce
        module.batch_isend_irecv = post
    dist.distributed_c10d._get_object_coll_device = device_of_objects


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())
