"""Packs the images of a folder into shards; in parallel, and to be gone on with after an interruption."""

import hashlib
import importlib
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

import cnnstrategies.data
from cnnstrategies.data.image_folder import ImageFolderDataModule
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.data.shards.index import FIELDS, REMEDY, UNFINISHED, VERSION, Index, Part, Shard, write_index
from cnnstrategies.data.shards.shard_file import Options, ShardFile
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.whole_file import whole_file, writing

PLAN = "plan.json"
ORDER_SEED = 0


class Images(NamedTuple):
    """The images of one part: paths from the root, classes, and bytes of each."""

    names: list[str]
    targets: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class Contents:
    """All that is packed.

    Attributes:
        fingerprint: Changes with the images.
    """

    root: Path
    class_names: list[str]
    parts: dict[str, Images]
    fingerprint: str


def contents_of(source: str, init_args: Mapping[str, Any]) -> Contents:
    """The images of a source.

    Args:
        source: A folder in the layout of :class:`~cnnstrategies.data.ImageFolderDataModule`, or the name or import path
            of such a data module.
    """
    if Path(source).is_dir() or "/" in source:
        if init_args:
            raise ConfigurationError(f"init_args are of a data module, and {source} is a folder: leave them out")
        module: ImageDataModule = ImageFolderDataModule(Path(source))
        if set(module.class_names) == {"images", "masks"}:
            raise ConfigurationError(
                f"{source} has masks, which are not packed: SegmentationFolderDataModule reads them from their folders"
            )
    else:
        module = _module(source, init_args)
    if not isinstance(module, ImageFolderDataModule) or module.task != "classes":
        raise ConfigurationError(
            f"{source} cannot be packed: shards hold image files with one class each, as ImageFolderDataModule reads"
        )
    parts: dict[str, Images] = {}
    stats: list[Any] = []
    for part, (names, targets) in module.parts().items():
        found = [(module.root / name).stat() for name in names]
        stats += [[name, one.st_size, one.st_mtime_ns] for name, one in zip(names, found, strict=True)]
        parts[part] = Images(names, targets, [one.st_size for one in found])
    fingerprint = hashlib.sha256(json.dumps(stats, default=str).encode()).hexdigest()
    return Contents(module.root, module.class_names, parts, fingerprint)


def _module(source: str, init_args: Mapping[str, Any]) -> ImageDataModule:
    where, _, name = source.rpartition(".")
    try:
        found = getattr(importlib.import_module(where) if where else cnnstrategies.data, name)
    except (ImportError, AttributeError):
        names = ", ".join(one for one in cnnstrategies.data.__all__ if one != ImageDataModule.__name__)
        raise ConfigurationError(f"no folder {source!r}, and no data module of this name; there are {names}") from None
    if not (isinstance(found, type) and issubclass(found, ImageDataModule)):
        raise ConfigurationError(f"{source} is no ImageDataModule: pack a folder of images, or one that is")
    try:
        return found(**init_args)
    except TypeError as error:
        raise ConfigurationError(f"{source} cannot be made with --init_args {dict(init_args)}: {error}") from None


@dataclass(frozen=True)
class Task:
    """One shard: which images of which part it has, in order."""

    part: str
    number: int
    images: npt.NDArray[np.int64]

    @property
    def file(self) -> str:
        """Its name."""
        return f"{self.part}-{self.number:06}.tar"


def pack(contents: Contents, out: Path, options: Options, workers: int) -> Index:
    """Pack images; all of it is written beside ``out``, which is there when it is whole.

    The training images are packed in a random order, so that neighbours in a shard are not of one class.

    Args:
        workers: Shards that are written at the same time.
    """
    if out.exists():
        raise ConfigurationError(f"{out} is there already: give another name, or remove it")
    for name, images in contents.parts.items():
        if max(images.targets, default=0) >= len(contents.class_names):
            raise ConfigurationError(
                f"{name} has an image of class {max(images.targets)}, and there are {len(contents.class_names)} classes"
                ": mend the data module's class_names or its targets"
            )
    scratch = out.with_name(out.name + UNFINISHED)
    plan = {"version": VERSION, "source": contents.fingerprint, **vars(options)}
    packing = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:16]
    with writing(scratch, REMEDY):
        _begin(scratch, plan)
        tasks = [task for name, images in contents.parts.items() for task in _tasks(name, images, options.shard_bytes)]
        _write_shards(contents, scratch, options, packing, tasks, workers)
        index = _joined(contents, scratch, packing, tasks)
        write_index(index)
        scratch.rename(out)
        for left in (*(_notes(out, task) for task in tasks), out / PLAN):
            left.unlink()
    return replace(index, root=out)


