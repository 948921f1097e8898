"""Private names of torch that this package needs, each with the reason why it is needed.

If torch changes one of the names, a test fails. `tests/test_torch_private.py` tests the names for which no other test
would fail.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _checkpoint_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

# Base class of the iterators of a DataLoader.
LoaderIterator = _BaseDataLoaderIter

# Base class of modes that intercept operations below autograd. Unlike a `TorchFunctionMode`, such a mode also
# intercepts collectives.
OperationMode = TorchDispatchMode


class QuickOperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode whose `__torch_dispatch__` torch does not wrap, which takes as long as a simple rule for an operation.

    The wrapper keeps `torch.compile` from compiling the method. The method asks :func:`is_compiling` instead.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_compiling() -> bool:
    """Whether `torch.compile` compiles the functions that are called now, unless they run without it."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def compile_again_for_other_hooks() -> None:
    """Let compiled functions notice from now on that a module has other hooks than when they were compiled.

    By default, `torch.compile` does not run a hook that was registered after the compilation.
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False


# Returns a function that runs without `torch.compile`, and imports the compiler not before its first call.
not_compiled = torch._disable_dynamo  # type: ignore[attr-defined]


@contextmanager
def without_values() -> Iterator[None]:
    """Return a context in which new tensors have a shape, a dtype and a device, but no values and no memory.

    Operations with them are subject to autocast, unlike operations with tensors on the meta device.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # The import takes a tenth of a second.

    class Mode(FakeTensorMode):  # type: ignore[no-untyped-call]
        # Otherwise, on machines without a GPU, the mode would simulate 255 of them. The next backward would start a
        # thread for each GPU, and torch refuses a backward in processes that are forked after this.
        avoid_device_init = False

    with Mode(allow_non_fake_inputs=True):
        yield


# The operation that `Tensor.item`, `float(tensor)` and `if tensor` call. It makes the CPU wait for the device.
READ = torch.ops.aten._local_scalar_dense.default


# The methods of ProcessGroup that run a collective or transfer a tensor between two processes. The functions of
# torch.distributed call these methods. The names that begin with an underscore are private.
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single", "all_gather_single_coalesced", "gather",
    "gather_into_tensor", "gather_single", "scatter", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single", "barrier", "monitored_barrier", "send", "recv", "recv_anysource",
)  # fmt: skip

