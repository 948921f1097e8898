"""Search for the splits (train, val, test, predict) and the images in a data set's folder."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from cnnstrategies.errors import ConfigurationError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
FILES_END_IN = f"files must end in {', '.join(EXTENSIONS)}"
# Keys: splits of a data set. Values: accepted names of the split's folder, in lower case. Folders are also found if
# their names have upper-case letters.
PARTS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "validate", "dev"),
    "test": ("test", "testing"),
    "predict": ("predict",),
}
EITHER = ("eval", "evaluation")  # Names that are refused, because they could mean the validation or the test split.
MOST_NAMED = 3  # Largest number of ignored folders whose names the start panel shows.


def readable(name: str) -> str:
    r"""Return a file's name as UTF-8 text, with escape sequences such as ``\xe9`` for bytes that are not UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def part_folders(root: Path) -> dict[str, Path]:
    """Return the folder of each split of a data set. The keys are ``train``, ``val``, ``test`` and ``predict``.

    Raises:
        ConfigurationError: A split has two folders, or the name of a folder could mean validation or test.
    """
    folders: dict[str, Path] = {}
    for name in folders_in(root):
        if name.lower() in EITHER:
            raise ConfigurationError(
                f"{root / name} may be the validation or the test split: rename it to val or test, or move it into "
                "train/ if it is a class"
            )
        for part, names in PARTS.items():
            if name.lower() in names:
                if part in folders:
                    raise ConfigurationError(
                        f"{folders[part]} and {root / name} are both the {part} split: rename or remove one of them"
                    )
                folders[part] = root / name
    return {part: folders[part] for part in PARTS if part in folders}


def folders_in(directory: Path) -> list[str]:
    """Return the sorted names of the folders in a directory. Links to folders are included, hidden folders are not."""
    if not directory.is_dir():
        return []
    with os.scandir(directory) as entries:
        return sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir())


def has_training_folder(directory: Path) -> bool:
    """Return whether a directory contains a folder with a name of the training split."""
    return any(name.lower() in PARTS["train"] for name in folders_in(directory))


def ignored_folders(root: Path, folders: dict[str, Path]) -> Counter[str]:
    """Count the folders in ``root`` that are ignored.

    If a folder ``train`` exists, all folders that are not a split are ignored. Otherwise no folder is ignored, because
    the folders may be classes.

    Args:
        root: Folder of the data set.
        folders: Folder of each split; keys are the names of the splits.

    Returns:
        The numbers of ignored folders; keys are the reasons that the start panel shows.
    """
    others = [name for name in folders_in(root) if root / name not in folders.values()]
    if "train" not in folders or not others:
        return Counter()
    names = ", ".join(others[:MOST_NAMED]) + ", ..." * (len(others) > MOST_NAMED)
    return Counter({f"folders beside {folders['train'].name} ({names})": len(others)})


def has_images(directory: Path) -> bool:
    """Whether a directory contains an image at any depth. The search stops at the first image."""
    return directory.is_dir() and next(Walk(directory).images(directory, Counter()), None) is not None


def image_files(directory: Path, root: Path, left_out: Counter[str], walk: "Walk | None" = None) -> list[str]:
    """Return the sorted paths of all images in a directory, at any depth. Links are followed.

    Args:
        directory: Directory to search.
        root: Directory to which the returned paths are relative.
        left_out: Counter to which the numbers of ignored files are added; keys are the reasons.
        walk: Search of the split, if the split has further directories whose images must be others.

    Raises:
        ConfigurationError: A folder cannot be read, a link leads to a folder that contains the link, or two classes
            contain the same folder.
    """
    if not directory.is_dir():
        return []
    return sorted((walk or Walk(root)).images(directory, left_out))


class Walk:
    """Search for the images of a split that reads each folder once, although links may lead to it.

    Args:
        root: Directory to which the paths of the images are relative.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.searched: dict[tuple[int, int], tuple[Path, Path]] = {}  # A folder and the class in which it was found.

    def images(self, directory: Path, left_out: Counter[str]) -> Iterator[str]:
        """Yield the paths of the images in ``directory``, relative to the root; see :func:`image_files`."""
        at = os.path.relpath(directory, self.root)
        above: dict[tuple[int, int], Path] = {}
        parent = self.root
        for name in () if at == "." else ("", *Path(at).parts[:-1]):
            parent = parent / name
            above[_identity(parent)] = parent
        yield from self._files(at, directory, left_out, above)

    def _files(
        self, at: str, directory: Path, left_out: Counter[str], above: dict[tuple[int, int], Path]
    ) -> Iterator[str]:
        folder = self.root / at
        identity = _identity(folder)
        if identity in above:
            raise ConfigurationError(
                f"{folder} is a link to {above[identity]}, which contains the link: remove the link, because images "
                "would be read twice"
            )
        if identity in self.searched:
            earlier, owner = self.searched[identity]
            if owner != directory:
                raise ConfigurationError(
                    f"{folder} and {earlier} are the same folder, so that its images would be in {directory.name} and "
                    f"in {owner.name}: remove one of the links"
                )
            left_out[f"folders that links repeat ({earlier.name})"] += 1
            return
        self.searched[identity] = folder, directory
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    is_folder = entry.is_dir()
                    is_image = not is_folder and entry.name.lower().endswith(EXTENSIONS)
                    if entry.name[0] == ".":
                        left_out["hidden"] += is_image or is_folder
                    elif is_image:
                        yield os.path.join(at, entry.name)
                    elif is_folder:
                        inside = os.path.join(at, entry.name)
                        yield from self._files(inside, directory, left_out, {**above, identity: folder})
                    else:
                        left_out[Path(entry.name).suffix.lower() or "without an extension"] += 1
        except OSError as error:
            raise _unreadable(folder, error) from error


def _identity(folder: Path) -> tuple[int, int]:
    try:
        status = folder.stat()
    except OSError as error:
        raise _unreadable(folder, error) from error
    return status.st_dev, status.st_ino


def _unreadable(folder: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"{folder} cannot be read ({error.strerror}): give this user read permission, or remove the folder"
    )
