"""What a data set's folder has: its parts, the images in them, and what is no image."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

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