def _begin(scratch: Path, plan: dict[str, Any]) -> None:
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        before = json.loads((scratch / PLAN).read_bytes())
    except FileNotFoundError:
        with whole_file(scratch / PLAN, REMEDY) as file:
            file.write(json.dumps(plan).encode())
        return
    changed = [name for name in plan if before.get(name) != plan[name]]
    if changed:
        raise ConfigurationError(
            f"{scratch} was begun with another {' and '.join(changed)}: remove it to begin anew, or give what it was "
            "begun with to go on"
        )
    for left in scratch.glob(".*.tar.*"):  # Of a process that was killed.
        left.unlink()


def _tasks(part: str, images: Images, shard_bytes: int) -> list[Task]:
    order = np.arange(len(images.names))
    if part == "train":
        np.random.default_rng(ORDER_SEED).shuffle(order)
    full = np.cumsum(np.asarray(images.sizes, dtype=np.int64)[order]) // shard_bytes
    places = np.flatnonzero(np.diff(full)) + 1
    return [Task(part, number, chosen) for number, chosen in enumerate(np.split(order, places))]


def _write_shards(
    contents: Contents, scratch: Path, options: Options, packing: str, tasks: list[Task], workers: int
) -> None:
    stop = threading.Event()
    missing = [task for task in tasks if not (scratch / task.file).exists()]
    total = sum(len(task.images) for task in tasks)
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with bar as progress, ThreadPoolExecutor(workers) as pool:
        shown = progress.add_task("Packing images", total=total)
        progress.advance(shown, total - sum(len(task.images) for task in missing))

        def write(task: Task) -> None:
            images = contents.parts[task.part]
            with ShardFile(scratch / task.file, packing) as shard:
                for number in task.images.tolist():
                    if stop.is_set():
                        return
                    name = images.names[number]
                    shard.add(contents.root / name, name, number, images.targets[number], options)
                    progress.advance(shown)
                shard.finish(_notes(scratch, task))

        def attempt(task: Task) -> None:
            try:
                write(task)
            except BaseException:
                stop.set()  # Before another task begins.
                raise

        try:
            futures = [pool.submit(attempt, task) for task in missing]
            for future in futures:
                future.result()
        finally:
            stop.set()  # Where the user has had enough.


def _joined(contents: Contents, scratch: Path, packing: str, tasks: list[Task]) -> Index:
    """The index of all shards, from what is known of each."""
    parts: dict[str, Part] = {}
    damaged: dict[str, str] = {}
    for name in contents.parts:
        shards: list[Shard] = []
        columns: dict[str, list[npt.NDArray[Any]]] = {field: [] for field in FIELDS}
        for task in tasks:
            if task.part != name:
                continue
            with np.load(_notes(scratch, task)) as notes:
                found = len(notes["target"])
                damaged |= json.loads(str(notes["damaged"]))
                columns["shard"].append(np.full(found, len(shards), np.int32))
                for field in FIELDS[1:]:
                    columns[field].append(notes[field])
                shards.append(Shard(task.file, int(notes["size"]), str(notes["sha256"]), found))
        # A shard without an image has columns without a type.
        whole = {
            field: np.concatenate([one for one in arrays if len(one)] or [np.empty(0, np.int64)])
            for field, arrays in columns.items()
        }
        if not len(whole["target"]):
            first = next(iter(damaged.items()), ("", ""))
            raise ConfigurationError(f"no image for {name} can be decoded; the first is {first[0]} ({first[1]})")
        parts[name] = Part(shards, whole)
    return Index(scratch, packing, contents.class_names, parts, damaged)


def _notes(scratch: Path, task: Task) -> Path:
    return scratch / f"{task.file}.npz"
