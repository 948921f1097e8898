"""Lightning's progress bar, so narrow that its line has room for the metrics in a terminal of 80 columns."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import BatchesProcessedColumn, ProcessingSpeedColumn
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from typing_extensions import override


class ProgressBar(RichProgressBar):
    """Epoch, batches, speed and time left, and what is logged with ``prog_bar=True``, without a version's number."""

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
