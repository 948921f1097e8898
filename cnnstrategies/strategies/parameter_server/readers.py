"""Who reads a parameter: its own modules in their forward, or somebody else."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from cnnstrategies.strategies.watching import tensors_in


class Readers(TorchFunctionMode):
    """Notes which parameters are read while none of their own modules computes.

    So is that of a head that is given to ``F.linear``, the last layer of ``nn.MultiheadAttention``, which is never
    called, a weight in a penalty, or one that a moving average follows.

    Args:
        module: What is trained.
        index: The number of each parameter, by its id.

    Attributes:
        found: The numbers of those that are.
    """

    def __init__(self, module: nn.Module, index: Mapping[int, int]) -> None:
        super().__init__()
        self.found: set[int] = set()
        self._module = module
        self._index = index
        self._computing: list[nn.Module] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what happens inside."""
        with ExitStack() as stack:
            for child in self._module.modules():
                for handle in _noted(child, self._computing):
                    stack.callback(handle.remove)
            stack.enter_context(self)
            yield

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """See what a function is given, and call it."""
        for tensor in tensors_in((*args, *(kwargs or {}).values())):
            index = self._index.get(id(tensor))
            if index is not None and not any(tensor is own for own in self._own()):
                self.found.add(index)
        return func(*args, **(kwargs or {}))

    def _own(self) -> Iterator[Tensor]:
        """The parameters of the modules that compute now."""
        for module in self._computing:
            yield from module.parameters(recurse=False)


def _noted(child: nn.Module, computing: list[nn.Module]) -> Iterator[RemovableHandle]:
    """Hooks that note when a module computes; functions, of which a copy of the module has no copies."""

    def begin(module: nn.Module, *_: Any) -> None:
        computing.append(module)

    def end(module: nn.Module, *_: Any) -> None:
        if computing and computing[-1] is module:
            computing.pop()

    yield child.register_forward_pre_hook(begin, prepend=True)
    yield child.register_forward_hook(end, always_call=True)
