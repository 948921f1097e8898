"""Every kind of image becomes uint8 RGB; every kind of damage becomes an error."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cnnstrategies.data.decoding import BrokenImageError, TooLargeImageError, decode

pytestmark = pytest.mark.light

PIXELS = np.random.default_rng(0).integers(256, size=(40, 50, 3), dtype=np.uint8)


def encoded(kind, mode="RGB", **options):
    data = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(data, kind, **options)
    return data.getvalue()


def damaged(data):
    middle = len(data) // 2
    return data[:middle] + bytes(40) + data[middle + 40 :]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_png_of_every_mode_becomes_colour(mode):
    Path("image.png").write_bytes(encoded("PNG", mode))
    image = decode(Path("image.png"))
    assert image.shape == (3, 40, 50)
    assert image.dtype == torch.uint8
    expected = torch.from_numpy(np.array(Image.fromarray(PIXELS).convert(mode).convert("RGB")))
    assert torch.equal(image, expected.permute(2, 0, 1))


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("JPEG", "RGB", {"progressive": True}),
        ("WEBP", "RGB", {"quality": 95}),
        ("WEBP", "RGBA", {"quality": 95}),
    ],
)
def test_jpeg_and_webp_become_colour(kind, mode, options):
    smooth = Image.fromarray(PIXELS[:4, :5]).resize((50, 40), Image.Resampling.BICUBIC)
    smooth.convert(mode).save("image", kind, **options)
    image = decode(Path("image"))
    assert image.shape == (3, 40, 50)
    assert image.dtype == torch.uint8
    expected = np.array(smooth.convert(mode).convert("RGB")).transpose(2, 0, 1)
    assert np.abs(image.numpy().astype(int) - expected).mean() < 8  # The loss of the compression.


def test_sixteen_bits_are_scaled_and_not_clipped():
    values = np.linspace(0, 65535, 2000).astype(np.uint16).reshape(40, 50)
    Image.fromarray(values).save("image.png")
    image = decode(Path("image.png"))
    assert torch.equal(image[0], torch.from_numpy((values >> 8).astype(np.uint8)))


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_without_a_known_range_are_refused(kind):
    Image.fromarray(np.full((4, 5), 1000, dtype=kind)).save("image.tif")
    with pytest.raises(BrokenImageError, match=r"pixels of 32 bits .* give it 8 or 16$"):
        decode(Path("image.tif"))


@pytest.mark.parametrize("size", [(1500, 1000), (2000, 1500)], ids=["that Pillow warns of", "that it refuses"])
def test_an_image_of_too_many_pixels_is_not_called_damaged(monkeypatch, size):
    Image.new("1", size).save("image.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)
    with pytest.raises(TooLargeImageError, match=r"^it has [23] megapixels, and 1 are the most \(PIL.Image"):
        decode(Path("image.png"))


@pytest.mark.parametrize("name", ["image.jpg", "image.png"])
def test_exif_orientation_is_applied(name):
    exif = Image.Exif()
    exif[0x0112] = 6  # Turn by 90 degrees.
    Image.fromarray(PIXELS).save(name, exif=exif)
    assert decode(Path(name)).shape == (3, 50, 40)


# In torchvision's decoder the damaged PNG is a segmentation fault.
BROKEN = {
    "empty": (b"", "cannot identify image file"),
    "text": (b"<html>not found</html>", "cannot identify image file"),
    "half a JPEG": (encoded("JPEG")[:900], "truncated"),
    "half a PNG": (encoded("PNG")[:3000], "truncated"),
    "half a WebP": (encoded("WEBP")[:900], "decoder"),
    "damaged PNG": (damaged(encoded("PNG")), "broken data stream"),
    "only a JPEG's first bytes": (encoded("JPEG")[:3], "cannot identify"),
    "only a PNG's first bytes": (encoded("PNG")[:8], "cannot identify"),
}


@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_damage_is_an_error_of_one_line(data, message):
    Path("image.jpg").write_bytes(data)
    with pytest.raises(BrokenImageError, match=message) as caught:
        decode(Path("image.jpg"))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_an_error():
    with pytest.raises(BrokenImageError, match="No such file"):
        decode(Path("nowhere.jpg"))
