"""The layers of a divided network as hooks find them: those of this rank's stage, and the others without parameters."""

from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import children_of
from cnnstrategies.pipeline.fixed import Traced

_HERE = "with strategy hybrid_pipeline every rank runs the hooks, and has the parameters of its own stage alone"


class NotHereError(ConfigurationError, AttributeError):
    """What is asked of a layer is of another stage; ``hasattr`` says so, too."""


class Layers(Traced):
    """A part of the network that is no layer by itself, with the parts that it has in the network.

    Each has the place that it has there, so that ``self.net[0]`` is the same layer on every rank: this stage's own, or
    one without parameters, with which a loop over parameters does nothing.

    Args:
        path: What the module calls it.
        whole: The part of the whole network.
        own: What this rank's stage has of it; None for nothing.
    """

    def __init__(self, path: str, whole: nn.Module, own: nn.Module | None) -> None:
        super().__init__()
        self._name = path
        self._whole = (whole,)  # Out of torch's sight.
        if own is not None:
            for name, parameter in own.named_parameters(recurse=False):
                self.register_parameter(name, parameter)
            for name, buffer in own.named_buffers(recurse=False):
                self.register_buffer(name, buffer, persistent=name in own.state_dict())
        found = {} if own is None else dict(children_of(own))
        for name, child in children_of(whole):
            self.add_module(name, _layer(f"{path}.{name}".removeprefix("."), child, found.get(name)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to compute.

        Raises:
            ConfigurationError: Always.
        """
        self._refuse(f"self.{self._name} is called by itself", "call the network as a whole, which returns what it has")

    def __getattr__(self, name: str) -> Any:
        """What torch has registered, or a plain value of the network's own.

        Raises:
            NotHereError: It is of another stage.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_whole":
                raise
        value = getattr(self._whole[0], name)
        if isinstance(value, Tensor):
            self._refuse(
                f"self.{self._name}.{name} is of another stage",
                f"loop over self.{self._name}.parameters(), of which a rank has its own or none, or ask with hasattr",
            )
        if callable(value):
            self._refuse(
                f"self.{self._name}.{name} is code of the network's own, which would miss the other stages",
                "call it in __init__ or configure_optimizers, where the network is whole",
            )
        return value

    def __getitem__(self, key: Any) -> Any:
        """The layer that the network has there, or several."""
        whole: Any = self._whole[0]
        if isinstance(key, slice):
            return nn.ModuleList([self[place] for place in range(len(whole))[key]])
        chosen = whole[key]
        name = next((name for name, child in children_of(whole) if child is chosen), None)
        return getattr(self, str(key) if name is None else name)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Refuse to be copied.

        Raises:
            ConfigurationError: Always.
        """
        self._refuse(
            f"self.{self._name} is copied",
            "a copy would be a part: to average weights use lightning.pytorch.callbacks.EMAWeightAveraging or "
            "WeightAveraging; else copy it in __init__",
        )

    def _refuse(self, what: str, but: str) -> NoReturn:
        raise NotHereError(f"{what}: {_HERE}; {but}, or use strategy ddp")


class LayersElsewhere(Layers):
    """One of which this rank has nothing: what is set on it is set where it is."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute."""
        nn.Module.__setattr__(self, name, value)


def _layer(path: str, whole: nn.Module, own: nn.Module | None) -> nn.Module:
    if own is whole or not (_has_any(whole.parameters()) or _has_any(whole.buffers())):
        return whole  # Without parameters it is the same everywhere.
    return LayersElsewhere(path, whole, None) if own is None else Layers(path, whole, own)


def _has_any(tensors: Iterator[Tensor]) -> bool:
    return next(tensors, None) is not None
