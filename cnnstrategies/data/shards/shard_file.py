"""One shard while it is written."""

import contextlib
import hashlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cnnstrategies.data.decoding import BrokenImageError, decode
from cnnstrategies.data.shards.index import FIELDS, REMEDY, TAR_BLOCK, TAR_END, tar_entry
from cnnstrategies.data.shards.jpeg import read_header, restart_interval
from cnnstrategies.runtime.whole_file import whole_file

ORIENTATION = 0x0112  # EXIF
EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}


@dataclass(frozen=True)
class Options:
    """How images are packed.

    Attributes:
        size: The shorter side to which larger images are shrunk; None leaves sizes as they are.
        quality: Of the JPEG files that images become; None leaves files as they are.
        shard_bytes: About the size of a shard, in bytes of the source.
    """

    size: int | None
    quality: int | None
    shard_bytes: int


class ShardFile:
    """A shard that is being written under another name, and what the index will say of it."""

    def __init__(self, path: Path, packing: str) -> None:
        self.path = path
        self.packing = packing
        self.scratch = path.with_name(f".{path.name}.{os.getpid()}")
        self.file = self.scratch.open("wb")
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.rows: list[tuple[Any, ...]] = []
        self.damaged: dict[str, str] = {}

    def __enter__(self) -> "ShardFile":
        return self

    def __exit__(self, *_: object) -> None:
        # What is written late may find no space; that is the error's own story, not that of closing.
        with contextlib.suppress(OSError):
            self.file.close()
        self.scratch.unlink(missing_ok=True)

    def add(self, path: Path, name: str, number: int, target: int, options: Options) -> None:
        """Add an image, or list it as damaged.

        Args:
            name: What it is called in the source.
            number: Of the image in its part, from which its name in the shard is made.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            self.damaged[name] = error.strerror or str(error)
            return
        try:
            image = encode(data, options.size, options.quality)
        except BrokenImageError as error:
            self.damaged[name] = str(error)
            return
        at = self.size + TAR_BLOCK
        self._write(tar_entry(f"{number:09}.{image.extension}", image.data, self.packing))
        self._write(tar_entry(f"{number:09}.cls", str(target).encode(), self.packing))
        self.rows.append((at, len(image.data), target, image.width, image.height, image.plain, os.fsencode(name)))

    def finish(self, notes: Path) -> None:
        """Give it its name."""
        self._write(TAR_END)
        self.file.flush()
        os.fsync(self.file.fileno())
        # First what is known of it: a shard that is there is whole, and known.
        with whole_file(notes, REMEDY) as file:
            file.write(self._notes())
        self.scratch.rename(self.path)

    def _write(self, content: bytes) -> None:
        self.file.write(content)
        self.sha256.update(content)
        self.size += len(content)

    def _notes(self) -> bytes:
        columns = zip(*self.rows, strict=True) if self.rows else [()] * (len(FIELDS) - 1)
        arrays = {name: np.array(column) for name, column in zip(FIELDS[1:], columns, strict=True)}
        arrays |= {"sha256": np.array(self.sha256.hexdigest()), "size": np.array(self.size)}
        arrays["damaged"] = np.array(json.dumps(self.damaged))
        file = io.BytesIO()
        np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's keyword `allow_pickle` is no array
        return file.getvalue()


@dataclass(frozen=True)
class Encoded:
    """An image in a shard.

    Attributes:
        width: When shown upright.
        plain: Whether it is a JPEG whose header says all that decoding needs.
    """

    data: bytes
    extension: str
    width: int
    height: int
    plain: bool


def encode(data: bytes, size: int | None, quality: int | None) -> Encoded:
    """Look at an image, and make it what is packed.

    Args:
        size: The shorter side to shrink it to; a smaller image keeps its size, and None every image.
        quality: Of the JPEG that it becomes; None leaves the file as it is.

    Raises:
        BrokenImageError: It cannot be decoded.
    """
    pixels = decode(io.BytesIO(data))
    height, width = pixels.shape[1:]
    if quality is None:
        with Image.open(io.BytesIO(data)) as opened:
            extension = EXTENSIONS.get(opened.format or "")
            turned = opened.getexif().get(ORIENTATION, 1) != 1
        if extension is None:  # A PNG file loses nothing, and is smaller than BMP, TIFF and PNM.
            file = io.BytesIO()
            Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file, "PNG")
            return Encoded(file.getvalue(), "png", width, height, False)
        header = read_header(data)
        plain = header is not None and not turned and (header.width, header.height) == (width, height)
        return Encoded(data, extension, width, height, plain)
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    if size is not None and min(width, height) > size:
        shorter = size / min(width, height)
        image = image.resize(
            (max(size, round(width * shorter)), max(size, round(height * shorter))), Image.Resampling.LANCZOS
        )
    file = io.BytesIO()
    # Of 4:2:0 and with restart markers, which let a reader decode no more than a crop; see jpeg.py.
    interval = restart_interval(image)
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0", optimize=True, restart_marker_blocks=interval)
    return Encoded(file.getvalue(), "jpg", *image.size, True)
