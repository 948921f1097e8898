"""Compressions of gradients and parameters: one class for each method, and the registry of these classes.

Parameter servers can use each :class:`PayloadCompression`; DDP can use each class with a communication hook. All other
code reads the registry: the options (for the choices in help texts and errors), the division into slices, the list from
which ``auto`` chooses, the planner and the tests. `docs/development/add-a-compression.md` shows how to add a class.

Sources: Stich et al., "Sparsified SGD with Memory" (NeurIPS 2018), for top-k with error feedback; Seide et al., "1-Bit
Stochastic Gradient Descent" (Interspeech 2014), for one bit per element, here with one mean for the positive elements
and another mean for all other elements; Vogels et al., "PowerSGD" (NeurIPS 2019).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from typing_extensions import override

from cnnstrategies.paramserver.messages import Encoding, InvalidMessageError, add_encoding

# The planner uses this registry and runs without torch, so torch is imported inside the methods.
if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

AUTO = "auto"  # value of the options that makes the workers choose the compression during training
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, 8)  # Row b contains the eight bits of the byte b.
SAMPLE = 8192  # number of elements that `largest` samples to estimate the k-th largest magnitude


class Compression(ABC):
    """A method to send gradients in fewer bytes.

    Attributes:
        name: Value of the options that selects this compression.
        lossy: Whether the compression uses error feedback: the sender keeps what a payload leaves out, and adds it to
            the next tensor that it encodes. False for a compression that only rounds.
        bytes_per_element: Number of bytes sent for each element; None if this depends on the dtype or on an option.
    """

    name: ClassVar[str]
    lossy: ClassVar[bool]
    bytes_per_element: ClassVar[float | None] = None

    @property
    def for_ddp(self) -> bool:
        """Whether DDP can use this compression."""
        return type(self).register_ddp_hook is not Compression.register_ddp_hook

    def register_ddp_hook(self, model: DistributedDataParallel, rank: int, start_step: int) -> None:
        """Register a communication hook that compresses the gradients of a DDP model.

        DDP can use only the classes that override this method.

        Args:
            model: The model, before its first backward.
            rank: Rank of the low-rank factors. Only ``powersgd`` uses it.
            start_step: First step with compression. Only ``powersgd`` uses it.
        """
        raise NotImplementedError(f"compression {self.name!r} has no communication hook for DDP")

    def describe_ddp(self, rank: int, start_step: int) -> str:
        """Return a description for DDP, which completes the sentence "gradients are sent as ...".

        See :meth:`register_ddp_hook` for `rank` and `start_step`.
        """
        return self.name

    def sent_share(self, layers: Sequence[float]) -> float:
        """Return the compressed size of float32 gradients as a fraction of the uncompressed size.

        The planner uses this fraction to predict DDP's traffic.

        Args:
            layers: Size of each layer's parameters, in bytes.
        """
        return 1.0 if self.bytes_per_element is None else self.bytes_per_element / 4


class PayloadCompression(Compression):
    """A compression for parameter servers: it encodes a slice of the gradients or parameters as a payload.

    Attributes:
        encoding: Number of the encoding in message headers, from 0 to 255. The wire format itself uses the numbers of
            :class:`~cnnstrategies.paramserver.messages.Encoding`. Numbers from 100 are free for classes outside of this
            project.
        for_pulls: Whether servers can compress the replies to pulls with this compression. In a reply, a lossy
            compression encodes the change that a common step makes to the parameters; any other compression encodes
            the parameters.
        largest: Largest absolute value that can be encoded. A gradient above this value is an error. A parameter above
            this value is clamped.
        push_level: Sort key in the ladder of ``compression: auto``. A ladder is a list of compressions: the most exact
            compression comes first, and the compression with the smallest payloads comes last. None if the ladder does
            not contain this compression.
        pull_level: Sort key in the ladder of ``pull_compression: auto``; None if that ladder does not contain this
            compression. That ladder can contain at most three compressions: ``none``, one lossy compression, and one
            compression that only rounds.
    """

    encoding: ClassVar[int]
    for_pulls: ClassVar[bool] = True
    largest: ClassVar[float] = math.inf
    push_level: ClassVar[int | None] = None
    pull_level: ClassVar[int | None] = None

    @abstractmethod
    def encode(self, numbers: Tensor, density: float) -> Any:
        """Encode a tensor as a payload.

        Args:
            numbers: Flat, contiguous CPU tensor with at least one element; its dtype is float32 if the compression is
                lossy.
            density: Fraction of the elements to send. Only ``topk`` uses it.

        Returns:
            The payload: an object with the buffer protocol.
        """

    @abstractmethod
    def fits(self, length: int, numel: int, itemsize: int) -> bool:
        """Return whether a payload of this length can be valid for a slice.

        Args:
            length: Length of the payload, in bytes. Receivers drop payloads of more than 72 bytes per element before
                they call this method.
            numel: Number of elements of the slice.
            itemsize: Bytes per element of the slice's dtype.
        """

    @abstractmethod
    def decode(self, payload: memoryview, numel: int, dtype: torch.dtype) -> Tensor:
        """Decode a payload.

        Args:
            payload: The payload, of a length for which :meth:`fits` has returned True.
            numel: Number of elements.
            dtype: Dtype of the result.

        Returns:
            A flat tensor, which may be a view of the payload's memory.

        Raises:
            InvalidMessageError: The payload is not valid; see :meth:`check`.
        """

    def check(self, payload: memoryview, numel: int) -> None:
        """Check the contents of a payload, without decoding it. The length has already been checked with :meth:`fits`.

        Raises:
            InvalidMessageError: :meth:`decode` cannot decode the payload.
        """

    def encode_values(self, values: Tensor) -> Any:
        """Encode parameters as a payload. Values outside the range of the encoding are clamped to :attr:`largest`."""
        flat = values.view(-1)
        return self.encode(flat if self.largest == math.inf else flat.clamp(-self.largest, self.largest), 1.0)

    def describe(self, density: float) -> str:
        """Return a description that completes the sentence "gradients are sent as ..." for parameter servers.

        Args:
            density: Fraction of the elements that ``topk`` sends. Other compressions ignore it.
        """
        return self.name


COMPRESSIONS: dict[str, Compression] = {}
"""All compressions by name."""

PAYLOADS: dict[int, PayloadCompression] = {}
"""The compressions that parameter servers can use, by encoding number."""

Registered = TypeVar("Registered", bound=type[Compression])


def register(compression: Registered) -> Registered:
    """Add a class to the registry. Use this function as a class decorator.

    Raises:
        TypeError: The class does not set a required attribute, or does not implement an abstract method.
        ValueError: Another class already has the same name or encoding; or the class has a `pull_level`, but the ladder
            of pulls already contains a compression with the same value of `lossy`.
    """
    payload = issubclass(compression, PayloadCompression)
    for attribute in ("name", "lossy", *(["encoding"] if payload else [])):
        if not hasattr(compression, attribute):
            raise TypeError(
                f"{compression.__name__} does not set `{attribute}`: set it as described in the docstring of its base "
                "class"
            )
    instance = compression()
    if instance.name in COMPRESSIONS or instance.name == AUTO:
        raise ValueError(f"{compression.__name__}: the name {instance.name!r} is already in use; use a different name")
    if isinstance(instance, PayloadCompression):
        for other in PAYLOADS.values():
            if instance.pull_level and other.pull_level and instance.lossy == other.lossy:
                raise ValueError(
                    f"{compression.__name__}: the ladder of pulls already contains {other.name}, and can contain only "
                    "one lossy compression and one that is not lossy: set pull_level to None in "
                    f"{compression.__name__} or in {type(other).__name__}"
                )
        add_encoding(instance.encoding, compression.__name__)
        PAYLOADS[instance.encoding] = instance
    COMPRESSIONS[instance.name] = instance
    return compression


def payload_names(pulls: bool = False) -> tuple[str, ...]:
    """Return the names of the compressions that parameter servers can use.

    Args:
        pulls: Whether to return only the compressions that can be used for pulls.
    """
    return tuple(compression.name for compression in PAYLOADS.values() if compression.for_pulls or not pulls)


def ddp_names() -> tuple[str, ...]:
    """Return the names of the registered compressions that DDP can use."""
    return tuple(name for name, compression in COMPRESSIONS.items() if compression.for_ddp)


def payload_compression(name: str) -> PayloadCompression:
    """Return the compression with this name. For ``auto``, return the compression with which workers begin."""
    compression = COMPRESSIONS["none" if name == AUTO else name]
    assert isinstance(compression, PayloadCompression)
    return compression


def may_be_lossy(name: str) -> bool:
    """Return whether gradients may be sent with a lossy compression under this value of ``compression``.

    For ``auto`` this is the case if the ladder contains a lossy compression.
    """
    if name != AUTO:
        return COMPRESSIONS[name].lossy
    return any(compression.lossy for compression in PAYLOADS.values() if compression.push_level is not None)


def auto_ladder(itemsize: int, pulls: bool = False, lossy: bool = True) -> list[PayloadCompression]:
    """Return the compressions among which ``auto`` chooses: first the most exact, last the one with the fewest bytes.

    Gradients are rounded to bf16, which has the range of float32. Parameters do not need this range and are rounded to
    fp16, which is more exact. The smallest payloads have one bit per element. The ladders do not contain top-k: at a
    similar size, it loses more accuracy than the compression to one bit per element.

    Args:
        itemsize: Bytes per element of the parameters' largest dtype. The ladder contains only compressions with fewer
            bytes per element.
        pulls: Whether to return the ladder of pulls instead of the ladder of pushes.
        lossy: Whether the ladder may contain lossy compressions.
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
    """Return a view of the bytes of a contiguous CPU tensor. The view keeps the tensor's storage alive."""
    import torch

    if tensor.dtype == torch.bfloat16:  # NumPy does not have this dtype, so reinterpret the elements as bytes.
        tensor = tensor.view(-1).view(torch.uint8)
    return memoryview(tensor.detach().reshape(-1).numpy()).cast("B")  # type: ignore[arg-type]


