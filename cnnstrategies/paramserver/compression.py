"""Compressions: ways to send gradients and parameters in fewer bytes, one class each, and the registry of the classes.

Parameter servers use every :class:`PayloadCompression`, DDP every class with a communication hook. The options' names,
their help and errors, the cut into slices, the ladder of ``auto``, the planner and the tests ask the registry.
`docs/development/add-a-compression.md` shows how to add a class.

Sources: Stich et al., "Sparsified SGD with Memory" (NeurIPS 2018), for top-k with error feedback; Seide et al., "1-Bit
Stochastic Gradient Descent" (Interspeech 2014), for one bit, here with one mean for the positive and one for the
other elements; Vogels et al., "PowerSGD" (NeurIPS 2019).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from typing_extensions import override

from cnnstrategies.paramserver.messages import Encoding, InvalidMessageError, add_encoding

# The planner asks this registry and runs without torch, so methods import torch themselves.
if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

AUTO = "auto"  # The option value with which workers choose a compression themselves.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, 8)  # The bits of each byte value.
SAMPLE = 8192  # Elements from which the size of the largest elements is estimated.


class Compression(ABC):
    """One way to send gradients in fewer bytes.

    Attributes:
        name: The option value that chooses this compression.
        lossy: Whether a payload leaves out a part of the numbers that must be sent later (error feedback): the sender
            keeps the remainder and adds it to the next numbers. False for a compression that only rounds.
        bytes_per_element: Bytes sent for each element; None if the number depends on the data type or on an option.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool]
    bytes_per_element: ClassVar[float | None] = None

    @property
    def for_ddp(self) -> bool:
        """Whether DDP can send gradients in this way."""
        return type(self).register_ddp_hook is not Compression.register_ddp_hook

    def register_ddp_hook(self, model: DistributedDataParallel, rank: int, start_step: int) -> None:
        """Register a communication hook that compresses the gradients of a model under DDP.

        Only classes that override this method are offered for DDP.

        Args:
            model: The model, before its first backward.
            rank: Columns of each low-rank factor; for ``powersgd``.
            start_step: Number of steps without compression; for ``powersgd``.
        """
        raise NotImplementedError(f"{self.name} has no communication hook for DDP")

    def describe_ddp(self, rank: int, start_step: int) -> str:
        """Return words for "gradients are sent as ...", under DDP."""
        return self.name

    def sent_share(self, layers: Sequence[float]) -> float:
        """Return the bytes that are sent for each byte of float32 gradients; the planner asks for compressions of DDP.

        Args:
            layers: Bytes of the parameters of each layer.
        """
        return 1.0 if self.bytes_per_element is None else self.bytes_per_element / 4


