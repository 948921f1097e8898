"""Tables of names and texts for the terminal."""

from collections.abc import Sequence
from pathlib import Path


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a title and rows of a name and a text; a text may have several lines, and long lines are not wrapped."""
    width = max(len(name) for name, _ in rows)
    lines = [title]
    for name, text in rows:
        first, *others = text.split("\n")
        lines += [f"  {name:<{width}}  {first}", *(f"  {'':<{width}}  {line}" for line in others)]
    print("\n".join(lines), flush=True)


def relative(path: str) -> str:
    """Return a path relative to the working directory if it lies inside; other paths and URLs are unchanged."""
    whole, here = Path(path).resolve(), Path.cwd()
    return str(whole.relative_to(here)) if "://" not in path and whole.is_relative_to(here) else path
