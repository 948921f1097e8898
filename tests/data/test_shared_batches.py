"""Batches that workers hand over in memory that is taken again are those that torch would hand over."""

import contextlib
import multiprocessing
import os
import pickle
import resource
import time

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn

from cnnstrategies.data import shared_batches
from cnnstrategies.data.loading import BatchDataset, BatchLoader, TensorSource
from cnnstrategies.data.sampling import OrderedBatches
from cnnstrategies.data.shared_batches import FREE, LENT, UNDER_WAY, SharedBatches


def a_batch(number=0, size=4):
    images = torch.full((size, 5, 7, 3), number, dtype=torch.uint8)
    images[0].flatten()[:50] = torch.arange(50)
    return images.permute(0, 3, 1, 2), torch.arange(size) + number


def received(lent):
    """What comes out of the loader's queue."""
    return pickle.loads(pickle.dumps(lent))


def descriptors():
    """Those by which this process has memory of batches."""
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # The directory's own.
            if "memfd:batches" in os.readlink(entry):
                found.add(entry.name)
    return found


def until(holds):
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def assert_same(actual, expected):
    assert type(actual) is list
    for tensor, other in zip(actual, expected, strict=True):
        assert torch.equal(tensor, other)
        assert (tensor.dtype, tensor.stride()) == (other.dtype, other.stride())


BATCHES = (
    a_batch(),
    (torch.rand(3, 3, 5, 7), torch.randint(0, 9, (3, 5, 7), dtype=torch.uint8)),
    (torch.rand(3, 1, 1, 5).bfloat16(), torch.tensor(7), torch.tensor([True, False, True])),
    (torch.empty(0, 3, 2, 2), torch.empty(0, dtype=torch.int64)),
)
LEFT_TO_TORCH = (
    torch.zeros(4, 6)[:, ::2],
    torch.zeros(1, 6).expand(4, 6),
    torch.zeros(4, 6, requires_grad=True),
    nn.Parameter(torch.zeros(4, 6)),
    torch.zeros(4, 6).to_sparse(),
    torch.zeros(4, 6, device="meta"),
)


@pytest.mark.light
def test_a_batch_keeps_its_values_types_and_layout():
    shared = SharedBatches(1, 2)
    for batch in BATCHES:
        before = torch.rand(3).bfloat16(), *batch  # What follows does not begin where this ends.
        after = received(shared.lend(before, 0))
        assert_same(after, before)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in after)
    del after
    for images in LEFT_TO_TORCH:
        assert shared.lend((images, torch.arange(4)), 0) is None, "not dense and plain"
    assert shared.states == [FREE, FREE]


@pytest.mark.light
@pytest.mark.parametrize(
    "keep",
    [lambda batch: batch, lambda batch: batch[1][1:], lambda batch: batch[0][0, 2],
     lambda batch: batch[0].view(torch.int8), lambda batch: batch[0].numpy()[1:]],
)  # fmt: skip
def test_memory_is_reused_when_a_batchs_last_view_is_gone(keep):
    shared = SharedBatches(2, 3)
    lent = shared.lend(a_batch(1), 1)
    assert (lent.number, shared.states) == (3, [FREE] * 3 + [UNDER_WAY, FREE, FREE])
    batch = received(lent)
    kept, expected = keep(batch), keep(a_batch(1))
    address = batch[0].data_ptr()
    del batch
    for number in range(9):
        other = received(shared.lend(a_batch(number + 2, size=4 + number), 1))
        assert_same(other, a_batch(number + 2, size=4 + number))
        assert shared.states == [FREE] * 3 + [LENT, LENT, FREE]
        del other
    assert all(bool((one == two).all()) for one, two in zip(kept, expected, strict=True)), "kept while others came"
    del kept
    assert shared.states == [FREE] * 6
    again = shared.lend(a_batch(4), 1)
    assert again.number == 3
    assert received(again)[0].data_ptr() == address, "the same pages"


