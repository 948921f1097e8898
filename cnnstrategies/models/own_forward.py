"""A LightningModule whose own ``forward`` is the network: its steps call ``self(x)``, and that several submodules."""

import weakref
from collections.abc import Iterator
from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.tracing import trace

WHOLE = ""  # The path of such a network.
PACKAGES = ("cnnstrategies.", "lightning.", "torch.")
PLACE = "own_forward"  # Under this name the module has what takes its place.


class OwnForward(nn.Module):
    """What a module's ``forward`` uses, under the module's own names; all else that it asks for is the module's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._order = list(_parts(module))
        for name, part in _parts(module).items():
            if not isinstance(part, Metric | MetricCollection):
                _put(self, name, part, name in module.state_dict())
        self._module = weakref.ref(module)  # Last: torch asks whether a name is there already.

    def __getattr__(self, name: str) -> Any:
        """A child, parameter or buffer, or what the module has of this name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module" or (module := self._module()) is None:
                raise
        return getattr(module, name)

    def leave_out_unused(self) -> None:
        """Leave to the module what its forward does not use, as a loss with class weights or a second head."""
        try:
            nodes = [*trace(self).graph.nodes, *trace(self, training=False).graph.nodes]
        except ConfigurationError:
            return  # Which the strategy itself is to say.
        used = {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}
        for name, part in _parts(self).items():
            has_state = isinstance(part, Tensor) or any(True for _ in (*part.parameters(), *part.buffers()))
            if has_state and not any(one == name or one.startswith(f"{name}.") for one in used):
                delattr(self, name)

    def is_stale(self, module: nn.Module) -> bool:
        """Whether the module has other parts by now."""
        now = _parts(module)
        return any(now.get(name) is not part for name, part in _parts(self).items())

    def give_way(self, module: nn.Module, other: nn.Module) -> None:
        """Have a module's ``forward`` be another module, whose children hooks find in the place of its own."""
        for name in _parts(self):
            delattr(module, name)
        module.add_module(PLACE, other)
        for name, child in children_of(other):
            vars(module)[name] = child  # Not a second time among its children.
        vars(module)["forward"] = MethodType(_in_place, module)

    def come_back(self, module: nn.Module) -> None:
        """Undo :meth:`give_way`."""
        other = module.get_submodule(PLACE)
        delattr(module, PLACE)
        for name in ("forward", *(name for name, _ in children_of(other))):
            vars(module).pop(name, None)
        lasting = module.state_dict().keys() | self.state_dict().keys()
        parts = {**_parts(module), **_parts(self)}
        for name in _parts(module):
            delattr(module, name)
        for name in sorted(parts, key=self._order.index):  # The optimizers of a next run have the same order.
            _put(module, name, parts[name], name in lasting)


_made: "weakref.WeakKeyDictionary[nn.Module, OwnForward]" = weakref.WeakKeyDictionary()


def network_at(module: LightningModule, path: str) -> nn.Module:
    """The network at a path, which `find_network` gives."""
    return own_forward(module) if path == WHOLE else module.get_submodule(path)


def has_own_forward(module: LightningModule) -> bool:
    """Whether a module's ``forward`` is the user's own, and not that of this package, of Lightning or of torch."""
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return not owner.__module__.startswith(PACKAGES)


def own_forward(module: nn.Module) -> OwnForward:
    """A module's own forward as a network; each time the same, until the module gets other layers."""
    known = _made.get(module)
    if known is None or (PLACE not in dict(module.named_children()) and known.is_stale(module)):
        # Traced is a class's forward, whose arguments are the network's inputs.
        kind: Any = type(type(module).__name__, (OwnForward,), {"forward": type(module).forward})
        network: OwnForward = kind(module)
        network.leave_out_unused()
        _made[module] = network
    return _made[module]


def _parts(module: nn.Module) -> dict[str, nn.Module | Tensor]:
    """What a module has registered: parameters, buffers, children."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return {**dict(tensors), **dict(children_of(module))}


def _put(module: nn.Module, name: str, part: nn.Module | Tensor, lasting: bool) -> None:
    if isinstance(part, nn.Module):
        module.add_module(name, part)
    elif isinstance(part, nn.Parameter):
        module.register_parameter(name, part)
    else:
        module.register_buffer(name, part, persistent=lasting)


def children_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module's children, those too that it has under a second name."""
    for name, child in module.named_modules(remove_duplicate=False):
        if name and "." not in name:
            yield name, child


def _in_place(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of a module while something else has the place of what it uses."""
    return module.get_submodule(PLACE)(*args, **kwargs)
