"""Build a network that memory does not hold: of the parameters that belong elsewhere, one at a time has values."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves

from cnnstrategies._torch_private import OperationMode
from cnnstrategies.errors import ConfigurationError

_OVERWRITES = ("zero_", "fill_")  # Beside those that draw.


@contextmanager
def held_in_turn(elsewhere: Container[int] | None = None) -> Iterator[list[nn.Parameter]]:
    """Have modules that are built inside hold the memory of some of their parameters alone.

    All are initialised as ever, so that the same random numbers are drawn for those that are kept; the memory of one
    that belongs elsewhere is given back as soon as another is written, and at the end it is on the meta device.

    Args:
        elsewhere: Those that belong elsewhere, by their numbers in the order in which modules register them; by
            default all, and what is computed from their values is nobody's.

    Yields:
        The parameters that have been registered.
    """
    turns = Turns(elsewhere)
    handle = register_module_parameter_registration_hook(turns.register)
    try:
        with turns:
            yield turns.parameters
    finally:
        handle.remove()
    turns.put_on_meta()


class Turns(OperationMode):  # type: ignore[no-untyped-call]
    """See :func:`held_in_turn`."""

    def __init__(self, elsewhere: Container[int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parameters: list[nn.Parameter] = []
        self._places: list[tuple[nn.Module, str]] = []  # of the parameters
        self._elsewhere = elsewhere
        # By its id the storage of each parameter that belongs elsewhere, its bytes, and whose it is.
        self._known: dict[int, tuple[torch.UntypedStorage, int, str]] = {}
        self._held: set[int] = set()
        self._right: set[int] = set()  # Those whose values are what the network's own code has made them.

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Take note of a parameter."""
        number = len(self.parameters)
        self.parameters.append(parameter)
        self._places.append((module, name))
        storage = parameter.untyped_storage()
        is_its_own = not parameter.is_meta and storage.resizable() and storage.nbytes() == parameter.nbytes
        if is_its_own and (self._elsewhere is None or number in self._elsewhere):
            self._known[id(storage)] = storage, parameter.nbytes, f"{type(module).__name__}.{name}"
            self._right.add(id(storage))
            self.hold({id(storage)})

    def put_on_meta(self) -> None:
        """Leave shape and type alone of what belongs elsewhere."""
        made: dict[nn.Parameter, nn.Parameter] = {}  # One may be registered in several places.
        for number, (parameter, (module, name)) in enumerate(zip(self.parameters, self._places, strict=True)):
            if self.is_elsewhere(parameter):
                without = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                self.parameters[number] = made.setdefault(parameter, without)
                if dict(module.named_parameters(recurse=False)).get(name) is parameter:
                    module.register_parameter(name, self.parameters[number])

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Whether its memory is given back."""
        return id(tensor.untyped_storage()) in self._known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        touched = self._storages((args, kwargs))
        if not touched:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        target = self._storages(args[:1])
        if name == "copy_" and target:
            self._right -= target
            return args[0]  # What a mapped checkpoint has for others is not even read.
        self.hold(touched)
        result = func(*args, **kwargs)
        if args and result is args[0]:
            overwrites = name in _OVERWRITES or torch.Tag.nondeterministic_seeded in func.tags
            if overwrites and result.nbytes == result.untyped_storage().nbytes():
                self._right |= target
            read = touched - target
        else:
            leaves = tree_leaves(result)
            is_view = all(isinstance(leaf, Tensor) and self.is_elsewhere(leaf) for leaf in leaves)
            read = set() if is_view or name.startswith("new_") or name.endswith("_like") else touched
        if self._elsewhere is not None and (gone := read - self._right):
            raise ConfigurationError(
                f"{self._known[gone.pop()][2]} is of another rank's stage, and its values are used for something "
                f"else ({name}) when the network is built in configure_model, where each rank keeps its own stage's "
                "alone: build the network in __init__"
            )
        return result

    def _storages(self, values: Any) -> set[int]:
        """Which of those that belong elsewhere are in nested containers."""
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
        return {id(tensor.untyped_storage()) for tensor in tensors if self.is_elsewhere(tensor)}

    def hold(self, touched: set[int]) -> None:
        """Have memory for some, by the ids of their storages, and give that of the others back."""
        for key in self._held - touched:
            self._known[key][0].resize_(0)
            self._right.discard(key)
        for key in touched - self._held:
            storage, size, _ = self._known[key]
            storage.resize_(size)
        self._held = touched
