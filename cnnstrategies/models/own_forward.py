"""The ``forward`` of a LightningModule as a network of its own, with which the module can be exported."""

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.tracing import trace

PACKAGES = ("cnnstrategies.", "lightning.", "torch.")


class OwnForward(nn.Module):
    """A network with the ``forward`` of a module, and with the parts that it uses, under the module's names.

    Other attributes are those of the module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        lasting = module.state_dict().keys()
        for name, part in _parts(module).items():
            if isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            elif isinstance(part, Tensor):
                self.register_buffer(name, part, persistent=name in lasting)
            elif not isinstance(part, Metric | MetricCollection):
                self.add_module(name, part)
        # This is the last statement, because torch does not register a name that is an attribute already. The module is
        # in a list, because it must not become a submodule.
        self._module = [module]

    def __getattr__(self, name: str) -> Any:
        """Return a part of the network, or another attribute of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_module" not in vars(self):
                raise
        return getattr(vars(self)["_module"][0], name)

    def leave_out_unused(self) -> None:
        """Remove parts that the forward does not use, such as a loss with class weights or a second head."""
        try:
            nodes = [*trace(self).graph.nodes, *trace(self, training=False).graph.nodes]
        except ConfigurationError:
            return  # It is not known what the forward uses.
        used = {str(node.target) for node in nodes if node.op in ("call_module", "get_attr")}
        for name, part in _parts(self).items():
            has_state = isinstance(part, Tensor) or any(True for _ in (*part.parameters(), *part.buffers()))
            if has_state and not any(target == name or target.startswith(f"{name}.") for target in used):
                delattr(self, name)


def has_own_forward(module: LightningModule) -> bool:
    """Return whether the user defined a module's ``forward``, and not this package, Lightning or torch."""
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return not owner.__module__.startswith(PACKAGES)


def own_forward(module: nn.Module) -> OwnForward:
    """Return a module's own forward as a network. The network shares the module's parts."""
    # Tracing reads the network's inputs from the arguments of the forward of its class.
    kind: Any = type(type(module).__name__, (OwnForward,), {"forward": type(module).forward})
    network: OwnForward = kind(module)
    network.leave_out_unused()
    return network


def _parts(module: nn.Module) -> dict[str, nn.Module | Tensor]:
    """Return the parameters, buffers and children that a module has registered, by name."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    # With `remove_duplicate`, a child with two names would be left out under its second name.
    children = module.named_modules(remove_duplicate=False)
    return {**dict(tensors), **{name: child for name, child in children if name and "." not in name}}
