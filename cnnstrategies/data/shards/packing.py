"""Packing of a folder's images into shards, which several threads write in parallel."""

import hashlib
import os
import secrets
import tarfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

from cnnstrategies.data.decoding import BrokenImageError, PixelRangeError, bits_of, spaced
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
from cnnstrategies.runtime.whole_file import whole_folder

TAR_END = b"\0" * (2 * TAR_BLOCK)
ORDER_SEED = 0


class Image(NamedTuple):
    """An image to pack: its path relative to the source folder, its class, and its number within its split."""

    name: str
    target: int
    number: int


@dataclass(frozen=True)
class Written:
    """Result of writing a shard.

    Attributes:
        shard: Entry of the index for the shard.
        columns: Columns of the index for the shard's images, except the column ``shard``.
        damaged: Reasons why images could not be decoded; keys are the paths of the images.
    """

    shard: ShardFile
    columns: Columns
    damaged: dict[str, str]


def pack(source: Path, out: Path, options: EncodingOptions, workers: int) -> Index:
    """Pack a folder of images in the layout of :class:`~cnnstrategies.data.ImageFolderDataModule` into shards.

    The shards are written to a temporary folder next to ``out``. When the shards and the index are complete, the folder
    is renamed to ``out``. The training images are packed in a random order, so that a shard contains images of many
    classes.

    Args:
        source: Folder of the images.
        out: Folder to create.
        options: Options for packing.
        workers: Number of threads, each of which writes one shard at a time.

    Returns:
        The index of the packed images.

    Raises:
        ConfigurationError: ``out`` exists, the source has masks, no image of a split can be decoded, or a pixel needs
            more bits than the images are said to use.
    """
    if out.exists():
        raise ConfigurationError(f"{out} exists already: choose another name, or remove it")
    module = ImageFolderDataModule(source)
    if set(module.class_names) == {"images", "masks"}:
        raise ConfigurationError(
            f"{source} has masks, which cannot be packed: train with SegmentationFolderDataModule, which reads the "
            "image files"
        )
    packing, files = secrets.token_hex(8), module.parts()
    if options.bits is None:
        options = replace(options, bits=bits_of([source / name for name in spaced(files["train"][0])]))
    with whole_folder(out, REMEDY) as scratch:
        shards: dict[str, list[list[Image]]] = {}
        for part, listed in files.items():
            images = [Image(name, target, number) for number, (name, target) in enumerate(zip(*listed, strict=True))]
            shards[part] = _shards(part, images, source, options.shard_bytes)
        written = _write(source, scratch, packing, options, shards, workers)
        index = Index(
            scratch,
            packing,
            module.class_names,
            {part: _joined(part, shards_written) for part, shards_written in written.items()},
            {
                name: reason
                for shards_written in written.values()
                for shard in shards_written
                for name, reason in shard.damaged.items()
            },
        )
        write_index(index)
    return replace(index, root=out)


def _shards(part: str, images: Sequence[Image], root: Path, shard_bytes: int) -> list[list[Image]]:
    """Divide the images of a split into shards, and return the images of each shard in packing order.

    Training images are shuffled.

    Args:
        part: Name of the split.
        images: Images of the split.
        root: Source folder.
        shard_bytes: Approximate total size of the source files in a shard.
    """
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
    """Write the shards of all splits, and show a progress bar.

    Args:
        root: Source folder.
        folder: Folder of the shards.
        packing: Packing id, which each tar entry of the shards contains.
        options: Options for packing.
        parts: Images of each shard of each split; keys are the names of the splits.
        workers: Number of threads.

    Returns:
        The results for each shard of each split; keys are the names of the splits.
    """
    stop = threading.Event()
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with bar as progress, ThreadPoolExecutor(workers) as pool:
        total = sum(len(images) for shards in parts.values() for images in shards)
        task = progress.add_task("Packing images", total=total)

        def following(images: Sequence[Image]) -> Iterator[Image]:
            for image in images:
                if stop.is_set():
                    return
                yield image
                progress.advance(task)

        def write(file: str, images: Sequence[Image]) -> Written:
            return _write_shard(folder / file, root, following(images), packing, options)

        try:
            futures = {
                part: [pool.submit(write, f"{part}-{number:06}.tar", images) for number, images in enumerate(shards)]
                for part, shards in parts.items()
            }
            return {part: [future.result() for future in shards] for part, shards in futures.items()}
        finally:
            stop.set()  # After an error or Ctrl-C, this event makes the other threads stop.
            pool.shutdown(cancel_futures=True)


def _write_shard(path: Path, root: Path, images: Iterable[Image], packing: str, options: EncodingOptions) -> Written:
    rows: list[tuple[Any, ...]] = []
    damaged: dict[str, str] = {}
    sha256 = hashlib.sha256()
    with path.open("wb") as shard:
        for image in images:
            try:
                encoded = _encoded(root / image.name, options)
            except BrokenImageError as error:
                damaged[image.name] = str(error)
                continue
            offset, name = shard.tell() + TAR_BLOCK, os.fsencode(image.name)
            rows.append((offset, len(encoded.data), image.target, encoded.width, encoded.height, encoded.plain, name))
            entries = tar_entry(f"{image.number:09}.{encoded.extension}", encoded.data, packing)
            entries += tar_entry(f"{image.number:09}.cls", str(image.target).encode(), packing)
            sha256.update(entries)
            shard.write(entries)
        sha256.update(TAR_END)
        shard.write(TAR_END)
        shard.flush()
        os.fsync(shard.fileno())
        file = ShardFile(path.name, shard.tell(), sha256.hexdigest(), len(rows))
    columns = {field: np.array([row[i] for row in rows]) for i, field in enumerate(FIELDS[1:])}
    return Written(file, columns, damaged)


def _encoded(path: Path, options: EncodingOptions) -> Encoded:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BrokenImageError(error.strerror or str(error)) from error
    try:
        return encode(data, options.size, options.quality, options.bits)
    except PixelRangeError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _joined(part: str, written: list[Written]) -> ShardedPart:
    """Combine the results of all shards of a split."""
    counts = [shard.shard.images for shard in written]
    if not sum(counts):
        name, reason = next(item for shard in written for item in shard.damaged.items())
        raise ConfigurationError(
            f"no image for {part} can be decoded; the first is {name} ({reason}): repair the images, or remove the "
            f"folder for {part}"
        )
    columns: dict[str, npt.NDArray[Any]] = {"shard": np.repeat(np.arange(len(counts), dtype=np.int32), counts)}
    for field in FIELDS[1:]:
        # A shard without images has empty columns of any dtype. They are left out, because they would change the dtype
        # of the joined column.
        columns[field] = np.concatenate([shard.columns[field] for shard in written if shard.shard.images])
    return ShardedPart([shard.shard for shard in written], columns)


def tar_entry(name: str, content: bytes, packing: str) -> bytes:
    """Return a tar entry for a file, padded to whole tar blocks.

    The owner name in the tar header is the packing id. A reader compares this id with the index's packing id to check
    that the shard and the index were written together.
    """
    info = tarfile.TarInfo(name)
    info.size, info.uname, info.mode = len(content), packing, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT) + content + b"\0" * (-len(content) % TAR_BLOCK)
