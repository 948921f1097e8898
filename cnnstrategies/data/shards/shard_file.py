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

from cnnstrategies.data.decoding import BrokenImageError
from cnnstrategies.data.shards import tar
from cnnstrategies.data.shards.contents import Images
from cnnstrategies.data.shards.encoding import encode, encode_mask
from cnnstrategies.data.shards.index import FIELDS, write_whole


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

    def add(self, images: Images, number: int, options: Options) -> None:
        """Add an image, or list it as damaged."""
        name = images.names[number]
        try:
            data = images.read(number)
        except OSError as error:
            self.damaged[name] = error.strerror or str(error)
            return
        try:
            image = encode(data, options.size, options.quality)
            found = images.mask(number, image.original)
        except BrokenImageError as error:
            self.damaged[name] = str(error)
            return
        key, target = f"{number:09}", images.targets[number]
        at = self.size + tar.BLOCK
        self._write(tar.entry(f"{key}.{image.extension}", image.data, self.packing))
        mask = b"" if found is None else encode_mask(found, image.width, image.height)
        if mask:
            self._write(tar.entry(f"{key}.mask.png", mask, self.packing))
        else:
            self._write(tar.entry(f"{key}.cls", str(target).encode(), self.packing))
        shown = image.width, image.height, image.plain
        self.rows.append((at, len(image.data), target, *shown, os.fsencode(name), len(mask)))

    def finish(self, notes: Path) -> None:
        """Give it its name."""
        self._write(tar.END)
        self.file.flush()
        os.fsync(self.file.fileno())
        # First what is known of it: a shard that is there is whole, and known.
        write_whole(notes, self._notes())
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
