"""Index of packed images: shard, offset and class of each image, and size and checksum of each shard."""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.whole_file import whole_file

VERSION = 1
INDEX, SAMPLES = "index.json", "samples.npz"
REMEDY = "free some space, or give this user write permission, and run the same command again"
# Columns of the index. Each column has a value for each image of a split: index of the shard, offset and length of the
# image file in the shard in bytes, class, width and height in pixels after the EXIF rotation, whether a crop can be
# decoded without the rest of the image (see jpeg.py), and path in the source folder.
FIELDS = ("shard", "offset", "length", "target", "width", "height", "plain", "name")
Columns = dict[str, npt.NDArray[Any]]
TAR_BLOCK = tarfile.BLOCKSIZE
# Byte offsets of the packing id in a tar header: the first 16 bytes of the owner name (field `uname`).
TAR_OWNER = slice(265, 281)


@dataclass(frozen=True)
class ShardFile:
    """Entry of the index for a shard, which is a tar file of packed images.

    Attributes:
        file: Name of the tar file.
        size: Size of the tar file in bytes.
        sha256: SHA-256 checksum of the tar file, in hexadecimal digits.
        images: Number of images in the shard.
    """

    file: str
    size: int
    sha256: str
    images: int


@dataclass(frozen=True)
class ShardedPart:
    """Packed images of one split: its shards, and the columns of the index for its images.

    The length is the number of images.
    """

    shards: list[ShardFile]
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns["target"])


@dataclass(frozen=True)
class Index:
    """Index of packed images.

    Attributes:
        root: Folder of the shards and the index.
        packing: Packing id: sixteen hexadecimal digits that identify one run of ``cnnstrategies pack``. Each tar entry
            of a shard has this id as its owner name.
        class_names: Name of each class.
        parts: Packed images of each split; keys are the names of the splits.
        damaged: Reasons why images could not be decoded and were skipped; keys are the paths of the images.
    """

    root: Path
    packing: str
    class_names: list[str]
    parts: dict[str, ShardedPart]
    damaged: dict[str, str]


def write_index(index: Index) -> None:
    """Write the two files of an index: one with the columns, and a JSON file with the rest of the index.

    The JSON file also has the checksum of the file with the columns.
    """
    columns = {f"{name}.{field}": part.columns[field] for name, part in index.parts.items() for field in FIELDS}
    packed = io.BytesIO()
    np.savez_compressed(packed, **columns)  # type: ignore[arg-type]  # numpy's keyword `allow_pickle` is not an array
    described = {
        "version": VERSION,
        "packing": index.packing,
        "class_names": index.class_names,
        "samples": hashlib.sha256(packed.getvalue()).hexdigest(),
        "parts": {name: [vars(shard) for shard in part.shards] for name, part in index.parts.items()},
        "damaged": index.damaged,
    }
    for name, content in ((SAMPLES, packed.getvalue()), (INDEX, json.dumps(described, indent=1).encode())):
        with whole_file(index.root / name, REMEDY) as file:
            file.write(content)


def read_index(root: Path) -> Index:
    """Read an index, and check that it is complete and that all shards exist and have the right sizes.

    Raises:
        ConfigurationError: The index or a shard does not exist, is damaged, or was not written together with the other
            files.
    """
    try:
        written, packed = (root / INDEX).read_bytes(), (root / SAMPLES).read_bytes()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"no {Path(error.filename).name} in {root.resolve()}: `cnnstrategies pack SOURCE {root}` creates the index "
            "and the shards"
        ) from None
    try:
        described: Mapping[str, Any] = json.loads(written)
        if described["version"] != VERSION:
            raise ConfigurationError(
                f"{root / INDEX} has the format version {described['version']}, but this version of cnnstrategies "
                f"reads format version {VERSION}: pack again"
            )
        if hashlib.sha256(packed).hexdigest() != described["samples"]:
            raise ConfigurationError(
                f"{root / SAMPLES} was not written together with {INDEX}, or is damaged: copy both files again, or "
                "pack again"
            )
        with np.load(io.BytesIO(packed)) as arrays:
            parts = {
                name: ShardedPart(
                    [ShardFile(**shard) for shard in shards], {field: arrays[f"{name}.{field}"] for field in FIELDS}
                )
                for name, shards in described["parts"].items()
            }
        index = Index(root, described["packing"], list(described["class_names"]), parts, described["damaged"])
        for name, part in parts.items():
            _check_part(root, name, part, len(index.class_names))
    except ConfigurationError:
        raise
    except Exception as error:  # Parsing a damaged file can raise any error.
        why = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{root / INDEX} is damaged ({why}): copy it again, or pack again") from error
    return index


def _check_part(root: Path, name: str, part: ShardedPart, classes: int) -> None:
    """Check the index entries of a split: shards must be files in the folder, and images must be within the shards.

    With these checks, a manipulated index cannot make the program read other files.
    """
    for shard in part.shards:
        if (root / shard.file).resolve().parent != root.resolve():
            raise ConfigurationError(
                f"{root / INDEX} lists {shard.file!r}, which is not a file in this folder: replace links with the "
                "files, or pack again"
            )
        _check_size(root / shard.file, shard)
    columns = {field: column.astype(np.int64) for field, column in part.columns.items() if field != "name"}
    most = int(columns["target"].max(initial=0))
    if most >= classes:
        raise ConfigurationError(
            f"{root}: {name} has an image of class {most}, but the index has only {classes} classes (0 to "
            f"{classes - 1}): the index is damaged; pack again"
        )
    sizes = np.array([shard.size for shard in part.shards], np.int64)
    numbers = columns["shard"]
    if numbers.min(initial=0) < 0 or numbers.max(initial=-1) >= len(sizes):
        raise ValueError(f"{name} has images in shards that do not exist")
    ends = columns["offset"] + columns["length"]
    valid = (columns["offset"] >= 0) & (columns["length"] > 0) & (ends <= sizes[numbers]) & (columns["target"] >= 0)
    valid &= (columns["width"] > 0) & (columns["height"] > 0)
    if len({len(column) for column in part.columns.values()}) > 1 or not valid.all():
        raise ValueError(f"{name} has images with invalid offsets, sizes or classes")


def check_contents(index: Index) -> None:
    """Compare the checksum of each shard with the index.

    Raises:
        ConfigurationError: The checksum of a shard differs from the index.
    """
    for part in index.parts.values():
        for shard in part.shards:
            with (index.root / shard.file).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != shard.sha256:
                raise ConfigurationError(
                    f"{index.root / shard.file} is damaged: its checksum differs from the index; copy it again, or "
                    "pack again"
                )


def _check_size(path: Path, shard: ShardFile) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ConfigurationError(f"the shard {path} is missing: copy it from the source, or pack again") from None
    if size < shard.size:
        raise ConfigurationError(
            f"{path} is truncated: it has {size} of {shard.size} bytes; copy it again, or pack again"
        )
    if size > shard.size:
        raise ConfigurationError(
            f"{path} has {size} bytes, but {INDEX} lists {shard.size}: the two files were not written together; "
            "copy all files of the same `cnnstrategies pack` run, or pack again"
        )
