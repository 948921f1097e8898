"""A tensor whose rows are on different ranks: every program gives what it gives with all rows on one device."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cnnstrategies.placed import ForeignTensor, Places, RefusedError
from cnnstrategies.placed.partial import PartialTensor, joined_rows
from cnnstrategies.shares.dealing import turns
from tests.placed.turns import on_ranks

COUNTS = (3, 0, 4)  # Rows of ranks 0 to 2. Rank 3 has none, because it is not in the place.
PLACE = (0, 1, 2)
MEAN = torch.tensor([0.1, 0.2], dtype=torch.float64).view(2, 1, 1)


def images() -> Tensor:
    return torch.randn(7, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def partial(places: Places, whole: Tensor, counts: tuple[int, ...] = COUNTS) -> Tensor:
    if places.rank not in PLACE:
        return places.foreign_like(whole, PLACE, "images")
    rows = whole[turns(counts)[places.rank]].clone()
    return PartialTensor.of_rows(places, rows, counts, PLACE, whole.stride(), "images")


def changed(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return a program that changes a tensor in place, and returns the tensor."""

    def program(x: Tensor) -> Any:
        change(x)
        return x

    return program


def put_data(x: Tensor) -> None:
    x.data = torch.ones_like(x) * 3


def gradient(x: Tensor) -> Any:
    x.requires_grad_()
    loss = ((x * 2).sin() * x).sum()
    loss.backward()
    return x.grad, x.detach() + x.grad.sign()


def view_and_write(x: Tensor) -> Any:
    first = x[0]
    first.zero_()
    x.add_(1)
    return x.sum(), first


BY_ROW: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda x: x.float(),
    "clone": lambda x: x.clone(),
    "normalised": lambda x: (x - MEAN) / (2 * MEAN[None]),
    "pointwise": lambda x: (x.exp().clamp(0.5, 2), -x + x, x > 0, torch.where(x > 0, x, 0.0)),
    "format": lambda x: x.contiguous(memory_format=torch.channels_last) * 2,
}
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda x: x.mean(),
    "rows": lambda x: (x[1], x[2:5, 0], x[torch.tensor([4, 0])], list(x)[6]),
    "noise": lambda x: x + torch.randn_like(x),
    "one for each sample": lambda x: x * torch.arange(7).view(7, 1, 1, 1),
    "another number of dimensions": lambda x: x + torch.ones(1, 7, 1, 1, 1),
    "joined": lambda x: (torch.cat([x, x.flip(-1)]), torch.stack([x, x])),
    "view": lambda x: x.view(7, -1).T,
    "in place": changed(lambda x: x.mul_(2)),
    "out": lambda x: torch.mul(torch.ones(7, 2, 4, 4, dtype=torch.float64), 2, out=x),
    "same object": lambda x: (x.mul_(2) is x, torch.mul(torch.ones_like(x), 2, out=x) is x),
    "view in place": view_and_write,
    "reshaped": changed(lambda x: x.unsqueeze_(1)),
    "data": changed(put_data),
    "values": lambda x: (x.tolist(), np.asarray(x).sum(), x[0, 0, 0, 0].item(), x.max() > 1),
    "copies": lambda x: (copy.deepcopy({"x": x})["x"], copy.copy(x)),
    "foreach": lambda x: torch.nn.utils.get_total_norm([x, x]),
}


SEVERAL: dict[str, Callable[[Tensor], Any]] = {
    "mixed": lambda x: 0.3 * x + 0.7 * x[torch.randperm(7)],
    "gradient": gradient,
}


def check(programs: dict[str, Callable[[Tensor], Any]], exchanges: int | None) -> None:
    """Check that each program gives the same results as on one device.

    Args:
        programs: The programs by name.
        exchanges: Number of times that the ranks may send each other rows; None for any number.
    """
    with torch.random.fork_rng(devices=[]):
        expected = {name: (program(images()), torch.rand(())) for name, program in programs.items()}

    def on_rank(places: Places) -> None:
        for name, program in programs.items():
            before = places.messages.counts["rows"]
            actual = program(partial(places, images()))
            if exchanges is not None:
                sent = 2 * exchanges if places.rank in PLACE else 0
                assert places.messages.counts["rows"] - before == sent, name
            results, after = expected[name]
            for left, right in zip(tree_leaves(actual), tree_leaves(results), strict=True):
                if not isinstance(right, Tensor):
                    assert left == right, name
                    continue
                assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype), name
                assert isinstance(left, PartialTensor) or isinstance(left, ForeignTensor) == (places.rank not in PLACE)
                assert torch.equal(places.everywhere(left.detach()), right.detach()), name
            assert torch.equal(torch.rand(()), after), name

    on_ranks(4, on_rank)


def test_operations_on_single_rows_need_no_messages() -> None:
    check(BY_ROW, exchanges=0)


def test_other_operations_bring_all_rows_once() -> None:
    check(OTHERS, exchanges=1)


def test_programs_may_use_all_rows_of_several_tensors() -> None:
    check(SEVERAL, exchanges=None)


def test_an_operation_with_rows_of_two_divisions_brings_all_rows() -> None:
    def on_rank(places: Places) -> None:
        x, y = partial(places, images()), partial(places, images(), (1, 5, 1))
        assert torch.equal(places.everywhere(x + y), 2 * images())

    on_ranks(4, on_rank)


READS: list[Callable[[Any], Any]] = [
    lambda x: x.mean(),
    lambda x: x.tolist(),
    lambda x: x.untyped_storage(),
    lambda x: x.data_ptr(),
    copy.deepcopy,
]


def test_code_that_other_ranks_do_not_run_gets_an_error_in_place_of_missing_rows() -> None:
    def on_rank(places: Places) -> None:
        x = partial(places, images())
        with places.local():
            assert isinstance(x.exp(), ForeignTensor)
            for read in READS if places.rank in PLACE else ():
                with pytest.raises(RefusedError, match=r"images.*size=\(7, 2, 4, 4\)"):
                    read(x)
        assert repr(x) == "tensor(images, size=(7, 2, 4, 4), dtype=torch.float64, on ranks [0, 1, 2])"
        x.mean()
        if places.rank in PLACE:
            with places.local():
                assert torch.equal(x.sum(), images().sum())

    on_ranks(4, on_rank)


@pytest.mark.parametrize("counts", [(2, 2), (5, 2), (1, 6), (0, 3), (4, 1, 2)])
def test_rows_are_joined_in_turn(counts: tuple[int, ...]) -> None:
    whole = torch.randn(sum(counts), 2, 3, 3).contiguous(memory_format=torch.channels_last)
    parts = [whole[positions] for positions in turns(counts)]
    joined = joined_rows(whole, parts, counts)
    assert torch.equal(joined, whole)
    assert joined.stride() == whole.stride()
