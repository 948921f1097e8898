"""Index of packed images: the place and class of each image, and sizes and checksums of the shards."""

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
REMEDY = "free some space or grant the right to write, and run the same command again"
# Columns of the index, with a value for each image: index of the shard in the part, first byte and number of bytes in
# the shard, class, size of the upright image, whether a part of the image can be decoded (see jpeg.py), and the
# image's name in the source.
FIELDS = ("shard", "offset", "length", "target", "width", "height", "plain", "name")
Columns = dict[str, npt.NDArray[Any]]
TAR_BLOCK = tarfile.BLOCKSIZE
TAR_OWNER = slice(265, 281)  # Place of the packing in a tar header: the first 16 bytes of the owner's name.


@dataclass(frozen=True)
class ShardFile:
    """A tar file of packed images: its name, its size in bytes, its checksum and the number of its images."""

    file: str
    size: int
    sha256: str
    images: int


@dataclass(frozen=True)
class ShardedPart:
    """Images of one part, such as ``train``."""

    shards: list[ShardFile]
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns["target"])


@dataclass(frozen=True)
class Index:
    """Index of packed images.

    Attributes:
        root: Folder of the shards and the index.
        packing: Sixteen hexadecimal digits that identify this packing. Every entry of the shards has them as its
            owner's name.
        class_names: Name of each class.
        parts: Images of each part.
        damaged: Images of the source that could not be decoded, with the reason.
    """

    root: Path
    packing: str
    class_names: list[str]
    parts: dict[str, ShardedPart]
    damaged: dict[str, str]


def write_index(index: Index) -> None:
    """Write the two files of an index."""
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
    """Read an index, and check that it is complete and that the shards have the indexed sizes.

    Raises:
        ConfigurationError: The index or a shard does not exist, is damaged, or belongs to another packing.
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
                f"{root / INDEX} has version {described['version']}, and this cnnstrategies reads version {VERSION}: "
                "pack again"
            )
        if hashlib.sha256(packed).hexdigest() != described["samples"]:
            raise ConfigurationError(f"{root / SAMPLES} does not belong to {INDEX}: copy both again, or pack again")
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
    except Exception as error:  # A damaged file can raise errors of any kind.
        why = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{root / INDEX} is damaged ({why}): copy it again, or pack again") from error
    return index


def _check_part(root: Path, name: str, part: ShardedPart, classes: int) -> None:
    """Check that the shards are files of the folder and that the images lie in them: the index is not trusted."""
    for shard in part.shards:
        if (root / shard.file).resolve().parent != root.resolve():
            raise ConfigurationError(
                f"{root / INDEX} names {shard.file!r}, which is not a file of this folder: replace links by the files, "
                "or pack again"
            )
        _check_size(root / shard.file, shard)
    columns = {field: column.astype(np.int64) for field, column in part.columns.items() if field != "name"}
    most = int(columns["target"].max(initial=0))
    if most >= classes:
        raise ConfigurationError(
            f"{root}: {name} has an image of class {most}, and the index has {classes} classes (0 to {classes - 1}): "
            "the index is damaged; pack again"
        )
    sizes = np.array([shard.size for shard in part.shards], np.int64)
    numbers = columns["shard"]
    if numbers.min(initial=0) < 0 or numbers.max(initial=-1) >= len(sizes):
        raise ValueError(f"{name} has images in shards that do not exist")
    ends = columns["offset"] + columns["length"]
    valid = (columns["offset"] >= 0) & (columns["length"] > 0) & (ends <= sizes[numbers]) & (columns["target"] >= 0)
    valid &= (columns["width"] > 0) & (columns["height"] > 0)
    if len({len(column) for column in part.columns.values()}) > 1 or not valid.all():
        raise ValueError(f"{name} has impossible places, sizes or classes of images")


def check_contents(index: Index) -> None:
    """Compare the content of every shard with its checksum.

    Raises:
        ConfigurationError: The content of a shard has changed.
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
        raise ConfigurationError(f"no shard {path}, which {INDEX} names: copy it there, or pack again") from None
    if size < shard.size:
        raise ConfigurationError(
            f"{path} is truncated: it has {size} bytes of {shard.size}; copy it again, or pack again"
        )
    if size > shard.size:
        raise ConfigurationError(
            f"{path} has {size} bytes, and {INDEX} has {shard.size}: the index belongs to other shards; copy all files "
            "of one packing, or pack again"
        )
