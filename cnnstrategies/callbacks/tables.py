"""Tables of names and texts on the terminal."""

from collections.abc import Sequence
from pathlib import Path


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of a name and a text, which may have several lines; a terminal breaks what is longer than it is."""
    width = max(len(name) for name, _ in rows)
    lines = [title]
    for name, text in rows:
        first, *others = text.split("\n")
        lines += [f"  {name:<{width}}  {first}", *(f"  {'':<{width}}  {line}" for line in others)]
    print("\n".join(lines), flush=True)


def relative(path: str) -> str:
    """A path from the working directory, if it is in there; a URL as it is."""
    whole, here = Path(path).resolve(), Path.cwd()
    return str(whole.relative_to(here)) if "://" not in path and whole.is_relative_to(here) else path
