"""Batches do not depend on the number of workers, and loading can resume in the middle of an epoch."""

import pytest
import torch
from torch import nn

from cnnstrategies import ConfigurationError
from cnnstrategies.data.loading import BatchDataset, BatchLoader, TensorSource
from cnnstrategies.shares.samplers import ShuffledBatches


class Noise(nn.Module):
    def forward(self, images):
        return images + torch.rand(images.shape)


def loader(workers=0):
    source = TensorSource(torch.arange(50.0).reshape(50, 1, 1, 1), torch.arange(50))
    sampler = ShuffledBatches(50, 8, seed=3, num_replicas=1, rank=0, drop_last=False)
    return BatchLoader(
        BatchDataset(source, Noise()),
        sampler=sampler,
        batch_size=None,
        generator=torch.Generator(),
        num_workers=workers,
        persistent_workers=workers > 0,
    )


IDENTITY = {"samples": 50, "samples_of_a_step": 8, "accumulated": 1, "seed": 3}


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for (images, targets), (other_images, other_targets) in zip(actual, expected, strict=True):
        assert torch.equal(images, other_images)
        assert torch.equal(targets, other_targets)


def test_augmentation_depends_only_on_the_epoch_and_not_on_workers():
    inside, workers = loader(), loader(workers=2)
    for number in range(2):
        for each in (inside, workers):
            each.sampler.set_epoch(number)
        torch.manual_seed(number)
        before = torch.get_rng_state()
        expected = list(inside)
        assert torch.equal(torch.get_rng_state(), before)
        assert_same(list(workers), expected)


def test_batches_keep_their_values_and_an_unfinished_epoch_has_no_effect():
    """Each worker has memory for three batches, and reuses it for later batches of the seven."""
    expected, workers = list(loader()), loader(workers=2)
    begun = iter(workers)
    first = [next(begun) for _ in range(3)]
    begun.close()
    for _ in range(2):
        assert_same(list(workers), expected)
    assert_same(first, expected[:3])
    kept = list(loader(workers=2))  # All batches are kept.
    assert_same(kept, expected)
    assert not any(tensor.is_shared() for batch in kept for tensor in batch)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loader_serves_the_rest_then_whole_epochs(workers):
    first = loader(workers)
    first.sampler.set_epoch(4)
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    state = first.state_dict()  # Workers have prefetched more batches than the loader has returned.
    assert state == {"epoch": 4, "served": 3, **IDENTITY}
    rest = list(iterator)

    resumed = loader(workers)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state, "saved again before the first batch"
    iterator = iter(resumed)  # Lightning calls iter before set_epoch when it resumes.
    resumed.sampler.set_epoch(4)
    assert len(resumed) == 7
    assert_same(list(iterator), rest)
    assert resumed.state_dict() == {"epoch": 4, "served": 7, **IDENTITY}
    resumed.sampler.set_epoch(5)
    assert len(list(resumed)) == 7


def test_a_state_within_an_epoch_of_other_batches_is_refused():
    for name in (*IDENTITY, "world"):
        resumed = loader()
        resumed.load_state_dict({"epoch": 4, "served": 3, **IDENTITY, name: 99})
        resumed.sampler.set_epoch(4)
        message = f"within epoch 4, after 3 batches, .*\\({name} was 99 and is {IDENTITY.get(name)}\\): restore"
        with pytest.raises(ConfigurationError, match=message):
            next(iter(resumed))
        resumed.load_state_dict({"epoch": 4, "served": 7, **IDENTITY, name: 99})
        resumed.sampler.set_epoch(5)
        assert len(list(resumed)) == 7, "at the end of an epoch the batches may change"


class Unreadable(TensorSource):
    def fetch(self, indices):
        if 17 in indices:
            raise ConfigurationError("sample 17 is broken: repair it")
        return super().fetch(indices)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_sample_is_named_without_a_traceback(workers):
    each = loader(workers)
    each.dataset.source.__class__ = Unreadable
    with pytest.raises(ConfigurationError, match=r"^sample 17 is broken: repair it$"):
        list(each)
