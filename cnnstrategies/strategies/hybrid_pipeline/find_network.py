"""Which submodule of a LightningModule is divided into stages."""

from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies._torch_private import put_module
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import WHOLE, has_own_forward, own_forward


def find_network(module: LightningModule, named: str | None) -> str:
    """The path of the submodule that a pipeline divides.

    Args:
        module: The module.
        named: The path that the user has named; by default the child that has all of the module's parameters, or
            all that are trainable; else the module's own ``forward``, whose path is empty.

    Raises:
        ConfigurationError: There is none, or another path leads to its parameters, too.
    """
    path = _outermost(module) if named is None else _checked(module, named)
    _refuse_aliases(module, path)
    return path


def put_network(module: nn.Module, path: str, network: nn.Module) -> None:
    """Put another module in the place of a submodule."""
    if path == WHOLE:
        own = own_forward(module)
        own.come_back(module) if network is own else own.give_way(module, network)
        return
    parent, _, name = path.rpartition(".")
    put_module(module.get_submodule(parent), name, network)


def _outermost(module: LightningModule) -> str:
    kind = type(module).__name__
    everything = set(module.parameters())
    trainable = {parameter for parameter in everything if parameter.requires_grad}
    children = {name: set(child.parameters()) for name, child in module.named_children()}
    for wanted in (everything, trainable):
        if wanted:
            found = [name for name, own in children.items() if wanted <= own]
            if found:
                return found[0]
    if trainable and has_own_forward(module):
        return WHOLE
    own = [name for name, _ in module.named_parameters(recurse=False)]
    having = [name for name, parameters in children.items() if parameters & trainable]
    if not having:
        raise ConfigurationError(
            f"strategy hybrid_pipeline divides one submodule of {kind}, and none has parameters to train: build it in "
            "__init__ or configure_model (setup runs in each process, after it is looked at)"
        )
    if own:
        raise ConfigurationError(
            f"{kind} has parameters of its own ({', '.join(own[:3])}) beside those of {_selves(having)}: strategy "
            "hybrid_pipeline divides one submodule that has all; make them part of that"
        )
    raise ConfigurationError(
        f"strategy hybrid_pipeline divides one submodule that has all trainable parameters, and those of {kind} are "
        f"shared out over {_selves(having)}: have the module's own forward call them, and the steps "
        "self(images), once, with several views of the images as several inputs; or freeze the others and name one "
        "with the strategy's option network; or use strategy ddp, which takes them as they are"
    )


def _selves(names: list[str]) -> str:
    return ", ".join(f"self.{name}" for name in names)


def _checked(module: LightningModule, named: str) -> str:
    modules = dict(module.named_modules(remove_duplicate=False))
    if not named or named not in modules:
        close = [path for path in modules if path and path.count(".") <= named.count(".")]
        raise ConfigurationError(
            f"network={named!r}: {type(module).__name__} has no submodule of this name; it has {', '.join(close[:8])}"
        )
    return named


def _refuse_aliases(module: LightningModule, path: str) -> None:
    """Refuse a module that has the network's parameters in a second place, where no stage would be put."""
    if path == WHOLE:
        return
    kind = type(module).__name__
    inside = set(module.get_submodule(path).parameters())
    for other, child in module.named_modules(remove_duplicate=False):
        related = f"{path}.".startswith(f"{other}.") or other.startswith(f"{path}.")
        if other and not related and not inside.isdisjoint(child.parameters()):
            raise ConfigurationError(
                f"{kind}.{other} shares parameters with {kind}.{path}: strategy hybrid_pipeline puts a stage in the "
                f"place of {path} alone; call self.{path} in the steps and leave out self.{other}"
            )
