"""Encodings of pushed gradients, and of pulled parameters or changes of these.

Where something is left out, error feedback makes up for it.

Top-k with error feedback: Stich et al., "Sparsified SGD with Memory" (NeurIPS 2018). One bit: Seide et al., "1-Bit
Stochastic Gradient Descent" (Interspeech 2014), with one mean for the positive and one for the negative elements.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cnnstrategies.paramserver.messages import Encoding, InvalidMessageError
from cnnstrategies.paramserver.specification import Compression

ENCODINGS: dict[Compression, Encoding] = {
    "none": Encoding.DENSE,
    "fp16": Encoding.FP16,
    "bf16": Encoding.BF16,
    "topk": Encoding.TOPK,
    "onebit": Encoding.ONEBIT,
    "auto": Encoding.DENSE,  # until something else is chosen
}
_HALF = {Encoding.FP16: torch.float16, Encoding.BF16: torch.bfloat16}
_WHOLE = {Encoding.DENSE, *_HALF}  # Nothing is left out.
CHANGES = frozenset({Encoding.TOPK, Encoding.ONEBIT})  # What is left out comes with the next.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, 8)  # of each byte
SAMPLE = 8192  # elements that tell about how large the largest are


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor; keeps it alive."""
    if tensor.dtype == torch.bfloat16:  # numpy has none.
        tensor = tensor.view(-1).view(torch.uint8)
    return memoryview(tensor.detach().reshape(-1).numpy()).cast("B")  # type: ignore[arg-type]


def from_bytes(payload: memoryview, dtype: torch.dtype) -> Tensor:
    """A one-dimensional tensor on the memory of a payload."""
    if len(payload) == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype)


class Encoder:
    """Encodes the gradients of one slice; remembers what it left out and adds it to the next.

    Attributes:
        encoding: Of the next gradient. It may change: what was left out before is in the next one all the same.
        left_out: What was left out so far; None for nothing.
    """

    def __init__(self, compression: Compression, ratio: float) -> None:
        self.encoding = ENCODINGS[compression]
        self._ratio = ratio
        self.left_out: Tensor | None = None

    def encode(self, gradient: Tensor) -> Any:
        """A payload for a flat, contiguous gradient; without compression the gradient's own memory."""
        if self.left_out is not None and self.encoding in _WHOLE:
            gradient, self.left_out = gradient + self.left_out.to(gradient.dtype), None
        if self.encoding == Encoding.DENSE:
            return as_bytes(gradient)
        if self.encoding in _HALF:
            return as_bytes(gradient.to(_HALF[self.encoding]))
        wanted = gradient.float() if self.left_out is None else self.left_out.add_(gradient)
        payload = compress(wanted, self.encoding, self._ratio)
        sent = decode(payload, self.encoding, wanted.numel(), torch.float32)
        self.left_out = wanted - sent if self.left_out is None else wanted.sub_(sent)
        return payload


def compress(wanted: Tensor, encoding: Encoding, ratio: float) -> memoryview:
    """A payload, `TOPK` or `ONEBIT`, with a part of what some flat float32 numbers say; top-k sends at least one."""
    if encoding == Encoding.TOPK:
        indices = largest(wanted.abs(), max(1, round(ratio * wanted.numel())))
        payload = np.concatenate(
            [indices.numpy().astype("<u4").view(np.uint8), wanted[indices].numpy().astype("<f4").view(np.uint8)]
        )
    else:
        bits = np.packbits((wanted > 0).numpy())
        above = int(np.bitwise_count(bits).sum())
        sums = np.array([float(wanted.clamp_max(0).sum()), float(wanted.clamp_min(0).sum())])
        means = sums / np.maximum([wanted.numel() - above, above], 1)
        payload = np.concatenate([means.astype("<f4").view(np.uint8), bits])
    return payload.data


def largest(magnitudes: Tensor, count: int) -> Tensor:
    """Where the largest elements are, in rising order.

    Among many elements those are selected that reach a bound which a sample gives (Lin et al., "Deep Gradient
    Compression", 2018); the result is that of a selection among all, but for which of equal elements it takes. Of
    the flat magnitudes one that is no number counts as the largest; the count is from 1 to all.
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


def rounded(values: Tensor, encoding: Encoding) -> Tensor:
    """Whole parameters as an encoding holds them; without compression themselves.

    In fp16 what is beyond its range becomes its largest number.
    """
    if encoding == Encoding.FP16:
        largest = torch.finfo(torch.float16).max
        values = values.clamp(-largest, largest)
    return values.to(_HALF.get(encoding, values.dtype))


def check_length(length: int, encoding: Encoding, numel: int, dtype: torch.dtype) -> None:
    """Refuse a payload whose size does not fit."""
    if encoding == Encoding.DENSE:
        fits = length == numel * dtype.itemsize
    elif encoding == Encoding.NOTHING:
        fits = length == 0
    elif encoding in _HALF:
        fits = length == 2 * numel
    elif encoding == Encoding.TOPK:
        fits = length % 8 == 0 and 0 < length <= 8 * numel
    else:
        fits = encoding == Encoding.ONEBIT and length == 8 + (numel + 7) // 8
    if not fits:
        raise InvalidMessageError("a payload of another size than its slice needs")


def decode(payload: memoryview, encoding: Encoding, numel: int, dtype: torch.dtype) -> Tensor:
    """The gradient in a payload, flat; it may lie on the payload's memory.

    :func:`check_length` accepts the length, and the encoding is not `NOTHING`.
    """
    if encoding == Encoding.DENSE:
        return from_bytes(payload, dtype)
    if encoding in _HALF:
        return from_bytes(payload, _HALF[encoding]).to(dtype)
    if encoding == Encoding.TOPK:
        count = len(payload) // 8
        indices = np.frombuffer(payload[: 4 * count], "<u4").astype(np.int64)
        if indices[-1] >= numel or (np.diff(indices) <= 0).any():
            raise InvalidMessageError("indices that are out of range or not in order")
        gradient = torch.zeros(numel, dtype=dtype)
        gradient[torch.from_numpy(indices)] = torch.from_numpy(np.frombuffer(payload[4 * count :], "<f4").copy()).to(
            dtype
        )
        return gradient
    # A byte stands for eight numbers: they are looked up, 30 times as fast as bit by bit.
    eights = np.frombuffer(payload[:8], "<f4")[BITS]
    return torch.from_numpy(eights.take(np.frombuffer(payload[8:], np.uint8), axis=0).reshape(-1)[:numel]).to(dtype)
