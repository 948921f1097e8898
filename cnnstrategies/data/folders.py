"""What a data set's folder has: its parts, the images in them, and what is no image."""

import hashlib
import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_info
from rich.console import Console
from rich.progress import track

from cnnstrategies.data.decoding import BrokenImageError, decode
from cnnstrategies.errors import ConfigurationError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
FILES_END_IN = f"files must end in {', '.join(EXTENSIONS)}"
# What data sets call their parts, in any case.
PARTS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "validate", "dev"),
    "test": ("test", "testing"),
    "predict": ("predict",),
}
EITHER = ("eval", "evaluation")
MOST_NAMED = 3
THREADS = 16
FILES_PER_JOB = 64


def readable(name: str) -> str:
    """The name of a file as text in UTF-8 can hold it, with the number of each byte that is not of that."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def part_folders(root: Path) -> dict[str, Path]:
    """The folders of a data set's parts, by ``train``, ``val``, ``test`` and ``predict``."""
    found: dict[str, Path] = {}
    for name in folders_in(root):
        if name.lower() in EITHER:
            raise ConfigurationError(
                f"{root / name} may be for validation or for the test: rename it to val or test, or move it into "
                "train/ if it is a class"
            )
        for part, names in PARTS.items():
            if name.lower() in names:
                if part in found:
                    raise ConfigurationError(
                        f"{found[part]} and {root / name} are both folders for {part}: rename or remove one of them"
                    )
                found[part] = root / name
    return {part: found[part] for part in PARTS if part in found}


def folders_in(directory: Path) -> list[str]:
    """The names of the folders in a directory, links to folders included, without those that begin with a dot."""
    if not directory.is_dir():
        return []
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())


def beside(root: Path, folders: dict[str, Path]) -> Counter[str]:
    """The folders beside those of the parts, which are read for nothing, as a reason to count."""
    others = [name for name in folders_in(root) if root / name not in folders.values()]
    if "train" not in folders or not others:
        return Counter()
    named = ", ".join(others[:MOST_NAMED]) + ", ..." * (len(others) > MOST_NAMED)
    return Counter({f"folders beside {folders['train'].name} ({named})": len(others)})


def has_images(directory: Path) -> bool:
    """Whether there is an image in a directory, at any depth; no more of it is read than that takes."""
    return directory.is_dir() and next(_files(directory, ".", Counter()), None) is not None


def image_files(directory: Path, root: Path, left_out: Counter[str]) -> list[str]:
    """The paths from ``root`` of all images in a directory, at any depth; links are followed.

    Args:
        left_out: Here the other files are counted, by the reason.
    """
    if not directory.is_dir():
        return []
    return sorted(_files(root, os.path.relpath(directory, root), left_out))


def _files(root: Path, at: str, left_out: Counter[str], above: tuple[tuple[int, int], ...] = ()) -> Iterator[str]:
    folder = root / at
    try:
        status = folder.stat()
        this = status.st_dev, status.st_ino
        if this in above:  # A link to a folder that it is in.
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                is_folder = entry.is_dir()
                is_image = not is_folder and entry.name.lower().endswith(EXTENSIONS)
                if entry.name[0] == ".":
                    left_out["hidden"] += is_image or is_folder
                elif is_image:
                    yield os.path.join(at, entry.name)
                elif is_folder:
                    yield from _files(root, os.path.join(at, entry.name), left_out, (*above, this))
                else:
                    left_out[Path(entry.name).suffix.lower() or "without an ending"] += 1
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be read ({error.strerror}): give the right to, or remove it"
        ) from error


def broken_images(root: Path, names: Sequence[str]) -> dict[str, str]:
    """The files that cannot be decoded.

    Only decoding finds every kind of damage, and it costs about as much as loading one epoch. So the files found
    good are remembered, as a hash of path, size and time of change each, in :func:`cache_file`; only new, changed and
    broken files are decoded the next time. Pillow releases Python's lock while it decodes, so threads do it.

    Returns:
        Path from ``root`` and reason of each broken file, in the order of ``names``.
    """
    root = root.resolve()
    cache = cache_file(root)
    good = _read(cache)

    def check(chunk: Sequence[str]) -> tuple[list[int], dict[str, str]]:
        found: list[int] = []
        broken: dict[str, str] = {}
        for name in chunk:
            try:
                digest = _digest(root, name)
                if digest not in good:
                    decode(root / name)
                    found.append(digest)
            except (OSError, BrokenImageError) as error:
                broken[name] = str(error)
        return found, broken

    chunks = [names[start : start + FILES_PER_JOB] for start in range(0, len(names), FILES_PER_JOB)]
    if not good:
        rank_zero_info(f"Checking {len(names)} image files in {root}, once")
    new: list[int] = []
    broken: dict[str, str] = {}
    console = Console(stderr=True)
    shown: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
    with ThreadPoolExecutor(THREADS) as pool:
        for found, bad in track(pool.map(check, chunks), "Checking images", len(chunks), **shown):
            new += found
            broken |= bad
    if new:
        _write(cache, good | set(new))
    return broken


def cache_file(root: Path) -> Path:
    """Where the good files of a directory are remembered.

    Returns:
        ``root/.checked_images``; where ``root`` is read-only, a file of its own in ``$XDG_CACHE_HOME/cnnstrategies``,
        by default ``~/.cache/cnnstrategies``.
    """
    if os.access(root, os.W_OK):
        return root / ".checked_images"
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "cnnstrategies" / f"images-{hashlib.blake2b(os.fsencode(root), digest_size=8).hexdigest()}"


def _digest(root: Path, name: str) -> int:
    status = (root / name).stat()
    identity = os.fsencode(name) + f"\0{status.st_size}\0{status.st_mtime_ns}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")


def _read(cache: Path) -> set[int]:
    try:
        return set(np.fromfile(cache, dtype=np.uint64).tolist())
    except OSError:  # Not there yet, or another user's.
        return set()


def _write(cache: Path, digests: set[int]) -> None:
    unfinished = cache.with_name(f"{cache.name}.{socket.gethostname()}.{os.getpid()}")  # Nodes may write at once.
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.array(sorted(digests), dtype=np.uint64).tofile(unfinished)
        unfinished.replace(cache)
    except OSError as error:
        rank_zero_info(f"{cache} cannot be written ({error.strerror}): the files will be checked again at every start")
