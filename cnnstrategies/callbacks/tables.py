"""Tables of names and texts on the terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

BORDERS = 7  # Columns of lines and spaces beside the two columns.


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of a name and a text, which may have several lines.

    Lines are as long as the terminal is wide, and a longer path is folded; in a file it stays whole.
    """
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    console = Console()
    if not console.is_terminal:
        longest = max(len(word) for _, text in rows for word in text.split())
        console.width = max(console.width, max(len(name) for name, _ in rows) + longest + BORDERS)
    # Without spaces up to the right margin.
    console.print(table, soft_wrap=True)


def relative(path: str) -> str:
    """A path from the working directory, if it is in there; a URL as it is."""
    whole, here = Path(path).resolve(), Path.cwd()
    return str(whole.relative_to(here)) if "://" not in path and whole.is_relative_to(here) else path
