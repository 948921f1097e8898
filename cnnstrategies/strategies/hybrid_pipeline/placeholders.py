"""What steps and hooks find in the place of the images and of the network, which no rank has as a whole."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import children_of
from cnnstrategies.pipeline.fixed import TracedModule
from cnnstrategies.pipeline.leaf_tracer import network_inputs
from cnnstrategies.pipeline.stage import StageModule

# What changes neither the images' values nor which of them there are.
_HARMLESS = frozenset({"to", "cpu", "cuda", "contiguous", "float", "double", "detach", "clone", "pin_memory"})
# What tells of their form alone, beside attributes such as shape and device.
_FORM = frozenset(
    {
        *("size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous"),
        *("is_floating_point", "is_complex", "is_pinned", "get_device", "type", "__len__"),
    }
)
COMPILE_STAGES = (
    "strategy hybrid_pipeline cuts the network before it is compiled; leave out torch.compile, and have each stage "
    "compiled by the callback ComputeSettings(compile_backend='inductor'), or use strategy ddp"
)
OF_THE_BATCH = (
    "that is not a tensor of the batch with a row for each sample: with strategy hybrid_pipeline the first stage alone "
    "has the images; change them in the network's forward, in the dataset, or in on_after_batch_transfer, which runs "
    "where they are (several views of an image are several inputs of the network)"
)


class ImagesElsewhere(Tensor):
    """Tells the shape, type and device of the images of a batch, and refuses to be computed with.

    Attributes:
        number: Which of the network's inputs it stands for.
    """

    number: int

    @classmethod
    def like(
        cls, rows: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, number: int = 0
    ) -> "ImagesElsewhere":
        """A stand-in for ``rows`` images of a shape (C, H, W)."""
        # Who gets at the values all the same, by code that is not torch's, has no plausible ones.
        value = float("nan") if dtype.is_floating_point else 0
        images = torch.full((), value, dtype=dtype, device=device).expand(rows, *shape).as_subclass(cls)
        images.number = number
        return images

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"<images {tuple(self.shape)}, which the first stage has>"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is asked of the images' form, or refuse."""
        name = getattr(func, "__name__", str(func))
        if name in _FORM | _HARMLESS or name == "__get__":
            result = super().__torch_function__(func, types, tuple(args), dict(kwargs or {}))  # type: ignore[no-untyped-call]
            if not isinstance(result, Tensor):
                return result
            if name in _HARMLESS and result.dtype == args[0].dtype:
                return cls.like(len(result), result.shape[1:], result.dtype, result.device, args[0].number)
        if torch.compiler.is_compiling():
            raise ConfigurationError(f"a step, or the network that it calls, is compiled: {COMPILE_STAGES}")
        raise ConfigurationError(
            f"the step, or a callback, computes with the images of the batch ({name}) outside the network: with "
            "strategy hybrid_pipeline the first stage alone has them; do it in the network's forward, in the dataset, "
            "or in on_after_batch_transfer, which runs where they are (a loss that compares with the images needs them "
            "in the batch a second time, as targets; a second call of the network is to be a second input of the one "
            "call)"
        )


_HERE = "with strategy hybrid_pipeline every rank runs the hooks, and has the parameters of its own stage alone"


class NotHereError(ConfigurationError, AttributeError):
    """What is asked of a layer is of another stage; ``hasattr`` says so, too."""


class Layers(TracedModule):
    """A part of the network that is no layer by itself, with the parts that it has in the network.

    Each has the place that it has there, so that ``self.net[0]`` is the same layer on every rank: this stage's ``own``,
    or one without parameters, with which a loop over parameters does nothing.
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
        """Refuse to compute."""
        self._refuse(f"self.{self._name} is called by itself", "call the network as a whole, which returns what it has")

    def __getattr__(self, name: str) -> Any:
        """What torch has registered, or a plain value of the network's own; what is of another stage is refused."""
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
        """Refuse to be copied."""
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


class NetworkStandIn(Layers):
    """Takes the place of a LightningModule's network: this rank's part, under the network's parameter names.

    Called with images it returns the outputs that the pipeline has computed for the batch.
    """

    def __init__(self, stage: StageModule, path: str, network: nn.Module) -> None:
        super().__init__(path, network, stage)
        self._path = path or "forward"
        self._inputs = network_inputs(network)
        self._signature = inspect.signature(network.forward)
        self.training = stage.training
        self._outputs: list[Any] = []

    def put(self, outputs: Any) -> None:
        """Hand over the outputs that the next step gets."""
        self._outputs = [outputs]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's outputs for the batch of this step, called once, with the images of the batch."""
        if not self._outputs:
            raise ConfigurationError(
                f"self.{self._path} was called twice in a step, or outside of a step: its stages run once for each "
                f"batch; make one call of it with several inputs, such as self.{self._path}(left, right) for a network "
                "whose forward takes both, in training_step, validation_step, test_step and predict_step alone"
            )
        given = self._signature.bind(*args, **kwargs).arguments
        for number, name in enumerate(self._inputs):
            images = one_of(given.pop(name))
            if not isinstance(images, ImagesElsewhere):
                raise ConfigurationError(f"the network is called with {described(images)} {OF_THE_BATCH}")
            if images.number != number:
                raise ConfigurationError(
                    f"the network is called with another tensor of the batch as {name!r} than in the first step: in a "
                    "pipeline it gets the same one in each"
                )
        for name, value in given.items():
            default = self._signature.parameters[name].default
            if value is not default and (isinstance(value, Tensor) or value != default):
                raise ConfigurationError(
                    f"self.{self._path} is called with {name}={described(value)} besides the images: a network that "
                    "is cut into stages has its options from the beginning; set it in its __init__, or leave out the "
                    f"default of {name!r} if it is a tensor of the batch"
                )
        return self._outputs.pop()


def one_of(value: Any) -> Any:
    """An argument; of ``*args`` the only one."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def described(value: Any) -> str:
    """A value in words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else f"a {type(value).__name__}"
