"""The rows of microbatches: those that the replica's loader loads, and all rows once."""

import warnings

import pytest
import torch

from cnnstrategies.pipeline.batch_rows import BatchRows
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.shares.dealing import deal, turns

pytestmark = pytest.mark.light


@pytest.mark.parametrize("samples", [1, 2, 5, 16, 23])
@pytest.mark.parametrize("shares", [(), (3, 1, 1), (1, 2.5, 1)])
@pytest.mark.parametrize("usual", [0, 20])
def test_each_microbatch_has_rows_that_its_replica_loads(samples: int, shares: tuple[float, ...], usual: int) -> None:
    placement = Placement((2, 1), microbatches=6, shares=shares)
    rows = BatchRows.of(samples, placement, 6, usual)
    loaded = turns(deal(samples, placement.loads))
    whole = torch.arange(samples)
    of_microbatches = [
        rows.of_microbatch(whole, microbatch).tolist() for microbatch in range(6) if rows.sizes[microbatch]
    ]
    runs = [replica for replica, size in zip(placement.runs[0], rows.sizes, strict=True) if size]
    for replica in range(2):
        rows_of = [row for part, run in zip(of_microbatches, runs, strict=True) for row in part if run == replica]
        assert rows_of == loaded[replica]
    assert [len(part) for part in of_microbatches] == [size for size in rows.sizes if size]
    joined = torch.cat([torch.tensor(part) for part in of_microbatches])
    assert torch.equal(rows.in_order(joined), whole)
    assert rows.sizes[0] > 0


def test_a_tensor_may_have_several_rows_for_each_sample_and_keeps_its_memory_format() -> None:
    rows = BatchRows.of(7, Placement((2, 1), microbatches=4), 4)
    order = [row for microbatch in range(4) for row in rows.of_microbatch(torch.arange(7), microbatch).tolist()]
    pairs = torch.arange(14).view(7, 2)
    parts = [rows.of_microbatch(pairs.flatten(), microbatch) for microbatch in range(4)]
    assert torch.equal(torch.cat(parts), pairs[order].flatten())
    assert torch.equal(rows.in_order(torch.cat(parts)), pairs.flatten())
    images = torch.randn(7, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    part = rows.of_microbatch(images, 1)
    assert part.is_contiguous(memory_format=torch.channels_last)
    assert not part.is_contiguous()
    assert rows.in_order(images).is_contiguous(memory_format=torch.channels_last)


def test_a_network_that_changes_copies_of_its_images_gets_a_warning() -> None:
    rows, images = BatchRows.of(7, Placement((2, 1), microbatches=4), 4), torch.ones(7, 2)
    part = rows.of_image(images, 1).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rows.warn_of_changes([images], [part])
    part.mul_(2)
    with pytest.warns(UserWarning, match="forward changes its images in place"):
        rows.warn_of_changes([images], [part])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BatchRows.of(7, Placement((1, 2), microbatches=4), 4).warn_of_changes([images], [part])  # A view.


@pytest.mark.parametrize(("replicas", "parts"), [((1, 2), 4), ((2, 1), 1), ((2, 1), 3)])
def test_microbatches_have_consecutive_rows_with_one_replica_or_fewer_microbatches(
    replicas: tuple[int, int], parts: int
) -> None:
    rows = BatchRows.of(10, Placement(replicas, microbatches=4), parts)
    whole = torch.arange(10)
    joined = torch.cat([rows.of_microbatch(whole, microbatch) for microbatch in range(parts)])
    assert torch.equal(joined, whole)
    assert rows.in_order(whole) is whole
    assert sum(rows.sizes) == 10
