"""Augmentations draw for each image of a batch."""

import torch

from cnnstrategies.data.augment import RandomFlip, RandomShift


def test_shift_is_a_crop_of_the_padded_image_drawn_for_each():
    torch.manual_seed(0)
    images = torch.randint(1, 255, (64, 3, 6, 5), dtype=torch.uint8)
    shifted = RandomShift(2)(images)
    assert shifted.shape == images.shape
    assert shifted.dtype == torch.uint8
    padded = torch.nn.functional.pad(images, [2, 2, 2, 2])
    found = set()
    for number in range(64):
        crops = {
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.equal(shifted[number], padded[number, :, y : y + 6, x : x + 5])
        }
        assert len(crops) == 1
        found |= crops
    assert len(found) > 15


def test_flip_mirrors_about_half_of_the_images():
    torch.manual_seed(0)
    images = torch.rand(200, 1, 4, 4)
    flipped = RandomFlip()(images)
    mirrored = sum(torch.equal(flipped[n], images[n].flip(-1)) for n in range(200))
    kept = sum(torch.equal(flipped[n], images[n]) for n in range(200))
    assert mirrored + kept == 200
    assert 70 < mirrored < 130