class PayloadCompression(Compression):
    """A compression between workers and parameter servers, which turns the numbers of a slice into a payload.

    Attributes:
        encoding: Number of the encoding in message headers, from 0 to 255; see
            :class:`~cnnstrategies.paramserver.messages.Encoding` for those that the wire format itself uses.
        for_pulls: Whether servers can answer pulls in this way. A lossy compression encodes the change of each common
            step, any other one the values.
        largest: Largest absolute value that can be encoded. Larger gradients are refused, larger parameters clamped.
        push_level: Place in the ladder of ``compression: auto``, which rises from the most exact to the smallest
            payloads; None to leave this compression out.
        pull_level: Place in the ladder of ``pull_compression: auto``; None to leave it out. Beside ``none`` that ladder
            has place for one lossy compression and one that is not lossy.
    """

    encoding: ClassVar[int]
    for_pulls: ClassVar[bool] = True
    largest: ClassVar[float] = math.inf
    push_level: ClassVar[int | None] = None
    pull_level: ClassVar[int | None] = None

    @abstractmethod
    def encode(self, numbers: Tensor, density: float) -> Any:
        """Return numbers as a payload: a buffer of bytes.

        Args:
            numbers: Flat, contiguous CPU tensor with at least one element; float32 if the compression is lossy.
            density: Share of the elements to send; for ``topk``.
        """

    @abstractmethod
    def fits(self, length: int, numel: int, itemsize: int) -> bool:
        """Return whether a payload of `length` bytes can hold `numel` elements of `itemsize` bytes each.

        At most 72 bytes an element: receivers refuse larger payloads before they ask this method.
        """

    @abstractmethod
    def decode(self, payload: memoryview, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the numbers in a payload that :meth:`fits`, flat, as `dtype`; they may lie in the payload's memory.

        Raises:
            InvalidMessageError: The payload is not valid; see :meth:`check`.
        """

    def check(self, payload: memoryview, numel: int) -> None:
        """Refuse a payload of the right size that :meth:`decode` cannot decode.

        Raises:
            InvalidMessageError: The payload is not valid.
        """

    def encode_values(self, values: Tensor) -> Any:
        """Return parameters as a payload; values beyond :attr:`largest` become that number."""
        flat = values.view(-1)
        return self.encode(flat if self.largest == math.inf else flat.clamp(-self.largest, self.largest), 1.0)

    def describe(self, density: float) -> str:
        """Return words for "gradients are sent as ..." under a parameter server."""
        return self.name


COMPRESSIONS: dict[str, Compression] = {}
"""All compressions by name."""

PAYLOADS: dict[int, PayloadCompression] = {}
"""The compressions that parameter servers can use, by the number of their encoding."""

Registered = TypeVar("Registered", bound=type[Compression])


def register(compression: Registered) -> Registered:
    """Add a class to the registry (class decorator).

    Raises:
        TypeError: The class does not set an attribute without a default, or lacks a method.
        ValueError: Another class has this name, encoding or place in the ladder of pulls.
    """
    payload = issubclass(compression, PayloadCompression)
    for attribute in ("name", "lossy", *(["encoding"] if payload else [])):
        if not hasattr(compression, attribute):
            raise TypeError(f"{compression.__name__} does not set `{attribute}`: see its description in the base class")
    instance = compression()
    if instance.name in COMPRESSIONS or instance.name == AUTO:
        raise ValueError(f"{compression.__name__}: there is a compression {instance.name!r} already; use another name")
    if isinstance(instance, PayloadCompression):
        for other in PAYLOADS.values():
            if instance.pull_level and other.pull_level and instance.lossy == other.lossy:
                raise ValueError(
                    f"{compression.__name__}: {other.name} is in the ladder of pulls, which has place for one lossy "
                    "compression and one that is not; set pull_level of one of them to None"
                )
        add_encoding(instance.encoding)
        PAYLOADS[instance.encoding] = instance
    COMPRESSIONS[instance.name] = instance
    return compression


def payload_names(pulls: bool = False) -> tuple[str, ...]:
    """Return the names of the compressions that parameter servers can use, for pushes or for pulls."""
    return tuple(compression.name for compression in PAYLOADS.values() if compression.for_pulls or not pulls)


def ddp_names() -> tuple[str, ...]:
    """Return the names of the compressions that DDP can use."""
    return tuple(name for name, compression in COMPRESSIONS.items() if compression.for_ddp)


def payload_compression(name: str) -> PayloadCompression:
    """Return the compression of a parameter server's option; of ``auto`` the one with which workers begin."""
    compression = COMPRESSIONS["none" if name == AUTO else name]
    assert isinstance(compression, PayloadCompression)
    return compression


def may_be_lossy(name: str) -> bool:
    """Return whether an option's value stands for a lossy compression, or for ``auto``, whose ladder contains one."""
    if name != AUTO:
        return COMPRESSIONS[name].lossy
    return any(compression.lossy for compression in PAYLOADS.values() if compression.push_level is not None)


def auto_ladder(itemsize: int, pulls: bool = False, lossy: bool = True) -> list[PayloadCompression]:
    """Return the compressions among which ``auto`` chooses, from the most exact to the smallest.

    Gradients are rounded to bf16, which has the range of float32; parameters, which need no such range, to fp16, which
    is more exact. The smallest is one bit an element: top-k of a similar size costs more accuracy.

    Args:
        itemsize: Bytes of the parameters' largest data type; a compression that does not save any is left out.
        pulls: Whether pulls are compressed, instead of pushes.
        lossy: Whether lossy compressions can be used.
    """
    levels = [
        (level, compression)
        for compression in PAYLOADS.values()
        if (level := compression.pull_level if pulls else compression.push_level) is not None
        and (lossy or not compression.lossy)
        and (compression.bytes_per_element is None or compression.bytes_per_element < itemsize)
    ]
    return [compression for _, compression in sorted(levels, key=lambda entry: entry[0])]


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; the view keeps the memory alive."""
    import torch

    if tensor.dtype == torch.bfloat16:  # NumPy does not have this type.
        tensor = tensor.view(-1).view(torch.uint8)
    return memoryview(tensor.detach().reshape(-1).numpy()).cast("B")  # type: ignore[arg-type]


def from_bytes(payload: memoryview, dtype: torch.dtype) -> Tensor:
    """Return a one-dimensional tensor in the memory of a payload."""
    import torch

    if len(payload) == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype)


def check_length(length: int, encoding: int, numel: int, dtype: torch.dtype) -> None:
    """Refuse a payload whose size does not fit its slice.

    Raises:
        InvalidMessageError: The payload cannot hold `numel` elements in this encoding.
    """
    if encoding == Encoding.NOTHING:
        fits = length == 0
    else:
        fits = encoding in PAYLOADS and PAYLOADS[encoding].fits(length, numel, dtype.itemsize)
    if not fits:
        raise InvalidMessageError("a payload of another size than its slice needs")


def decode(payload: memoryview, encoding: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers in a payload, flat; they may lie in the payload's memory.

    The encoding must not be `NOTHING`, and :func:`check_length` must have accepted the length.

    Raises:
        InvalidMessageError: The payload is not valid in this encoding.
    """
    return PAYLOADS[encoding].decode(payload, numel, dtype)


class Encoder:
    """Encoder of one slice's gradients, with the remainder that lossy payloads have left out.

    Args:
        name: Option value of the compression.
        density: Share of the elements that ``topk`` sends.

    Attributes:
        compression: Compression of the next gradient. It may change: the remainder is still part of the next payload.
        left_out: The remainder: what earlier payloads have left out; None if there is none.
    """

    def __init__(self, name: str, density: float) -> None:
        self.compression = payload_compression(name)
        self._density = density
        self.left_out: Tensor | None = None

    def encode(self, gradient: Tensor) -> Any:
        """Return the payload of a flat, contiguous gradient; without compression the gradient's own memory."""
        import torch

        if not self.compression.lossy:
            if self.left_out is not None:
                gradient, self.left_out = gradient + self.left_out.to(gradient.dtype), None
            return self.compression.encode(gradient, self._density)
        wanted = gradient.float() if self.left_out is None else self.left_out.add_(gradient)
        payload = self.compression.encode(wanted, self._density)
        sent = self.compression.decode(memoryview(payload).cast("B"), wanted.numel(), torch.float32)
        self.left_out = wanted - sent if self.left_out is None else wanted.sub_(sent)
        return payload


def largest(magnitudes: Tensor, count: int) -> Tensor:
    """Return the indices of the largest elements, in rising order.

    Among many elements, only those that reach a bound are compared; a sample gives the bound (Lin et al., "Deep
    Gradient Compression", 2018). The result is that of a selection among all elements, except for which of several
    equal elements it contains.

    Args:
        magnitudes: Flat tensor; NaN counts as the largest value.
        count: Number of elements, from 1 to all.
    """
    total = magnitudes.numel()
    sample = magnitudes[:: total // SAMPLE | 1]
    wanted = int(1.5 * count / total * sample.numel()) + 16
    if total >= 8 * SAMPLE and wanted < sample.numel():
        bound = sample.kthvalue(sample.numel() - wanted + 1).values
        reach = magnitudes.lt(bound).logical_not_().nonzero().view(-1)
        if count <= reach.numel() <= total // 2:
            return reach[magnitudes[reach].topk(count, sorted=False).indices].sort().values
    return magnitudes.topk(count, sorted=False).indices.sort().values


# The compressions. The order is that of the names in help and errors.


@register
class Dense(PayloadCompression):
    """No compression: the memory of the numbers, in their own data type."""

    name = "none"
    encoding = Encoding.DENSE
    lossy = False
    push_level = pull_level = 0

    @override
    def encode(self, numbers: Tensor, density: float) -> Any:
        return as_bytes(numbers)

    @override
    def fits(self, length: int, numel: int, itemsize: int) -> bool:
        return length == numel * itemsize

    @override
    def decode(self, payload: memoryview, numel: int, dtype: torch.dtype) -> Tensor:
        return from_bytes(payload, dtype)


class Rounded(PayloadCompression):
    """Rounding to a data type of 16 bits.

    Attributes:
        dtype_name: Name of the data type in torch.
    """

    lossy = False
    bytes_per_element = 2
    dtype_name: ClassVar[str]

    @property
    def dtype(self) -> torch.dtype:
        """The data type."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    @override
    def encode(self, numbers: Tensor, density: float) -> Any:
        return as_bytes(numbers.to(self.dtype))

    @override
    def fits(self, length: int, numel: int, itemsize: int) -> bool:
        return length == 2 * numel

    @override
    def decode(self, payload: memoryview, numel: int, dtype: torch.dtype) -> Tensor:
        return from_bytes(payload, self.dtype).to(dtype)


@register
class FP16(Rounded):
    """Rounding to float16."""

    name = "fp16"
    encoding = 2
    dtype_name = "float16"
    largest = 65504.0  # torch.finfo(torch.float16).max
    pull_level = 10

    @override
    def register_ddp_hook(self, model: DistributedDataParallel, rank: int, start_step: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.fp16_compress_hook)


@register
class BF16(Rounded):
    """Rounding to bfloat16."""

    name = "bf16"
    encoding = 3
    dtype_name = "bfloat16"
    push_level = 10

    @override
    def register_ddp_hook(self, model: DistributedDataParallel, rank: int, start_step: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.bf16_compress_hook)


@register
class TopK(PayloadCompression):
    """The elements with the largest absolute values, at least one: uint32 indices, then as many float32 values."""

    name = "topk"
    encoding = 4
    lossy = True

    @override
    def encode(self, numbers: Tensor, density: float) -> Any:
        indices = largest(numbers.abs(), max(1, round(density * numbers.numel())))
        payload = np.concatenate(
            [indices.numpy().astype("<u4").view(np.uint8), numbers[indices].numpy().astype("<f4").view(np.uint8)]
        )
        return payload.data

    @override
    def fits(self, length: int, numel: int, itemsize: int) -> bool:
        return length % 8 == 0 and 0 < length <= 8 * numel

    @override
    def check(self, payload: memoryview, numel: int) -> None:
        self._indices(payload, numel)

    @override
    def decode(self, payload: memoryview, numel: int, dtype: torch.dtype) -> Tensor:
        import torch

        indices = self._indices(payload, numel)
        values = np.frombuffer(payload[4 * len(indices) :], "<f4")
        numbers = torch.zeros(numel, dtype=dtype)
        numbers[torch.from_numpy(indices)] = torch.from_numpy(values.copy()).to(dtype)
        return numbers

    @override
    def describe(self, density: float) -> str:
        return f"{density:.3g} of their changes, the rest later"

    def _indices(self, payload: memoryview, numel: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        count = len(payload) // 8
        indices = np.frombuffer(payload[: 4 * count], "<u4").astype(np.int64)
        if indices[-1] >= numel or (np.diff(indices) <= 0).any():
            raise InvalidMessageError("indices that are out of range or not in order")
        return indices


@register
class OneBit(PayloadCompression):
    """One bit for each element, which says whether the element is positive.

    Before the bits stand two float32 means: of the other elements, and of the positive ones.
    """

    name = "onebit"
    encoding = 5
    lossy = True
    bytes_per_element = 1 / 8
    push_level = pull_level = 20

    @override
    def encode(self, numbers: Tensor, density: float) -> Any:
        bits = np.packbits((numbers > 0).numpy())
        positive = int(np.bitwise_count(bits).sum())
        sums = np.array([float(numbers.clamp_max(0).sum()), float(numbers.clamp_min(0).sum())])
        means = sums / np.maximum([numbers.numel() - positive, positive], 1)
        return np.concatenate([means.astype("<f4").view(np.uint8), bits]).data

    @override
    def fits(self, length: int, numel: int, itemsize: int) -> bool:
        return length == 8 + (numel + 7) // 8

    @override
    def decode(self, payload: memoryview, numel: int, dtype: torch.dtype) -> Tensor:
        import torch

        # The eight numbers of each byte value are looked up: 30 times as fast as going bit by bit.
        eights = np.frombuffer(payload[:8], "<f4")[BITS]
        return torch.from_numpy(eights.take(np.frombuffer(payload[8:], np.uint8), axis=0).reshape(-1)[:numel]).to(dtype)

    @override
    def describe(self, density: float) -> str:
        return "one bit a value, the rest later"


@register
class PowerSGD(Compression):
    """Two thin factors of each gradient matrix, for DDP; what they leave out is added to the next gradient."""

    name = "powersgd"
    lossy = True

    @override
    def register_ddp_hook(self, model: DistributedDataParallel, rank: int, start_step: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=start_step
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    @override
    def describe_ddp(self, rank: int, start_step: int) -> str:
        return f"rank-{rank} factors from step {start_step} on"

    @override
    def sent_share(self, layers: Sequence[float], rank: int = 1) -> float:
        """Return r (m + n) elements for each m x n matrix as a share of its m n elements.

        The matrices' shapes are not in the profile: each layer counts as a square matrix, for which the share is
        smallest.
        """
        total = sum(layers)
        sent = sum(min(layer, 2 * rank * 4 * (layer / 4) ** 0.5) for layer in layers)
        return sent / total if total else 1.0