# Names of the autograd nodes of `nll_loss`, which `cross_entropy` calls.
CLASS_LOSSES = ("NllLossBackward0", "NllLoss2DBackward0")
# Names of the autograd nodes of functions whose results are probabilities.
PROBABILITIES = {"softmax": "SoftmaxBackward0", "sigmoid": "SigmoidBackward0"}
# Names of the autograd nodes of losses, or of parts of losses, that apply one of these functions to their argument.
SCORE_LOSSES = {"LogSoftmaxBackward0": "softmax", "BinaryCrossEntropyWithLogitsBackward0": "sigmoid"}
# Names of the autograd nodes of functions that copy or reshape a value.
COPIES = frozenset(
    f"{name}Backward{version}"
    for name in (
        *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias"),
        *("Permute", "Transpose", "T"),
    )
    for version in range(3)
)
MEAN = 1  # Number of `reduction="mean"` in the attributes of autograd nodes.
# Names of the autograd nodes of functions that are linear in each of their arguments, and compute no products of
# arguments that require a gradient.
LINEAR = frozenset(
    f"{name}Backward{version}"
    for name in (
        *("Add", "Sub", "Neg", "Mul", "Div", "Sum", "Mean", "Stack", "Cat", "View", "UnsafeView", "ReshapeAlias"),
        *("Squeeze", "Unsqueeze", "Select", "Unbind", "Expand", "ToCopy", "Clone", "Alias"),
    )
    for version in range(3)
)
SUMS = ("SumBackward0", "NansumBackward0")  # Names of the autograd nodes of `sum` and of the sum in `nanmean`.
SELECTIONS = ("IndexBackward0", "MaskedSelectBackward0")  # Names of the autograd nodes of `values[mask]`.
# Names of the autograd nodes of losses that are means over the elements of their first argument.
ELEMENT_LOSSES = (
    *("MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "BinaryCrossEntropyBackward0"),
    "BinaryCrossEntropyWithLogitsBackward0",
)


def divisor(node: Any) -> Tensor | int | None:
    """Return the number by which an autograd node's function divides a sum, if the node computes a mean.

    The number depends on the samples: it is the sum of the weights of the valid targets in torch's ``cross_entropy``
    and ``nll_loss``, the number of selected elements in ``values[mask].mean()``, and ``n`` in ``values.sum() / n``.
    Other means, such as the mean over all elements of a tensor, have the result None.
    """
    name = node.name()
    if name in CLASS_LOSSES:
        total: Tensor | None = node._saved_total_weight if node._saved_reduction == MEAN else None
        return total
    first = node.next_functions[0][0] if node.next_functions else None
    if first is None:
        return None
    if name == "DivBackward0":
        others = [following for following, _ in node.next_functions[1:]]
        number: Tensor = node._saved_other
        is_quotient = first.name() in SUMS and not any(others) and number.numel() == 1
        return number if is_quotient else None
    if first.name() not in SELECTIONS:
        return None
    if name == "MeanBackward0":
        return int(node._saved_self_sym_numel)
    is_mean = name in ELEMENT_LOSSES and node._saved_reduction == MEAN
    return int(node._saved_self.numel()) if is_mean else None


def class_targets(loss: object, most: int = 50) -> list[Tensor]:
    """Return the targets of the losses of classes that are parts of a loss, as ``cross_entropy`` got them.

    Args:
        loss: The loss before its backward. The list is empty for an object that is not a tensor with a graph.
        most: Number of autograd nodes nearest to the loss that are looked at.
    """
    nodes: list[Any] = [getattr(loss, "grad_fn", None)]
    for node in nodes:  # The list grows meanwhile.
        if node is not None and len(nodes) < most:
            nodes += [following for following, _ in node.next_functions]
    return [node._saved_target for node in nodes if node is not None and node.name() in CLASS_LOSSES]


# Names of the operations that functions for dropout call, such as `F.dropout` and `F.dropout2d`.
DROPOUTS = tuple(
    f"{kind}dropout{place}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for place in ("", "_")
)


def turn_off_dropout_functions() -> set[str]:
    """Let functions for dropout keep all values from now on, in this process and in those that it forks.

    Whatever name a function has in a user's module, it looks up its operation in ``torch._VF`` in each call.

    Returns:
        Names of the operations that would have dropped values in this process. The set grows.
    """
    used: set[str] = set()

    def kept(name: str) -> Callable[[Tensor, float, bool], Tensor]:
        operation = getattr(torch._VF, name)

        def keep(value: Tensor, p: float, train: bool) -> Tensor:
            if train and p > 0:
                used.add(name)
            result: Tensor = operation(value, 0.0, train)
            return result

        return keep

    for name in DROPOUTS:
        setattr(torch._VF, name, kept(name))
    return used


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to the target with the same index, by one call of torch for all tensors."""
    torch._foreach_copy_(list(targets), list(sources))


def add_all(targets: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add each of ``others`` in place to the target with the same index, by one call of torch for all tensors."""
    torch._foreach_add_(list(targets), list(others))


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms of tensors (tensors), with few operations, as ``clip_grad_norm_`` computes them.

    The public function returns the norm of all tensors together only. The norms of 16-bit tensors are computed in
    float32.
    """
    if all(tensor.dtype == torch.float32 for tensor in tensors):
        with torch.no_grad():
            return torch.stack(torch._foreach_norm(list(tensors), 2))
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    norms: list[Tensor] = [tensors[0]] * len(tensors)
    for is_short in (True, False):
        indices = [index for index, tensor in enumerate(tensors) if (tensor.itemsize < 4) is is_short]
        parts = [tensors[index].detach() for index in indices]
        computed = torch._foreach_norm(parts, 2, dtype=torch.float32 if is_short else None) if parts else ()
        for index, norm in zip(indices, computed, strict=True):
            norms[index] = norm.to(tensors[0].device, wide)
    return torch.stack(norms)


def put_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
    """Replace the tensor of a registered buffer.

    An assignment has the same effect, but takes about 20 microseconds because of its checks. An assignment is therefore
    too slow for code that runs for each layer and each microbatch.
    """
    module._buffers[name] = buffer


def parameters_in(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module and of its submodules, each of them at least once.

    The generator ``module.parameters()`` takes five times as long, which counts in code that runs in each step.
    """
    parameters: list[nn.Parameter] = []
    modules, seen = [module], {module}
    for current in modules:
        parameters += [parameter for parameter in current._parameters.values() if parameter is not None]
        for child in current._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
    return parameters


def measure_every_step(model: DistributedDataParallel) -> None:
    """Make DDP measure the time of the all-reduce in each step.

    On a GPU, each forward pass then waits for the previous backward pass.
    """
    model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]


def measure_rarely(model: DistributedDataParallel) -> None:
    """Undo `measure_every_step`, so that DDP measures only every hundredth step and the first ten, as by default."""
    model._set_ddp_runtime_logging_sample_rate(100)  # type: ignore[no-untyped-call]


def writes(tensor: Tensor) -> int:
    """Return a tensor's version counter, which autograd increases at each in-place change of the tensor."""
    return tensor._version


def communication_seconds(model: DistributedDataParallel) -> tuple[float, float]:
    """Return how long the gradients' all-reduce took in the last step, and how long it overlapped with backward.

    DDP itself measures these times, but has no public function that returns them. A communication hook could measure
    them as well, but DDP accepts only one such hook, and the user may need it.

    Returns:
        Seconds from the start of the first bucket's all-reduce to the end of the last bucket's all-reduce, and the
        number of these seconds in which the backward pass was still computing.
    """
    data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return data.get("backward_comm_time", 0) / 1e9, data.get("backward_compute_comm_overlap_time", 0) / 1e9


def found_infinities(scaler: torch.amp.grad_scaler.GradScaler, optimizer: optimizer.Optimizer) -> dict[Any, Tensor]:
    """Return the dictionary in which a gradient scaler keeps whether it has found gradients that are not finite.

    ``GradScaler.unscale_`` writes the dictionary, and ``GradScaler.update`` reads it. Changes of the dictionary count,
    so several processes can agree on the result. torch has no public function for this.

    Returns:
        By device: a scalar that is 0 if all gradients on the device are finite.
    """
    infinities: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    return infinities


def is_in_backward() -> bool:
    """Return whether the calling thread runs a backward pass at this moment."""
    return torch._C._current_graph_task_id() != -1


def keeps_graph() -> bool:
    """Whether the running backward was called with ``retain_graph``, so that another backward may follow."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def abort_all_groups() -> None:
    """Abort the NCCL operations of all process groups, so that this process does not wait for a lost rank.

    The public ``ProcessGroup.abort`` aborts only one group, and may wait on the device for operations of other groups.
    """
    dist.distributed_c10d._abort_process_group()


def number_of_collectives() -> int:
    """Return the number of collectives that this process has begun in the default process group.

    The result is always 0 if the group's backend, such as MPI, does not count. torch does not have a public counter.
    The number is part of a process group's own check for lost collectives.
    """
    group: Any = dist.group.WORLD
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


def asks_default_group() -> bool:
    """Return whether ``torch.distributed.new_group`` lets the default process group create the new group.

    torch 2.11 creates it itself. Nothing public says which versions do not, and they cannot be told apart by a result
    without creating a group.
    """
    return "new_group" in dist.distributed_c10d._new_group_with_tag.__code__.co_names


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was returned by ``torch.compile``, or was compiled in place by its method ``compile()``.

    An ``isinstance`` check would need a private class of torch, whose import takes seconds.
    """
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def compiled_method(module: nn.Module) -> str | None:
    """Return the name of a method of a module that a result of ``torch.compile`` replaces; None if there is none."""
    for name, value in vars(module).items():
        if hasattr(value, "_torchdynamo_orig_callable") and callable(getattr(type(module), name, None)):
            return name
    return None


# Name of the attribute in which SequentialLR and ChainedScheduler keep the list of their schedulers. The list has the
# same key in their `state_dict`.
PARTS_OF_A_SCHEDULE = "_schedulers"


def default_store() -> Any:
    """Return a new connection to the store through which the ranks of the default process group have found each other.

    The store has a prefix of its own for each restart under torchrun. A public client of the same store would need the
    store's address and prefix, which a rank does not know if the user has created the process group. The connection is
    new because a blocked thread, which waits in the store for another rank, keeps an existing connection for itself.
    """
    return dist.distributed_c10d._get_default_store().clone()


# A class with this `__torch_function__` has no own versions of torch's functions, only of torch's operations.
NO_OWN_FUNCTIONS = torch._C._disabled_torch_function_impl
# A context in which no mode intercepts functions of torch. Inside a mode's `__torch_dispatch__`, function modes are
# still on, and would intercept each access to an attribute of a tensor.
without_functions = torch._C.DisableTorchFunction


# A context, for use inside `without_functions`, in which classes' own versions of torch's functions run again.
with_functions = torch._C._EnableTorchFunction


def not_intercepted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same while no mode intercepts functions of torch, only operations.

    A function mode takes 1.5 microseconds for each access to an attribute of a tensor, such as its gradient.
    """

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with without_functions():
            return function(*args, **kwargs)

    return run


@contextmanager
def functions_without(mode: TorchFunctionMode) -> Iterator[None]:
    """Return a context like `with_functions`, in which a mode does not intercept functions either."""
    is_last = _get_current_function_mode() is mode  # type: ignore[no-untyped-call]
    with with_functions():
        if is_last:
            torch._C._pop_torch_function_stack()
        depth = torch._C._len_torch_function_stack()
        try:
            yield
        finally:
            if is_last:
                # A generator may have entered a mode that it leaves later.
                later = [
                    torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack() - depth)
                ]
                for again in (mode, *reversed(later)):
                    torch._C._push_on_torch_function_stack(again)


class without_modes:  # noqa: N801  # It is used like the contexts of torch above.
    """A context in which no mode intercepts operations or functions of torch.

    torch's own context for this takes 20 microseconds, and a step of a pipeline needs it dozens of times.
    """

    def __enter__(self) -> None:
        self._modes = [torch._C._pop_torch_dispatch_stack(None) for _ in range(torch._C._len_torch_dispatch_stack())]
        self._functions = torch._C.DisableTorchFunction()
        self._functions.__enter__()

    def __exit__(self, *_: object) -> None:
        self._functions.__exit__(None, None, None)
        for mode in reversed(self._modes):
            torch._C._push_on_torch_dispatch_stack(mode)


def tensor_without_storage(
    cls: type[Tensor],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool = False,
) -> Any:
    """Create an instance of a subclass of `Tensor` that has metadata, but not a storage."""
    return Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
    )


def tracked_views() -> Any:
    """Return an entered context in which autograd repeats the operations of a view after a write, if it needs the view.

    Otherwise autograd creates the view from the strides and the offset of a storage, which not each tensor has.
    """
    return torch.autograd.grad_mode._force_original_view_tracking(True)


def allow_in_lists(cls: type[Tensor]) -> None:
    """Make optimizers and `clip_grad_norm_` process a class's instances in lists, as they process plain tensors."""
    for types in (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types):
        if cls not in types:
            types.append(cls)


def mark_as_parameter(tensor: Tensor) -> None:
    """Make ``isinstance(tensor, torch.nn.Parameter)`` true for an instance of a subclass of `Tensor`.

    `torch.nn.Parameter` marks tensors of subclasses in the same way.
    """
    tensor._is_param = True


def swap_contents(tensor: Tensor, other: Tensor, is_used: bool = False) -> None:
    """Exchange two tensors by `torch.utils.swap_tensors`, and give autograd the first tensor's hooks again.

    torch exchanges the Python attribute with the hooks, but not autograd's list of them. torch refuses tensors to which
    weak references exist, such as those of `torch.nn.LSTM`. The references stay valid, because they refer to the Python
    object, which keeps its identity.

    Args:
        tensor: A leaf.
        other: A leaf that nothing else uses.
        is_used: Whether autograd's graphs may use the first tensor, which torch refuses. The graphs keep its old
            contents, and a backward through them to the tensor raises an error.
    """
    if is_used or (weakref.getweakrefs(tensor) and not is_used_by_torch(tensor)):
        if tensor._use_count() > 1 and tensor.requires_grad:
            torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_refuse_old_graph)
        tensor.__class__, other.__class__ = other.__class__, tensor.__class__
        tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
        torch._C._swap_tensor_impl(tensor, other)
    else:
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
    hooks = tensor._backward_hooks
    if hooks is not None:
        tensor._backward_hooks = hooks


def _refuse_old_graph(gradients: Any) -> None:
    raise RuntimeError(
        "backward through a graph that was recorded before a parameter became foreign: call forward again"
    )


def is_used_by_torch(tensor: Tensor) -> bool:
    """Whether torch's C++ code refers to a leaf tensor, so that `torch.utils.swap_tensors` refuses the tensor.

    The reference of the tensor's own node for the accumulation of gradients does not count.
    """
    if tensor._use_count() == 1:
        return False
    if not tensor.requires_grad:
        return True
    node = torch.autograd.graph.get_gradient_edge(tensor).node  # Creates a node if the tensor has none.
    return tensor._use_count() > 2 or node is None


def _base_references(view: Tensor) -> int:
    """Return the number of references to the tensor of which a tensor is a view."""
    return sys.getrefcount(view._base)


def storage_users(tensor: Tensor) -> int:
    """Return the number of tensors that use a tensor's storage, without tensors to which only a view refers.

    The result of ``x.flatten()``, for example, refers to ``x`` even if no variable does.
    """
    storage = tensor.untyped_storage()  # This Python object refers to the storage as well.
    is_hidden = tensor._base is not None and _base_references(tensor) == _base_references(torch.zeros(2, 1).flatten())
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 - is_hidden


def _full_name(operation: torch._ops.OpOverload) -> str:
    return str(operation.name())  # type: ignore[no-untyped-call]


def schema_of(operation: torch._ops.OpOverload) -> Any:
    """Return an operation's schema, which says which arguments it writes and which results are views."""
    return operation._schema


def has_shape_function(operation: torch._ops.OpOverload) -> bool:
    """Whether torch can compute the shapes of an operation's results without the values of its operands."""
    composite = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
    name = _full_name(operation)
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("Meta", *composite))


def is_composite(operation: torch._ops.OpOverload) -> bool:
    """Whether an operation consists of other operations.

    Only under ``torch.inference_mode`` does a mode receive such operations as a whole.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(_full_name(operation), "CompositeImplicitAutograd")


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether hooks are registered on a leaf that run when a backward gives the leaf a gradient."""
    return bool(tensor._backward_hooks) or bool(tensor._post_accumulate_grad_hooks)


def sequence_number(node: torch.autograd.graph.Node) -> int:
    """Return the priority with which autograd's engine runs a node. Nodes that were created later have larger numbers.

    The node that gives a leaf its gradient has the largest number of all.
    """
    return int(node._sequence_nr())


