"""Decoders of JPEG files, which differ in speed; each gives the same kind of result."""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cnnstrategies.data.decoding import BrokenImageError
from cnnstrategies.data.shards.jpeg import Cut
from cnnstrategies.errors import ConfigurationError

DecoderName = Literal["auto", "pillow", "simplejpeg", "torchcodec"]
DECODERS: tuple[DecoderName, ...] = ("pillow", "simplejpeg", "torchcodec")
# Maps a JPEG and the factor by which it is to shrink to uint8 (H, W, 3).
Decoder = Callable[[Cut, int], Tensor]
TALKATIVE = ("torchcodec",)  # They write on standard error what they do not expect.
SCALES = (8, 4, 2)  # By which a JPEG shrinks for less than it costs to decode it.


def find_decoder(name: DecoderName) -> Decoder:
    """The decoder of this name.

    Args:
        name: ``auto`` is simplejpeg where it is installed, else Pillow.

    Raises:
        ConfigurationError: It is not installed.
    """
    name = chosen(name)
    if not is_installed(name):
        raise ConfigurationError(f"decoder={name} is not installed: pip install {name}, or use decoder=pillow")
    return {"pillow": _pillow, "simplejpeg": _simplejpeg, "torchcodec": _torchcodec}[name]


def chosen(name: DecoderName) -> DecoderName:
    """What ``auto`` stands for; another name stands for itself."""
    if name != "auto":
        return name
    return "simplejpeg" if is_installed("simplejpeg") else "pillow"


def is_installed(name: DecoderName) -> bool:
    """Whether a decoder is there; Pillow always is."""
    return name == "pillow" or importlib.util.find_spec(name) is not None


def _pillow(jpeg: Cut, scale: int) -> Tensor:
    size = -(-jpeg.width // scale), -(-jpeg.height // scale)
    try:
        # Without Image.open, which would look at the header once more.
        image = Image.frombytes("RGB", size, jpeg.data, "jpeg", ("RGB", "", scale, 0))
    except (ValueError, OSError) as error:
        raise BrokenImageError(str(error)) from error
    return torch.from_numpy(np.array(image))


def _simplejpeg(jpeg: Cut, scale: int) -> Tensor:
    import simplejpeg

    height, width = -(-jpeg.height // scale), -(-jpeg.width // scale)
    least = {"min_height": height, "min_width": width, "min_factor": scale} if scale > 1 else {}
    try:
        # What follows a cut is a warning, which `strict` would make an error.
        return torch.from_numpy(simplejpeg.decode_jpeg(jpeg.data, strict=jpeg.exact, **least))
    except ValueError as error:
        raise BrokenImageError(str(error)) from error


def _torchcodec(jpeg: Cut, scale: int) -> Tensor:
    from torchcodec.decoders import decode_jpeg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # That the buffer is read-only.
        data = torch.frombuffer(jpeg.data, dtype=torch.uint8)
    try:
        pixels: Tensor = decode_jpeg(data)
    except (RuntimeError, ValueError) as error:
        raise BrokenImageError(" ".join(str(error).split())) from error
    return pixels.permute(1, 2, 0)
