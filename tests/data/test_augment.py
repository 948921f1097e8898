"""Augmentations draw new random numbers for each image of a batch."""

import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from cnnstrategies import ConfigurationError
from cnnstrategies.data.augment import RandomFlip, RandomShift, each_image, to_normalised

pytestmark = pytest.mark.light


def test_a_shift_is_a_random_crop_of_each_padded_image():
    torch.manual_seed(0)
    images = torch.randint(1, 255, (64, 3, 6, 5), dtype=torch.uint8)
    shifted = RandomShift(2)(images)
    assert shifted.shape == images.shape
    assert shifted.dtype == torch.uint8
    padded = torch.nn.functional.pad(images, [2, 2, 2, 2])
    offsets = set()
    for number in range(64):
        crops = {
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.equal(shifted[number], padded[number, :, y : y + 6, x : x + 5])
        }
        assert len(crops) == 1
        offsets |= crops
    assert len(offsets) > 15


def test_flip_mirrors_about_half_of_the_images():
    torch.manual_seed(0)
    images = torch.rand(200, 1, 4, 4)
    flipped = RandomFlip()(images)
    mirrored = sum(torch.equal(flipped[n], images[n].flip(-1)) for n in range(200))
    kept = sum(torch.equal(flipped[n], images[n]) for n in range(200))
    assert mirrored + kept == 200
    assert 70 < mirrored < 130


def test_normalising_does_not_change_its_argument():
    images = torch.randint(256, (5, 3, 4, 4), dtype=torch.uint8)
    before = images.clone()
    normalised = to_normalised([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])(images)
    assert torch.equal(images, before)
    assert normalised.dtype == torch.float32
    expected = (before[:, 1] / 255 - 0.2) / 0.5
    assert torch.allclose(normalised[:, 1], expected, atol=1e-6)


def test_the_users_transforms_draw_for_each_image_and_are_checked_first():
    torch.manual_seed(0)
    further = each_image([v2.RandAugment(), v2.RandomErasing(p=1.0, value=7)], (3, 8, 8))
    images = torch.full((16, 3, 8, 8), 100, dtype=torch.uint8)
    changed = nn.Sequential(*further)(images)
    assert changed.shape == images.shape
    assert changed.dtype == torch.uint8
    assert len({tuple((image == 7).nonzero()[0].tolist()) for image in changed}) > 4
    assert each_image(None, (3, 8, 8)) == []
    with pytest.raises(ConfigurationError, match=r"transforms \(Resize\) turns .* into torch.uint8 \(3, 4, 4\)"):
        each_image([v2.Resize(4)], (3, 8, 8))
    with pytest.raises(ConfigurationError, match=r"\(RandAugment, RandomCrop\) fails for a uint8 image of shape"):
        each_image([v2.RandAugment(), v2.RandomCrop(9)], (3, 8, 8))
