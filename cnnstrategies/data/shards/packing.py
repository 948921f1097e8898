"""Packs images into shards; in parallel, and to be gone on with after an interruption."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

from cnnstrategies.data.shards.contents import Contents, Images
from cnnstrategies.data.shards.index import FIELDS, REMEDY, UNFINISHED, VERSION, Index, Part, Shard, write_index
from cnnstrategies.data.shards.shard_file import Options, ShardFile
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.whole_file import whole_file, writing

PLAN = "plan.json"
ORDER_SEED = 0


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
        contents: The images.
        out: The folder to make.
        options: How.
        workers: Shards that are written at the same time.

    Raises:
        ConfigurationError: ``out`` is there, what was begun there is of other images or options, there is no space or
            no right to write, a class has no name, no image of a part can be decoded, or a mask does not fit its image
            or the classes.
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
    with _progress() as progress, ThreadPoolExecutor(workers) as pool:
        shown = progress.add_task("Packing images", total=total)
        progress.advance(shown, total - sum(len(task.images) for task in missing))

        def write(task: Task) -> None:
            images = contents.parts[task.part]
            with ShardFile(scratch / task.file, packing) as shard:
                for number in task.images.tolist():
                    if stop.is_set():
                        return
                    shard.add(images, number, options)
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
    return Index(scratch, packing, contents.class_names, parts, damaged, contents.ignore_index)


def _notes(scratch: Path, task: Task) -> Path:
    return scratch / f"{task.file}.npz"


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress
