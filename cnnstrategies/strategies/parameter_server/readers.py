"""Parameters that are read while the forward of their own module is not running, so that a step must wait for them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from cnnstrategies._lightning_private import is_compiled_whole
from cnnstrategies._torch_private import is_compiled
from cnnstrategies.strategies.parameter_server.observer_hooks import tensors_in

# Number of steps at the start of training that record which parameters are read outside of their own modules.
NOTED_STEPS = 2


class Readers(TorchFunctionMode):
    """Mode of torch that records which parameters are read while the forward of their own module is not running.

    Examples are a weight that the user's code passes to ``F.linear``; a weight in a penalty that is added to the loss;
    and ``out_proj.weight`` in ``nn.MultiheadAttention``, which never calls the forward of ``out_proj``.

    Reads are recorded in the first `NOTED_STEPS` steps. Reads inside compiled code cannot be recorded, so in compiled
    modules all parameters count as recorded.

    Attributes:
        indices: Indices of the recorded parameters.
        used: Indices of the parameters whose modules have run a forward in this step.

    Args:
        module: The module that is trained.
        index: Index of each parameter, by the parameter's ``id()``.
        count_all: Whether all parameters count as recorded.
    """

    def __init__(self, module: LightningModule, index: Mapping[int, int], count_all: bool) -> None:
        super().__init__()
        self.indices: set[int] = set()
        self.used: set[int] = set()
        self._steps = 0  # Number of steps that have recorded reads.
        if count_all or is_compiled_whole(module) or any(is_compiled(child) for child in module.modules()):
            self._steps, self.indices = NOTED_STEPS, set(index.values())
        self._module = module
        self._index = index
        self._computing: list[nn.Module] = []

    @property
    def records(self) -> bool:
        """Whether this step still records reads. It must wait for all parameters before the forward."""
        return self._steps < NOTED_STEPS

    @property
    def awaited(self) -> Collection[int]:
        """Indices of the parameters for which this step has waited before the forward."""
        return range(len(self._index)) if self.records else self.indices

    def end_step(self) -> None:
        """End a step that was made or skipped."""
        self._steps += 1
        self.used.clear()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record the parameters that are read inside this context."""
        with ExitStack() as stack:
            for child in self._module.modules():
                for handle in _noted(child, self._computing):
                    stack.callback(handle.remove)
            stack.enter_context(self)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call torch's function `func`, and record the parameters among its arguments."""
        for tensor in tensors_in((*args, *(kwargs or {}).values())):
            index = self._index.get(id(tensor))
            if index is not None and not any(tensor is parameter for parameter in self._computing_parameters()):
                self.indices.add(index)
        return func(*args, **(kwargs or {}))

    def _computing_parameters(self) -> Iterator[Tensor]:
        """Yield the parameters of the modules whose forward is running."""
        for module in self._computing:
            yield from module.parameters(recurse=False)


def _noted(child: nn.Module, computing: list[nn.Module]) -> Iterator[RemovableHandle]:
    """Register hooks that keep a list of the modules whose forward is running, and yield the hooks' handles.

    The hooks are plain functions, so that a deep copy of the module shares the hooks and does not copy the list.

    Args:
        child: The module that gets the hooks.
        computing: List of the modules whose forward is running. Each module comes after the module that calls it.
    """

    def begin(module: nn.Module, *_: Any) -> None:
        computing.append(module)

    def end(module: nn.Module, *_: Any) -> None:
        if computing and computing[-1] is module:
            computing.pop()

    yield child.register_forward_pre_hook(begin, prepend=True)
    yield child.register_forward_hook(end, always_call=True)
