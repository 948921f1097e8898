"""Tables of names and texts for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Trainer


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a title and a table of two columns: names and texts.

    A text may have several lines. Long lines are not wrapped.
    """
    width = max(len(name) for name, _ in rows)
    lines = [title]
    for name, text in rows:
        first, *others = text.split("\n")
        lines += [f"  {name:<{width}}  {first}", *(f"  {'':<{width}}  {line}" for line in others)]
    print("\n".join(lines), flush=True)


def relative(path: str) -> str:
    """Return a path relative to the working directory. URLs, and paths outside this directory, are not changed."""
    whole, here = Path(path).resolve(), Path.cwd()
    return str(whole.relative_to(here)) if "://" not in path and whole.is_relative_to(here) else path


def rows_of_callbacks(trainer: Trainer, method: str) -> list[tuple[str, str]]:
    """Return the rows that the trainer's callbacks give to a table by the method with this name, if they have it."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
    return [row for callback in callbacks for row in getattr(callback, method, list)()]
