"""Images of 16 bits keep the bits that they use, in every data module that reads files, and when they are packed."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cnnstrategies import ConfigurationError
from cnnstrategies.data import ImageFolderDataModule, SegmentationFolderDataModule, ShardedImageDataModule
from cnnstrategies.data.decoding import BrokenImageError, bits_of, decode
from cnnstrategies.data.image_folder import images_of_folder
from cnnstrategies.data.shards.encoding import EncodingOptions
from cnnstrategies.data.shards.packing import pack
from tests.masked_images import write_masked_images

pytestmark = pytest.mark.light

RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)  # All values of 12 bits.
TOP = torch.from_numpy((RAMP >> 4).astype(np.uint8))  # Their highest 8 bits.


def write_classes(values, count=40):
    for part in ("train", "val"):
        for name in ("a", "b"):
            Path("images", part, name).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(values).save(f"images/{part}/{name}/{number}.png")


def folder(**options):
    data = ImageFolderDataModule(Path("images"), image_size=64, resize=64, augment=False, num_workers=0, **options)
    data.setup("fit")
    return data


def test_the_bits_of_a_camera_are_found_and_kept():
    write_classes(RAMP)
    Path("images/train/a/0.png").write_bytes(b"damaged")
    data = folder()
    assert data.bits == 12
    assert data.describe("train").endswith(", 12 of 16 bits used")
    assert data.val_source.fetch([3])[0][0, 0].equal(TOP)
    assert images_of_folder(data, Path("images/val")).fetch([3])[0][0, 0].equal(TOP)
    assert folder(bits=16).val_source.fetch([3])[0].max() == 15
    for bits in (7, 17):
        with pytest.raises(ConfigurationError, match=f"bits={bits}: use 8 to 16"):
            folder(bits=bits)


def test_a_pixel_with_more_bits_is_refused_by_its_file():
    write_classes(RAMP)
    Image.fromarray(RAMP * np.uint16(2)).save("images/val/b/9.png")
    data = folder()
    with pytest.raises(
        ConfigurationError, match=r"b/9.png: a pixel has the value 8190, .* bits=12, .* set bits to 14$"
    ):
        data.val_source.fetch([len(data.val_source) - 1])
    with pytest.raises(ConfigurationError, match=r"b/9.png: a pixel has the value 8190, .* set bits to 14$"):
        pack(Path("images"), Path("shards"), EncodingOptions(None, None, 10**6), workers=1)


def write_coloured(path, values):
    """Write values of the shape (H, W, 3) as a PNG with 16 bits per colour, which Pillow reads but does not write."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + parts)


def test_colours_of_16_bits_with_few_used_bits_are_refused():
    values = np.stack([RAMP] * 3, axis=-1)
    write_coloured("dark.png", values)
    with pytest.raises(
        ConfigurationError, match=r"dark.png has 16 bits per colour, .* below 4096: .* 16 levels; convert"
    ):
        bits_of([Path("dark.png")])
    write_coloured("bright.png", values * 16)
    assert bits_of([Path("dark.png"), Path("bright.png")]) is None
    assert decode(Path("bright.png"))[1].equal(TOP)


@pytest.mark.parametrize("quality", [None, 95])
def test_packed_images_have_the_bits_that_are_used(quality):
    write_classes(RAMP, count=2)
    pack(Path("images"), Path("shards"), EncodingOptions(None, quality, 10**6), workers=1)
    data = ShardedImageDataModule(Path("shards"), image_size=64, resize=64, num_workers=0)
    data.setup("fit")
    image = data.val_source.fetch([0])[0][0, 0]
    assert (image.int() - TOP.int()).abs().float().mean() <= (0 if quality is None else 2)


def test_images_with_masks_keep_their_bits():
    write_masked_images(Path("data/train"), count=4)
    for path in Path("data/train/images").iterdir():
        Image.fromarray(RAMP[:20, :24] >> 2).save(path)
    data = SegmentationFolderDataModule(Path("data"), 2, image_size=24, val_split=0.5, num_workers=0)
    data.setup("fit")
    assert data.bits == 10
    assert data.val_source.fetch([0])[0][0, 0, :20].equal(torch.from_numpy((RAMP[:20, :24] >> 4).astype(np.uint8)))


def test_numbers_of_bits_are_those_of_cameras_and_scanners():
    for largest, bits in ((0, 8), (255, 8), (256, 10), (1023, 10), (2000, 12), (4095, 12), (4096, 14), (65535, 16)):
        Image.fromarray(np.full((2, 2), largest, np.uint16)).save("image.png")
        assert bits_of([Path("image.png")]) == bits
        assert int(decode(Path("image.png"), bits).max()) == largest >> (bits - 8)
    Image.new("RGB", (2, 2)).save("image.png")
    assert bits_of([Path("image.png"), Path("missing.png")]) is None
    with pytest.raises(BrokenImageError):
        decode(Path("missing.png"), 12)
