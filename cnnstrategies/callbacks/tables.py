"""What a run shows on the terminal: tables of names and texts, and a progress bar."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import BatchesProcessedColumn, ProcessingSpeedColumn
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from typing_extensions import override

BORDERS = 7  # Columns of lines and spaces beside the two columns.


class Whole(str):
    """A text that is never broken into lines, such as a path that will be copied."""

    __slots__ = ()


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of a name and a text, which may have several lines.

    Lines are as long as the terminal is wide, and what does not fit as a whole is printed under the table; in a file
    lines are as long as need be.
    """
    console = Console()
    names = max(len(name) for name, _ in rows)
    longest = [max((len(word) for word in _words(text)), default=0) for _, text in rows]
    if not console.is_terminal:
        console.width = max(console.width, names + max(longest) + BORDERS)
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    below = []
    for (name, text), length in zip(rows, longest, strict=True):
        if isinstance(text, Whole) and names + length + BORDERS > console.width:
            below.append(f"{name}: {text}")
        else:
            table.add_row(name, Text(text))  # Brackets in a path are no markup.
    # Without spaces up to the right margin.
    console.print(table, soft_wrap=True)
    for line in below:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def relative(path: str) -> Whole:
    """A path from the working directory, if it is in there; a URL as it is."""
    whole, here = Path(path).resolve(), Path.cwd()
    return Whole(whole.relative_to(here) if "://" not in path and whole.is_relative_to(here) else path)


def _words(text: str) -> list[str]:
    return [text] if isinstance(text, Whole) else text.split()


class ProgressBar(RichProgressBar):
    """Lightning's, so narrow that a line of 80 columns has room for the metrics, and without a version's number."""

    @override
    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        style = self.theme
        return [
            TextColumn("[progress.description]{task.description}"),
            BarColumn(8, complete_style=style.progress_bar, finished_style=style.progress_bar_finished),
            BatchesProcessedColumn(style=style.batch_progress),
            ProcessingSpeedColumn(style=style.processing_speed),
            TimeRemainingColumn(compact=True),
        ]

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}
