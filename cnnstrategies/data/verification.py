"""Which files of a directory cannot be decoded; each file is decoded once, not at every start."""

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_info
from rich.console import Console
from rich.progress import track

from cnnstrategies.data.decoding import BrokenImageError, decode

THREADS = 16
FILES_PER_JOB = 64


def broken_images(root: Path, names: Sequence[str]) -> dict[str, str]:
    """The files that cannot be decoded.

    Only decoding finds every kind of damage, and it costs about as much as loading one epoch. So the files found
    good are remembered, as a hash of path, size and time of change each, in :func:`cache_file`; only new, changed and
    broken files are decoded the next time. Pillow releases Python's lock while it decodes, so threads do it.

    Args:
        root: Directory of the files.
        names: Their paths from ``root``.

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
    with ThreadPoolExecutor(THREADS) as pool:
        for found, bad in _shown(pool.map(check, chunks), len(chunks)):
            new += found
            broken |= bad
    if new:
        _write(cache, good | set(new))
    return broken


def cache_file(root: Path) -> Path:
    """Where the good files of a directory are remembered.

    Args:
        root: The directory.

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


def _shown(
    results: Iterator[tuple[list[int], dict[str, str]]], total: int
) -> Iterator[tuple[list[int], dict[str, str]]]:
    console = Console(stderr=True)
    yield from track(
        results, "Checking images", total, console=console, transient=True, disable=not console.is_terminal
    )


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