@contextmanager
def without_tensor_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Remove the hooks that the tensors' gradients are passed to, and add them again on exit.

    torch has no public function that returns these hooks, which the user's code has registered.
    """
    tables = [(tensor._backward_hooks, tensor._post_accumulate_grad_hooks) for tensor in tensors]
    hooks = [(table, dict(table)) for pair in tables for table in pair if table]
    for registered, _ in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, before in hooks:
            registered.update(before)


@contextmanager
def applied_functions(apply: Callable[[Any, tuple[Any, ...], Callable[..., Any]], Any]) -> Iterator[None]:
    """Return a context in which another function runs each call of ``torch.autograd.Function.apply``.

    Args:
        apply: Function of the subclass of `torch.autograd.Function`, the arguments, and torch's own ``apply``.
    """
    base: Any = torch.autograd.Function
    original = vars(base)["apply"]

    def applied(cls: Any, *args: Any) -> Any:
        return apply(cls, args, original.__get__(None, cls))

    base.apply = classmethod(applied)
    try:
        yield
    finally:
        base.apply = original


@contextmanager
def reentrant_checkpoints() -> Iterator[None]:
    """Return a context in which ``torch.autograd.grad`` runs through ``checkpoint(..., use_reentrant=True)``.

    torch refuses it, because ``grad`` does not return the gradients of the parameters in the checkpoint. They are in
    the parameters' attribute ``grad`` instead.
    """
    is_valid = torch.autograd._is_checkpoint_valid
    torch.autograd._is_checkpoint_valid = lambda: True
    try:
        yield
    finally:
        torch.autograd._is_checkpoint_valid = is_valid


# Dictionaries of the hooks of a module that run when the module is called.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_checkpoint(context: saved_tensors_hooks) -> bool:
    """Whether hooks of saved tensors are those of `torch.utils.checkpoint` without ``use_reentrant``."""
    return isinstance(context, _checkpoint_hook)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks are registered on a module itself. torch has no public function that returns the hooks."""
    return any(getattr(module, name) for name in _HOOKS)


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks that are registered on a module itself and run when the module is called."""
    for name in _HOOKS:
        yield from getattr(module, name).values()


def autocast_settings(context: torch.autocast) -> tuple[str, torch.dtype, bool, bool]:
    """Return the arguments with which a context `torch.autocast` was created: device, dtype, enabled, and cache."""
    return context.device, context.fast_dtype, context._enabled, context._cache_enabled


# Names of the dictionaries of hooks that run when a module is called, and of their options.
_HOOK_TABLES = tuple(name for name in vars(nn.Module()) if name.startswith(("_forward_", "_backward_")))


def hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dictionaries in which a module keeps its hooks for calls, and the options of these hooks."""
    attributes = vars(module)
    return [table for name in _HOOK_TABLES if isinstance(table := attributes.get(name), dict)]


def backward_number() -> int:
    """Return a number of the backward that runs in this thread. Nested backwards have numbers of their own."""
    return torch._C._current_graph_task_id()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs in this thread, before ``backward()`` returns.

    A backward that fails does not call the function. DistributedDataParallel uses the same name.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_hooked(tensor: Tensor) -> bool:
    """Whether hooks of a leaf see its gradient. torch has no public function that returns the hooks."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def parameter_of_gradient(node: str, place: int) -> Tensor | None:
    """Return the leaf to whose attribute ``grad`` the backward adds a result of its running node.

    The result is None if the gradient goes elsewhere, as for `torch.autograd.grad`, or has a graph of its own.

    Args:
        node: Name of the node that must be running.
        place: Position of the result.
    """
    running = torch._C._current_autograd_node()
    if running is None or running.name() != node or torch.is_grad_enabled():
        return None
    following = running.next_functions[place][0]
    leaf: Tensor | None = getattr(following, "variable", None)  # Only the nodes of leaves have it.
    return leaf if following is not None and leaf is not None and is_added_only(following) else None


def is_added_only(node: Any) -> bool:
    """Whether the running backward reaches a leaf's node, and adds the gradient to the attribute ``grad``."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `torch.autograd.grad` returns this gradient.
        return False
