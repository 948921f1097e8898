"""Masks of every kind become the same classes; a mask that could be misread is refused by its name and values."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cnnstrategies import ConfigurationError
from cnnstrategies.data import SegmentationFolderDataModule
from tests.masked_images import write_masked_images

pytestmark = pytest.mark.light

CLASSES = np.random.default_rng(0).integers(3, size=(20, 24)).astype(np.uint8)
GREY = Image.fromarray(CLASSES)
WHITE = Image.fromarray(CLASSES % 2 * np.uint8(255))
EMPTY = Image.fromarray(CLASSES * 0)
COLOURS = [[0, 0, 0], [128, 0, 0], [0, 128, 64]]


def data_of(masks, num_classes=3, **options):
    """Write as many training images as there are masks, and an image with the first mask for validation."""
    shutil.rmtree("data", ignore_errors=True)
    write_masked_images(Path("data/train"), count=len(masks))
    write_masked_images(Path("data/val"), count=1)
    for number, mask in enumerate(masks):
        mask.save(f"data/train/masks/{number}.png")
    masks[0].save("data/val/masks/0.png")
    data = SegmentationFolderDataModule(Path("data"), num_classes, image_size=24, num_workers=0, **options)
    data.setup("fit")
    return data


def classes_of(data, index=0):
    """Return the classes of an image without the padding, from the data set of validation images."""
    return data.val_source.fetch([index])[1][0, :20]


def palette(classes, colours):
    image = Image.fromarray(classes, "P")
    image.putpalette(np.array(colours, np.uint8).tobytes())
    return image


KINDS = {
    "grey": (GREY, {}),
    "palette": (palette(CLASSES, COLOURS), {}),
    "palette in another order": (palette(2 - CLASSES, COLOURS[::-1]), {"mask_colours": COLOURS}),
    "grey in colours": (GREY.convert("RGB"), {}),
    "grey with opacity": (GREY.convert("LA"), {}),
    "16 bits": (Image.fromarray(CLASSES.astype(np.uint16)), {}),
    "colours": (palette(CLASSES, COLOURS).convert("RGB"), {"mask_colours": COLOURS}),
    "colours with opacity": (palette(CLASSES, COLOURS).convert("RGBA"), {"mask_colours": COLOURS}),
}


def test_masks_of_every_kind_have_the_same_classes():
    for kind, (mask, options) in KINDS.items():
        data = data_of([mask], **options)
        assert classes_of(data).equal(torch.from_numpy(CLASSES).long()), kind
        assert data.describe("train") == "1 in data/train", kind


def test_white_is_the_second_of_two_classes():
    for mask in (WHITE, Image.fromarray(CLASSES % 2 == 1)):
        data = data_of([mask, EMPTY], num_classes=2)
        assert classes_of(data).equal(torch.from_numpy(CLASSES % 2).long())
        assert (data.val_source.fetch([0])[1][0, 20:] == 255).all(), "the padding is ignored"
        assert data.describe("train").endswith(", masks with 255 for class 1") == (mask is WHITE)
    # However many masks have only the first class, the others show that white is the second.
    assert data_of([EMPTY] * 33 + [WHITE] + [EMPTY] * 36, num_classes=2).masks.white_is_one
    assert not data_of([EMPTY], num_classes=2).masks.white_is_one
    # Masks with the number of the second class show that white pixels are ignored.
    data = data_of([WHITE, Image.fromarray(CLASSES % 2)], num_classes=2)
    assert {*classes_of(data).unique().tolist()} == {0, 255}


def test_sixteen_bits_hold_more_classes_than_a_byte():
    data = data_of([Image.fromarray(CLASSES.astype(np.uint16) * 150)], num_classes=301, ignore_index=65535)
    assert classes_of(data).equal(torch.from_numpy(CLASSES).long() * 150)
    (_, masks) = data.train_source.fetch([0])
    assert {*masks.unique().tolist()} <= {0, 150, 300}


def test_ignored_pixels_may_have_a_colour():
    mask = palette(CLASSES, COLOURS).convert("RGB")
    data = data_of([mask], num_classes=2, mask_colours=COLOURS)
    assert classes_of(data).equal(torch.from_numpy(np.where(CLASSES == 2, 255, CLASSES)).long())


MISTAKES = {
    "white with three classes": (
        [WHITE],
        {},
        r"masks such as data/train/masks/0.png have only the values 0 and 255, but",
    ),
    "large value": (
        [Image.fromarray(CLASSES.astype(np.uint16) * 300)],
        {},
        "0.png has the class 600, but num_classes=3 allows only 0 to 2: raise",
    ),
    "negative value": (
        [Image.fromarray(CLASSES.astype(np.int32) - 1)],
        {},
        "0.png has the class -1, but num_classes=3",
    ),
    "colours": (
        [palette(CLASSES, COLOURS).convert("RGB")],
        {},
        r"0.png has colours \(\[0, 0, 0\], \[0, 128, 64\], \[128, 0, 0\]\): set data.init_args.mask_colours",
    ),
    "another colour": (
        [palette(CLASSES, COLOURS).convert("RGB")],
        {"mask_colours": [*COLOURS[:2], [9, 9, 9]]},
        r"0.png has colours that are not in data.init_args.mask_colours: \[0, 128, 64\]; add them",
    ),
    "too few colours": (
        [GREY],
        {"mask_colours": COLOURS[:2]},
        "mask_colours has 2 colours, and num_classes=3: set one",
    ),
    "a colour twice": (
        [GREY],
        {"mask_colours": [*COLOURS[:2], COLOURS[0]]},
        r"the colour \[0, 0, 0\], which occurs twice",
    ),
    "no colour": (
        [GREY],
        {"mask_colours": [*COLOURS[:2], [0, 0, 256]]},
        r"colour \[0, 0, 256\], which occurs twice or is",
    ),
    "fractions": ([Image.new("CMYK", (24, 20))], {}, "0.png has the mode CMYK: save it with 8 or 16 bits per pixel"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mask_that_could_be_misread_is_refused_before_the_run(mistake, monkeypatch):
    masks, options, message = MISTAKES[mistake]
    # A PNG file cannot have all of these modes, so the files are TIFF files with the name of a PNG file.
    save = Image.Image.save
    monkeypatch.setattr(Image.Image, "save", lambda image, file: save(image, file, "TIFF"))
    with pytest.raises(ConfigurationError, match=message):
        data_of(masks, **options)


def test_a_late_mask_with_another_value_is_refused_when_it_is_read():
    data = data_of([WHITE] * 40, num_classes=2)
    path = data.train_source.pairs[1][1]
    Image.fromarray(CLASSES % 2).save(path)
    with pytest.raises(ConfigurationError, match=r"has the value 1, but other masks have only 0 and 255: write the"):
        data.train_source.fetch([1])
