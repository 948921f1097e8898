"""Shapes, strides and dtypes of an operation's results on a rank where the operation does not run."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cnnstrategies._torch_private import without_modes
from cnnstrategies.placed.messages import RefusedError
from cnnstrategies.placed.operations import tensors_in, with_tensors

META = torch.device("meta")
BATCH_NORM = torch.ops.aten.native_batch_norm.default
# The cache is emptied at this number of entries. A program whose batches all have different shapes needs new entries
# all the time.
LIMIT = 20_000


def check_layout(tensor: Tensor) -> None:
    """Refuse tensors that are not dense, on ranks that have the tensor and on other ranks."""
    if tensor.layout is not torch.strided:
        raise RefusedError(
            f"an operation on tensors that only some ranks have gives a tensor of layout {tensor.layout}: use dense "
            "tensors, for example nn.Embedding without sparse=True"
        )


class ResultForm(NamedTuple):
    """Metadata of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "ResultForm":
        """Return a tensor's metadata.

        Raises:
            RefusedError: The tensor is sparse, so that it does not have strides.
        """
        check_layout(tensor)
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class ResultForms:
    """A cache of results' metadata.

    torch computes the metadata by running the operation on tensors of the device "meta", which takes ten times as long
    as a look into the cache.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return an operation's results with a `ResultForm` in place of each tensor."""
        try:
            key: Any = (func, *map(_signature, args))
            if kwargs:
                key += tuple((name, _signature(value)) for name, value in kwargs.items())
            known = self._known.get(key, self)
        except TypeError:  # An argument is not hashable.
            key, known = None, self
        forms = run_on_meta(func, args, kwargs) if known is self else known
        if known is self and key is not None:
            if len(self._known) >= LIMIT:
                self._known.clear()
            self._known[key] = forms
        return _saved_on_cpu(args, forms) if func is BATCH_NORM else forms


def run_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation without values. Return its results with a `ResultForm` in place of each tensor."""
    with without_modes():
        copies = {id(tensor): _on_meta(tensor) for tensor in tensors_in(args, kwargs)}
        args, kwargs = with_tensors(lambda tensor: copies[id(tensor)], args, kwargs)
        if "device" in kwargs:
            kwargs["device"] = META
        return as_forms(func(*args, **kwargs))


def as_forms(value: Any) -> Any:
    """Return a tensor or a list of tensors with a `ResultForm` in place of each tensor; other values as they are."""
    if isinstance(value, Tensor):
        return ResultForm.of(value)
    if isinstance(value, (list, tuple)):
        return [as_forms(item) for item in value]
    return value


def _saved_on_cpu(args: Any, forms: Any) -> Any:
    """Return batch normalisation's results. In evaluation mode the statistics that it saves are empty on a CPU only."""
    images, is_training = args[0], args[5]
    if is_training or images.device.type != "cpu":
        return forms
    empty = forms[1]._replace(shape=(0,), stride=(1,))
    return [forms[0], empty, empty]


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    # 1, 1.0 and True are equal as keys, but may give results of different dtypes.
    return type(value), value
