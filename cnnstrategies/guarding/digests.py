"""Checksums of the bits of tensors, computed on the tensors' devices.

Two tensors of the same shape have different checksums if they differ in one element. The checksum is a sum of the
elements' bits with odd factors modulo 2**64, so its value does not depend on the order of the additions.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

WIDTH = 1 << 12  # Number of factors. Further elements use the same factors again.
SMALL = 1 << 14  # Largest number of elements of tensors whose checksums are computed together, with few operations.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(1 << 62), 1 << 62, (WIDTH,), generator=generator) * 2 + 1
    return factors.to(device)


def _bits(value: Tensor) -> Tensor:
    """Return the elements of a tensor as integers (elements)."""
    flat = (torch.view_as_real(value) if value.is_complex() else value).contiguous().view(-1)
    return flat.view(_INTEGERS[flat.itemsize])


def _large(bits: Tensor) -> Tensor:
    if bits.itemsize == 4 and bits.storage_offset() % 2 == 0 and bits.numel() % 2 == 0:
        bits = bits.view(torch.int64)  # Pairs of elements, which need no conversion.
    rows = bits.numel() // WIDTH
    factors, rest = _factors(bits.device), bits[rows * WIDTH :]
    columns = bits[: rows * WIDTH].view(rows, WIDTH).sum(0, dtype=torch.int64)
    columns[: rest.numel()] += rest
    return (columns * factors).sum()


def _small(bits: Sequence[Tensor]) -> Tensor:
    """Return the checksums (tensors) of small tensors of the same dtype on the same device."""
    lengths = [part.numel() for part in bits]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(bits[0].device) % WIDTH
    products = torch.cat(list(bits)) * _factors(bits[0].device)[positions]
    ends = torch.tensor(lengths).cumsum(0).to(bits[0].device)
    sums = torch.nn.functional.pad(products.cumsum(0), (1, 0))[ends]
    return sums.diff(prepend=sums.new_zeros(1))


@torch.no_grad()
def digests(values: Sequence[Tensor]) -> Tensor:
    """Return the checksums of tensors (tensors) in int64, on the CPU.

    Args:
        values: Dense tensors of any dtype.
    """
    result = torch.zeros(len(values), dtype=torch.int64)
    together: dict[tuple[torch.device, int], list[int]] = {}
    alone: list[int] = []
    bits = [_bits(value.detach()) for value in values]
    for index, part in enumerate(bits):
        if part.numel() > SMALL:
            alone.append(index)
        else:
            together.setdefault((part.device, part.itemsize), []).append(index)
    computed = [(indices, _small([bits[index] for index in indices])) for indices in together.values()]
    computed += [([index], _large(bits[index])[None]) for index in alone]
    for indices, sums in computed:
        result[indices] = sums.cpu()
    return result


@torch.no_grad()
def sample_digest(value: Tensor) -> Tensor:
    """Return the checksum of elements that lie evenly in a tensor, as a scalar on the tensor's device."""
    flat = value.detach().reshape(-1)
    bits = _bits(flat[:: max(1, flat.numel() // WIDTH)][:WIDTH])
    return (bits * _factors(bits.device)[: bits.numel()]).sum()
