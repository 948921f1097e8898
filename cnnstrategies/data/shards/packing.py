"""Packs the images of a folder into shards, several at the same time."""

import hashlib
import os
import secrets
import shutil
import tarfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

from cnnstrategies.data.decoding import BrokenImageError
from cnnstrategies.data.image_folder import ImageFolderDataModule
from cnnstrategies.data.shards.encoding import Encoded, EncodingOptions, encode
from cnnstrategies.data.shards.index import (
    FIELDS,
    REMEDY,
    TAR_BLOCK,
    Columns,
    Index,
    ShardedPart,
    ShardFile,
    write_index,
)
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.whole_file import writing

UNFINISHED = ".unfinished"  # Ends the name of a folder that is being packed.
TAR_END = b"\0" * (2 * TAR_BLOCK)
ORDER_SEED = 0


class Image(NamedTuple):
    """One that is to be packed: its path from the root, its class, and its number in its part."""

    name: str
    target: int
    number: int


@dataclass(frozen=True)
class Written:
    """A shard, what the index says of its images, and those that could not be decoded, with the reason."""

    shard: ShardFile
    columns: Columns
    damaged: dict[str, str]


def pack(source: Path, out: Path, options: EncodingOptions, workers: int) -> Index:
    """Pack a folder in the layout of :class:`~cnnstrategies.data.ImageFolderDataModule`.

    All of it is written beside ``out``, which is there when it is whole. The training images are packed in a random
    order, so that neighbours in a shard are not of one class.

    Args:
        workers: Shards that are written at the same time.
    """
    if out.exists():
        raise ConfigurationError(f"{out} is there already: give another name, or remove it")
    module = ImageFolderDataModule(source)
    if set(module.class_names) == {"images", "masks"}:
        raise ConfigurationError(
            f"{source} has masks, which are not packed: SegmentationFolderDataModule reads them from their folders"
        )
    scratch = out.with_name(out.name + UNFINISHED)
    packing = secrets.token_hex(8)
    shutil.rmtree(scratch, ignore_errors=True)  # Of a pack that was killed.
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        stack.enter_context(writing(scratch, REMEDY))
        scratch.mkdir(parents=True)
        shards: dict[str, list[list[Image]]] = {}
        for part, files in module.parts().items():
            images = [Image(*one, number) for number, one in enumerate(zip(*files, strict=True))]
            shards[part] = _shards(part, images, source, options.shard_bytes)
        written = _write(source, scratch, packing, options, shards, workers)
        index = Index(
            scratch,
            packing,
            module.class_names,
            {part: _joined(part, found) for part, found in written.items()},
            {name: why for found in written.values() for one in found for name, why in one.damaged.items()},
        )
        write_index(index)
        scratch.rename(out)
    return replace(index, root=out)


def _shards(part: str, images: Sequence[Image], root: Path, shard_bytes: int) -> list[list[Image]]:
    """Which images each shard of a part has, in order."""
    order = np.arange(len(images))
    if part == "train":
        np.random.default_rng(ORDER_SEED).shuffle(order)
    sizes = np.array([(root / image.name).stat().st_size for image in images], np.int64)
    full = np.cumsum(sizes[order]) // shard_bytes
    places = np.flatnonzero(np.diff(full)) + 1
    return [[images[number] for number in chosen] for chosen in np.split(order, places)]


def _write(
    root: Path, folder: Path, packing: str, options: EncodingOptions, parts: dict[str, list[list[Image]]], workers: int
) -> dict[str, list[Written]]:
    """Write the shards of all parts."""
    stop = threading.Event()
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with bar as progress, ThreadPoolExecutor(workers) as pool:
        shown = progress.add_task("Packing images", total=sum(len(one) for shards in parts.values() for one in shards))

        def following(images: Sequence[Image]) -> Iterator[Image]:
            for image in images:
                if stop.is_set():
                    return
                yield image
                progress.advance(shown)

        def write(file: str, images: Sequence[Image]) -> Written:
            return _write_shard(folder / file, root, following(images), packing, options)

        try:
            futures = {
                part: [pool.submit(write, f"{part}-{number:06}.tar", one) for number, one in enumerate(shards)]
                for part, shards in parts.items()
            }
            return {part: [future.result() for future in shards] for part, shards in futures.items()}
        finally:
            stop.set()  # Where one failed, or the user has had enough.
            pool.shutdown(cancel_futures=True)


def _write_shard(path: Path, root: Path, images: Iterable[Image], packing: str, options: EncodingOptions) -> Written:
    rows: list[tuple[Any, ...]] = []
    damaged: dict[str, str] = {}
    sha256 = hashlib.sha256()
    with path.open("wb") as shard:
        for image in images:
            try:
                made = _encoded(root / image.name, options)
            except BrokenImageError as error:
                damaged[image.name] = str(error)
                continue
            at, name = shard.tell() + TAR_BLOCK, os.fsencode(image.name)
            rows.append((at, len(made.data), image.target, made.width, made.height, made.plain, name))
            entries = tar_entry(f"{image.number:09}.{made.extension}", made.data, packing)
            entries += tar_entry(f"{image.number:09}.cls", str(image.target).encode(), packing)
            sha256.update(entries)
            shard.write(entries)
        sha256.update(TAR_END)
        shard.write(TAR_END)
        shard.flush()
        os.fsync(shard.fileno())
        found = ShardFile(path.name, shard.tell(), sha256.hexdigest(), len(rows))
    columns = {field: np.array([row[i] for row in rows]) for i, field in enumerate(FIELDS[1:])}
    return Written(found, columns, damaged)


def _encoded(path: Path, options: EncodingOptions) -> Encoded:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BrokenImageError(error.strerror or str(error)) from error
    return encode(data, options.size, options.quality)


def _joined(part: str, written: list[Written]) -> ShardedPart:
    """A part, from what is known of each shard."""
    counts = [one.shard.images for one in written]
    if not sum(counts):
        name, why = next(item for one in written for item in one.damaged.items())
        raise ConfigurationError(f"no image for {part} can be decoded; the first is {name} ({why})")
    columns: dict[str, npt.NDArray[Any]] = {"shard": np.repeat(np.arange(len(counts), dtype=np.int32), counts)}
    for field in FIELDS[1:]:
        # A shard without an image has columns without a type.
        columns[field] = np.concatenate([one.columns[field] for one in written if one.shard.images])
    return ShardedPart([one.shard for one in written], columns)


def tar_entry(name: str, content: bytes, packing: str) -> bytes:
    """A file in a tar file; the packing as its owner's name says which index it belongs to."""
    info = tarfile.TarInfo(name)
    info.size, info.uname, info.mode = len(content), packing, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT) + content + b"\0" * (-len(content) % TAR_BLOCK)
