"""What lies beside the shards: where each image is, what it shows, and what the shards must look like."""

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
REMEDY = "make room or give the right, and run the same command again"
# Of each image: which of the part's shards, first byte there, bytes, class, size when shown upright, whether it is a
# JPEG whose header says all that decoding needs, and its name in the source.
FIELDS = ("shard", "offset", "length", "target", "width", "height", "plain", "name")
Columns = dict[str, npt.NDArray[Any]]
TAR_BLOCK = tarfile.BLOCKSIZE
TAR_OWNER = slice(265, 281)  # Of a header: the first 16 bytes of the owner's name, which here is the packing.


@dataclass(frozen=True)
class ShardFile:
    """A tar file."""

    file: str
    size: int
    sha256: str
    images: int


@dataclass(frozen=True)
class ShardedPart:
    """The images of one part, such as ``train``."""

    shards: list[ShardFile]
    columns: Columns

    def __len__(self) -> int:
        return len(self.columns["target"])


@dataclass(frozen=True)
class Index:
    """All that is known of packed images.

    Attributes:
        packing: Sixteen hexadecimal digits that every entry of its shards carries as its owner's name.
        damaged: Images of the source that could not be decoded, and why.
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
    np.savez_compressed(packed, **columns)  # type: ignore[arg-type]  # numpy's keyword `allow_pickle` is no array
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
    """Read an index, and see that it is whole and the shards have the sizes that it says."""
    try:
        written, packed = (root / INDEX).read_bytes(), (root / SAMPLES).read_bytes()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"no {Path(error.filename).name} in {root.resolve()}: `cnnstrategies pack SOURCE {root}` makes it and the "
            "shards"
        ) from None
    try:
        described: Mapping[str, Any] = json.loads(written)
        if described["version"] != VERSION:
            raise ConfigurationError(
                f"{root / INDEX} has version {described['version']}, and this cnnstrategies reads {VERSION}: pack again"
            )
        if hashlib.sha256(packed).hexdigest() != described["samples"]:
            raise ConfigurationError(
                f"{root / SAMPLES} is not the one that {INDEX} was written with: copy both again, or pack again"
            )
        with np.load(io.BytesIO(packed)) as arrays:
            parts = {
                name: ShardedPart(
                    [ShardFile(**one) for one in shards], {field: arrays[f"{name}.{field}"] for field in FIELDS}
                )
                for name, shards in described["parts"].items()
            }
        index = Index(root, described["packing"], list(described["class_names"]), parts, described["damaged"])
        for name, part in parts.items():
            _check_part(root, name, part, len(index.class_names))
    except ConfigurationError:
        raise
    except Exception as error:  # Whatever is wrong with what others have written.
        why = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{root / INDEX} is damaged ({why}): copy it again, or pack again") from error
    return index


def _check_part(root: Path, name: str, part: ShardedPart, classes: int) -> None:
    """See that shards are files of the folder, and images are in them, whoever has written the index."""
    for shard in part.shards:
        if (root / shard.file).resolve().parent != root.resolve():
            raise ConfigurationError(
                f"{root / INDEX} names {shard.file!r}, which is no file of this folder: pack again, and put the files "
                "themselves there in place of links"
            )
        _check_size(root / shard.file, shard)
    columns = {field: column.astype(np.int64) for field, column in part.columns.items() if field != "name"}
    most = int(columns["target"].max(initial=0))
    if most >= classes:
        raise ConfigurationError(
            f"{root}: {name} has an image of class {most}, and there are {classes} classes (0 to {classes - 1}): "
            "the index is not of these images; pack again"
        )
    sizes = np.array([shard.size for shard in part.shards], np.int64)
    numbers = columns["shard"]
    if numbers.min(initial=0) < 0 or numbers.max(initial=-1) >= len(sizes):
        raise ValueError(f"{name} has images in shards that there are not")
    ends = columns["offset"] + columns["length"]
    right = (columns["offset"] >= 0) & (columns["length"] > 0) & (ends <= sizes[numbers]) & (columns["target"] >= 0)
    right &= (columns["width"] > 0) & (columns["height"] > 0)
    if len({len(column) for column in part.columns.values()}) > 1 or not right.all():
        raise ValueError(f"{name} has impossible places, sizes or classes of images")


def check_contents(index: Index) -> None:
    """See that every shard has the bytes that were written."""
    for part in index.parts.values():
        for shard in part.shards:
            with (index.root / shard.file).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                raise ConfigurationError(
                    f"{index.root / shard.file} is damaged, its checksum is not the index's: copy it again, or "
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
            f"{path} has {size} bytes, and {INDEX} says {shard.size}: it is an index of other shards; copy all files "
            "of one packing, or pack again"
        )