def from_bytes(payload: memoryview, dtype: torch.dtype) -> Tensor:
    """Return the elements of a payload as a one-dimensional tensor, without a copy.

    Args:
        payload: The payload.
        dtype: Dtype of the elements in the payload, and of the returned tensor.
    """
    import torch

    if len(payload) == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype)


def check_length(length: int, encoding: int, numel: int, dtype: torch.dtype) -> None:
    """Check that a payload's length is valid for its slice.

    Args:
        length: Length of the payload, in bytes.
        encoding: Number of the payload's encoding.
        numel: Number of elements of the slice.
        dtype: Dtype of the slice.

    Raises:
        InvalidMessageError: The length is not valid for this encoding.
    """
    if encoding == Encoding.NOTHING:
        fits = length == 0
    else:
        fits = encoding in PAYLOADS and PAYLOADS[encoding].fits(length, numel, dtype.itemsize)
    if not fits:
        raise InvalidMessageError("the length of the payload does not fit its slice")


def decode(payload: memoryview, encoding: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Decode a payload to a flat tensor, which may be a view of the payload's memory.

    The caller must have checked the payload's length with :func:`check_length`.

    Args:
        payload: The payload.
        encoding: Number of the payload's encoding; not `NOTHING`.
        numel: Number of elements.
        dtype: Dtype of the result.

    Raises:
        InvalidMessageError: The payload is not valid in this encoding.
    """
    return PAYLOADS[encoding].decode(payload, numel, dtype)


class Encoder:
    """Encoder of one slice's gradients with error feedback.

    Args:
        name: Value of the option ``compression``.
        density: Fraction of the elements that ``topk`` sends.

    Attributes:
        compression: Compression of the next gradient. The owner may change this attribute between two gradients. The
            first payload of the new compression then also contains :attr:`left_out`.
        left_out: Sum of all gradients so far minus the sum of the decoded payloads. The encoder adds this difference to
            the next gradient. None if nothing was left out.
    """

    def __init__(self, name: str, density: float) -> None:
        self.compression = payload_compression(name)
        self._density = density
        self.left_out: Tensor | None = None

    def encode(self, gradient: Tensor) -> Any:
        """Encode a flat, contiguous gradient as a payload.

        Without compression, the payload is a view of the gradient's bytes, without a copy.
        """
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
    """Return the indices of the `count` largest elements, in rising order of the indices.

    For a large tensor, a sample of the elements gives a threshold, and only the elements above the threshold are
    compared (Lin et al., "Deep Gradient Compression", 2018). The result is still exact; only the choice among equal
    elements may differ from the choice of ``torch.topk``.

    Args:
        magnitudes: Flat tensor. NaN counts as the largest value.
        count: Number of indices to return, at least 1 and at most the number of elements.
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


# The classes of compressions. Help texts and error messages list the compressions' names in the order of these classes.


@register
class Dense(PayloadCompression):
    """No compression: the payload contains the elements of the tensor in the tensor's own dtype."""

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
    """Rounding to a dtype of 16 bits.

    Attributes:
        dtype_name: Name of the dtype in torch.
    """

    lossy = False
    bytes_per_element = 2
    dtype_name: ClassVar[str]

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype to which the elements of a tensor are rounded."""
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
    """Rounding to float16, with which absolute values above 65504 cannot be sent."""

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
    """Rounding to bfloat16, which has the range of float32 and a precision of 8 bits."""

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
    """Top-k sparsification: only the elements with the largest absolute values are sent, at least one element.

    The payload consists of the elements' indices as uint32 in rising order, followed by the elements as float32.
    """

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
        return f"the fraction {density:.3g} of their elements, with error feedback"

    def _indices(self, payload: memoryview, numel: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        count = len(payload) // 8
        indices = np.frombuffer(payload[: 4 * count], "<u4").astype(np.int64)
        if indices[-1] >= numel or (np.diff(indices) <= 0).any():
            raise InvalidMessageError("the indices are out of range or not in rising order")
        return indices


@register
class OneBit(PayloadCompression):
    """One bit for each element of a tensor: 1 if the element is positive, otherwise 0.

    The payload consists of two float32 numbers and the bits. The first number is the mean of all elements that are not
    positive, to which receivers decode the bit 0. The second number is the mean of the positive elements, to which
    receivers decode the bit 1.
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

        # A lookup table from each byte to its eight elements is 30 times as fast as a loop over the bits.
        eights = np.frombuffer(payload[:8], "<f4")[BITS]
        return torch.from_numpy(eights.take(np.frombuffer(payload[8:], np.uint8), axis=0).reshape(-1)[:numel]).to(dtype)

    @override
    def describe(self, density: float) -> str:
        return "one bit per element, with error feedback"


@register
class PowerSGD(Compression):
    """Low-rank approximation of each gradient matrix by two factors, with error feedback. Only for DDP."""

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
        """Return the size of the factors as a fraction of the size of the gradients.

        For an m x n matrix, the two factors of rank r have r (m + n) elements, and the matrix has m n elements. The
        planner's profile does not contain the shapes of the matrices, so this method treats each layer as a square
        matrix. Other shapes have a larger fraction.

        Args:
            layers: Size of each layer's parameters, in bytes.
            rank: Rank of the factors.
        """
        total = sum(layers)
        sent = sum(min(layer, 2 * rank * 4 * (layer / 4) ** 0.5) for layer in layers)
        return sent / total if total else 1.0
