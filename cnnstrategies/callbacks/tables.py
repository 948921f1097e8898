"""What a run shows on the terminal: tables of names and texts, and a progress bar."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import BatchesProcessedColumn, ProcessingSpeedColumn
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from typing_extensions import override


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
