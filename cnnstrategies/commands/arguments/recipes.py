"""Named configurations: YAML files that are part of the package. ``cnnstrategies configs`` lists and prints them."""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING

from cnnstrategies.commands.arguments.keys import closest
from cnnstrategies.commands.arguments.refuse import show
from cnnstrategies.errors import ConfigurationError

if TYPE_CHECKING:
    from cnnstrategies.commands.arguments.options import ConfigsOptions

MOST_FILES = 5  # Largest number of files that an error message lists.
FOLDER = Path(__file__).parents[2] / "configs"


def names() -> list[str]:
    """Return the sorted names of all named configurations.

    A name is the file's path in the folder of configurations, without ``.yaml``.
    """
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def find(file_or_name: str) -> Path:
    """Return the path of the configuration file for a value of ``--config``.

    The value is the path of an existing file, or the name of a named configuration.

    Raises:
        ConfigurationError: Neither a file nor a named configuration has this name.
    """
    if Path(file_or_name).is_file():
        return Path(file_or_name)
    name = re.sub(r"^(?:\./)?(?:configs/)?(.*?)(?:\.yaml)?$", r"\1", file_or_name)
    if name in names():
        return FOLDER / f"{name}.yaml"
    guess = closest(name, names())
    folder = Path(file_or_name).parent
    files = sorted(str(file) for pattern in ("*.yaml", "*.yml") for file in folder.glob(pattern))
    if guess == ";" and files:
        like = {file: SequenceMatcher(None, Path(file).stem, Path(name).stem).ratio() for file in files}
        best = max(files, key=lambda file: like[file])
        guess = f"; did you mean {best!r}?" if like[best] > 0.6 else ";"
        shown = f"{', '.join(files[:MOST_FILES])}{', ...' if len(files) > MOST_FILES else ''}"
        guess = guess if guess != ";" else f"; the folder has {shown};"
    raise ConfigurationError(
        f"config: there is no file and no configuration with the name {file_or_name!r}{guess} `cnnstrategies configs` "
        "lists the configurations"
    )


def with_files(args: Sequence[str]) -> list[str]:
    """Replace each name of a configuration after ``--config`` by the path of its file.

    Args:
        args: Command-line arguments.

    Returns:
        The changed command-line arguments.
    """
    result = list(args)
    for position, argument in enumerate(args):
        if match := re.fullmatch(r"(--config|-c)=(.+)", argument):
            result[position] = f"{match[1]}={find(match[2])}"
        elif argument in ("--config", "-c") and position + 1 < len(args):
            result[position + 1] = str(find(args[position + 1]))
    return result


def main(options: "ConfigsOptions") -> None:
    """Print the configurations that the options name, or list all configurations with their first comment lines."""
    if options.names:
        show("\n".join(find(name).read_text(encoding="utf-8").rstrip() for name in options.names))
        return
    width = max(map(len, names()))
    first = {name: (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0] for name in names()}
    show("\n".join(f"{name:{width}}  {line.removeprefix('# ')}" for name, line in first.items()))
