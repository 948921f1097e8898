"""Reading of mask files: which class the value or the colour of a pixel stands for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from cnnstrategies.data.decoding import spaced
from cnnstrategies.errors import ConfigurationError

MOST_NAMED = 5  # Largest number of a mask's colours that an error names.
WHITE = 255
Colour = tuple[int, int, int]


class MaskReader:
    """Reader of mask files. It turns the values or colours of a file into classes.

    Without ``colours``, the class of a pixel is its palette index or its grey value. In a mask with one bit per pixel
    the classes are 0 and 1. With two classes, the classes are also 0 and 1 if the masks have only the values 0 and 255;
    :meth:`look` finds this out.

    Args:
        num_classes: Number of classes.
        ignore_index: Value of the pixels that the loss and the metrics ignore.
        colours: Colour of each class (red, green, blue; 0 to 255), and optionally one more colour, which the ignored
            pixels have.

    Raises:
        ConfigurationError: The number of colours does not fit, or a colour occurs twice or is out of its range.
    """

    def __init__(self, num_classes: int, ignore_index: int, colours: Sequence[Colour] | None = None) -> None:
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.white_is_one = False
        self.codes: npt.NDArray[np.int64] | None = None
        if colours is None:
            return
        if len(colours) not in (num_classes, num_classes + 1):
            raise ConfigurationError(
                f"mask_colours has {len(colours)} colours, and num_classes={num_classes}: set one for each class, and "
                "optionally one more for ignored pixels"
            )
        for number, colour in enumerate(colours):
            if not all(0 <= value <= 255 for value in colour) or colour in colours[:number]:
                raise ConfigurationError(
                    f"mask_colours has the colour {list(colour)}, which occurs twice or is not within 0 to 255: give "
                    "each class a colour of its own"
                )
        self.codes = _codes(np.array(colours, np.uint8))

    def look(self, splits: Sequence[Sequence[Path]]) -> None:
        """Read masks of each split before the run, check them, and find out whether 255 stands for class 1.

        32 evenly spaced masks of a split are read, and if these have no other value than 0, further masks
        until one has another value.

        Raises:
            ConfigurationError: A mask has a value or a colour that is not a class, or there are more than two classes,
                although the masks have only the values 0 and 255.
        """
        samples = [path for masks in splits for path in spaced(masks)]
        if self.codes is None:
            values = _values_of_first(samples, splits)
            self.white_is_one = WHITE in values and values <= {0, WHITE}
            if self.white_is_one and self.num_classes > 2:
                raise ConfigurationError(
                    f"masks such as {samples[0]} have only the values 0 and {WHITE}, but num_classes="
                    f"{self.num_classes}: set num_classes to 2, or write the number of its class into each pixel"
                )
        for path in samples:
            self.read(path)

    def read(self, path: Path) -> Tensor:
        """Return the class of each pixel of a mask, uint8 or int32 (H, W).

        Raises:
            ConfigurationError: The file is damaged, or has a value or a colour that is not a class.
        """
        if self.codes is not None:
            return self._from_colours(path, self.codes)
        mask = values_of(path)
        if self.white_is_one:
            if others := {*np.unique(mask).tolist()} - {0, WHITE}:
                raise ConfigurationError(
                    f"mask {path} has the value {min(others)}, but other masks have only 0 and {WHITE}: write the "
                    "number of its class into each pixel of all masks"
                )
            return torch.from_numpy((mask == WHITE).astype(np.uint8))
        counted = np.where(mask == self.ignore_index, 0, mask)
        wrong = int(counted.min() if counted.min() < 0 else counted.max())
        if not 0 <= wrong < self.num_classes:
            raise ConfigurationError(
                f"mask {path} has the class {wrong}, but num_classes={self.num_classes} allows only 0 to "
                f"{self.num_classes - 1}: raise data.init_args.num_classes and model.init_args.num_classes, or correct "
                "the mask"
            )
        return torch.from_numpy(mask)

    def _from_colours(self, path: Path, codes: npt.NDArray[np.int64]) -> Tensor:
        with opened(path) as image:
            pixels = _codes(np.array(image.convert("RGB")))
        present, positions = np.unique(pixels, return_inverse=True)
        classes = np.full(len(present), -1, np.int32)
        for number, code in enumerate(codes.tolist()):
            classes[present == code] = number if number < self.num_classes else self.ignore_index
        if unknown := present[classes < 0].tolist():
            raise ConfigurationError(
                f"mask {path} has colours that are not in data.init_args.mask_colours: {_named(unknown)}; add them, or "
                "correct the mask"
            )
        return torch.from_numpy(classes[positions].reshape(pixels.shape))


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """Open and decode a mask file.

    Raises:
        ConfigurationError: The file is damaged.
    """
    try:
        image = Image.open(path)
        image.load()
    except Exception as error:  # For damaged files, Pillow's decoders raise errors of many classes.
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"broken mask {path} ({reason}): repair or remove it") from None
    with image:
        yield image


def values_of(path: Path) -> npt.NDArray[Any]:
    """Return the palette indices or grey values of a mask, uint8 or int32 (H, W).

    Raises:
        ConfigurationError: The file is damaged, or its pixels have colours or fractions.
    """
    with opened(path) as image:
        pixels = np.array(image)
        if image.mode in ("1", "L", "P"):
            return pixels.astype(np.uint8)
        if image.mode == "I" or image.mode.startswith("I;16"):
            return pixels.astype(np.int32)
        if image.mode not in ("LA", "PA", "RGB", "RGBA"):
            raise ConfigurationError(
                f"mask {path} has the mode {image.mode}: save it with 8 or 16 bits per pixel, which give the class"
            )
        if pixels.shape[-1] < 3 or (pixels[..., :1] == pixels[..., 1:3]).all():
            return pixels[..., 0]
        raise ConfigurationError(
            f"mask {path} has colours ({_named(np.unique(_codes(pixels)).tolist())}): set data.init_args.mask_colours "
            "to the colour of each class, or write the number of its class into each pixel"
        )


def _values_of_first(samples: Sequence[Path], splits: Sequence[Sequence[Path]]) -> set[int]:
    """Return the values of the samples, or if these are all 0, also those of the first mask with another value."""
    values: set[int] = set()
    for path in samples:
        values.update(np.unique(values_of(path)).tolist())
    for path in (path for masks in splits for path in masks):
        if values - {0}:
            break
        values.update(np.unique(values_of(path)).tolist())
    return values


def _codes(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return one number for each colour: red * 65536 + green * 256 + blue. The last axis has the colour's values."""
    red, green, blue = (pixels[..., number].astype(np.int64) for number in range(3))
    return (red << 16) + (green << 8) + blue


def _named(codes: Sequence[int]) -> str:
    colours = [str([code >> 16, code >> 8 & 255, code & 255]) for code in codes[:MOST_NAMED]]
    return ", ".join(colours) + ", ..." * (len(codes) > MOST_NAMED)