@pytest.mark.light
def test_a_batch_outlives_its_loader_and_unfinished_ones_do_not():
    before = descriptors()
    shared = SharedBatches(1, 2)
    kept, under_way = received(shared.lend(a_batch(1), 0)), shared.lend(a_batch(2), 0)
    assert len(descriptors() - before) == 3, "of all memory, and of each batch"
    del shared
    assert len(descriptors() - before) == 1, "of the batch that is kept"
    assert_same(kept, a_batch(1))
    assert received(under_way) is None
    del kept
    assert descriptors() <= before


@pytest.mark.light
def test_a_fork_that_drops_its_copy_of_a_batch_frees_nothing(monkeypatch):
    shared = SharedBatches(1, 1)
    batch = received(shared.lend(a_batch(1), 0))
    monkeypatch.setattr(os, "getpid", lambda: 0)
    del batch
    assert shared.states == [LENT]


@pytest.mark.light
def test_only_workers_that_are_forked_have_it(monkeypatch):
    def made(workers, method):
        return shared_batches.shared_batches(workers, 4, method and multiprocessing.get_context(method))

    assert made(0, "fork") is None
    assert made(2, "spawn") is None
    assert made(2, "forkserver") is None
    assert len(made(2, "fork").states) == 8
    assert (made(2, None) is None) == (multiprocessing.get_start_method() != "fork")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (31, 31))
    assert made(2, "fork") is None, "too few descriptors"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (-1, -1))
    assert made(2, "fork") is not None, "any number of them"


@pytest.mark.light
def test_two_iterators_have_own_memory_and_workers_the_same():
    once, persistent = loader(2), loader(2, persistent=True)
    assert once.memory_of_workers() is not once.memory_of_workers()
    assert persistent.memory_of_workers() is persistent.memory_of_workers()
    assert loader(0).memory_of_workers() is None


def loader(workers, persistent=False, give_indices=False):
    """Eleven batches of 16 images and masks, of which the last is smaller."""
    pixels = torch.arange(43 * 16)
    source = TensorSource((pixels.reshape(43, 2, 2, 4) % 251).byte().permute(0, 3, 1, 2), pixels.reshape(43, 4, 4))
    return BatchLoader(
        BatchDataset(source, nn.Identity(), give_indices),
        sampler=OrderedBatches(43, 4, num_replicas=1, rank=0),
        batch_size=None,
        generator=torch.Generator(),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        persistent_workers=persistent,
    )


def by_torch(batch):
    return [tensor.is_shared() for tensor in batch]


def test_workers_give_the_same_batches_kept_or_not():
    before = descriptors()
    kept = list(loader(2))
    assert list(map(by_torch, kept)) == [[False] * 2] * 8 + [[True] * 2] * 3, "4 of each worker, then torch's way"
    for batch, expected in zip(loader(2, give_indices=True), loader(0, give_indices=True), strict=True):
        assert by_torch(batch) == [False] * 2, "what is dropped is taken again"
        assert_same(batch, expected)
    for batch, expected in zip(kept, loader(0), strict=True):
        assert_same(batch, expected)
    del kept, batch
    assert descriptors() <= before, "it goes with its workers"


def test_epochs_that_are_not_finished_leave_nothing_taken():
    each = loader(2, persistent=True)
    memory = each.memory_of_workers()
    for end_workers in (False, True):
        batches = iter(each)
        first = next(batches)
        for _ in range(2):
            next(batches)
        # The first, that which the iterator gave last, and four for which the workers were asked in advance.
        until(lambda: memory.states.count(FREE) == 2)
        assert UNDER_WAY in memory.states
        batches.close()
        if end_workers:  # As Lightning does it after an error.
            CombinedLoader(each).reset()
        assert [indices for _, targets in each for indices in targets[:, 0, 0].tolist()] == list(range(0, 43 * 16, 16))
        assert first[1][0, 0].tolist() == [0, 1, 2, 3]
        assert sorted(memory.states) == [FREE] * 7 + [LENT]
