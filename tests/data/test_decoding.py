"""Every type of image file becomes uint8 RGB; every type of damage becomes an error."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cnnstrategies.data.decoding import BrokenImageError, decode

pytestmark = pytest.mark.light

PIXELS = np.random.default_rng(0).integers(256, size=(40, 50, 3), dtype=np.uint8)


def encoded(kind, mode="RGB", **options):
    data = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(data, kind, **options)
    return data.getvalue()


def damaged(data):
    middle = len(data) // 2
    return data[:middle] + bytes(40) + data[middle + 40 :]


def test_every_file_type_and_mode_becomes_rgb():
    smooth = Image.fromarray(PIXELS[:4, :5]).resize((50, 40), Image.Resampling.BICUBIC)
    exact = [("PNG", mode, {}) for mode in ("RGB", "RGBA", "L", "LA", "P", "1")]
    kinds = [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("WEBP", "RGB"), ("WEBP", "RGBA")]
    lossy = [(*kind, {"quality": 95, "progressive": progressive}) for kind in kinds for progressive in (False, True)]
    for kind, mode, options in exact + lossy:
        smooth.convert(mode).save("image", kind, **options)
        image = decode(Path("image"))
        assert (image.shape, image.dtype) == ((3, 40, 50), torch.uint8), (kind, mode)
        expected = np.array(smooth.convert(mode).convert("RGB")).transpose(2, 0, 1)
        assert np.abs(image.numpy().astype(int) - expected).mean() <= (8 if options else 0), (kind, mode)


def test_sixteen_bits_are_scaled_and_not_clipped():
    values = np.linspace(0, 65535, 2000).astype(np.uint16).reshape(40, 50)
    Image.fromarray(values).save("image.png")
    image = decode(Path("image.png"))
    assert torch.equal(image[0], torch.from_numpy((values >> 8).astype(np.uint8)))


def test_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # The orientation is turned by 90 degrees.
    for name in ("image.jpg", "image.png"):
        Image.fromarray(PIXELS).save(name, exif=exif)
        assert decode(Path(name)).shape == (3, 50, 40)


# torchvision's decoder crashes on the damaged PNG (segmentation fault). Pillow warns about the first image with too
# many pixels, and refuses the second one.
BROKEN = {
    "cannot identify image file": [b"", b"<html>not found</html>", encoded("JPEG")[:3], encoded("PNG")[:8]],
    "truncated": [encoded("JPEG")[:900], encoded("PNG")[:3000]],
    "decoder": [encoded("WEBP")[:900]],
    "broken data stream": [damaged(encoded("PNG"))],
    r"pixels have 32 bits .* convert them to 8 or 16 bits$": [Image.new("I", (5, 4)), Image.new("F", (5, 4))],
    "^the image has 2 megapixels.* is the limit .PIL.Image.MAX_IMAGE": [Image.new("1", (1500, 1000))],
    "^the image has too many pixels: 1 megapixels.* is the limit .PIL.Image.MAX_IMAGE": [Image.new("1", (2000, 1500))],
}


def test_damage_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)
    file = Path("image.tif")
    for message, files in BROKEN.items():
        for data in files:
            if isinstance(data, Image.Image):
                data.save(file)
            else:
                file.write_bytes(data)
            with pytest.raises(BrokenImageError, match=message) as caught:
                decode(file)
            assert "\n" not in str(caught.value)
    with pytest.raises(BrokenImageError, match="No such file"):
        decode(Path("nowhere.jpg"))
