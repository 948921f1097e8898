"""What the ranks of a pipeline did in a few steps, as a picture and as a trace."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.timeline import Span, draw_timeline, write_trace
from cnnstrategies.pipeline.transport import broadcast_value


class PipelineTimeline(Callback):
    """Records some training steps of the strategy ``hybrid_pipeline`` and writes their timeline.

    ``timeline.png`` shows a row per rank, ``timeline.json`` opens in Perfetto or chrome://tracing. Both are written
    into the logger's folder when the last recorded step ends, so that a run that is stopped later has them. Recording
    costs two readings of the clock per task; on a GPU each task is waited for, which makes these steps slower. Ranks of
    several machines are as far apart in it as their clocks.

    Args:
        skip_first: Steps that are not recorded: shapes are exchanged and caches fill in the first ones.
        steps: Steps that are recorded.

    Raises:
        ConfigurationError: A number is out of its range, or the strategy is another one.
    """

    def __init__(self, skip_first: int = 5, steps: int = 1) -> None:
        if skip_first < 0:
            raise ConfigurationError(f"skip_first={skip_first} is negative; 0 records from the first step")
        if steps < 1:
            raise ConfigurationError(f"steps={steps}: record at least 1 step")
        self.skip_first = skip_first
        self.steps = steps
        self._seen = 0
        self._spans: list[Span] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen = 0
        self._spans.clear()
        self._pipeline(trainer)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._seen == self.skip_first:
            self._pipeline(trainer).watchers.append(self._spans.append)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seen += 1
        if self._seen == self.skip_first + self.steps:
            self._write(trainer, self._pipeline(trainer))

    def _write(self, trainer: Trainer, pipeline: Pipeline) -> None:
        control = pipeline.transport.control
        everyone = [broadcast_value(self._spans, rank, group=control) for rank in range(trainer.world_size)]
        pipeline.watchers.remove(self._spans.append)
        self._spans.clear()
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # On every rank: it is broadcast.
        if not trainer.is_global_zero:
            return
        spans: list[Span] = [span for own in everyone for span in own]
        names = {rank: pipeline.placement.describe(rank) for rank in range(trainer.world_size)}
        folder.mkdir(parents=True, exist_ok=True)
        which = f"step {self._seen}" if self.steps == 1 else f"steps {self.skip_first + 1} to {self._seen}"
        draw_timeline(spans, folder / "timeline.png", f"Measured, {which}", names)
        write_trace(spans, folder / "timeline.json", names)

    @staticmethod
    def _pipeline(trainer: Trainer) -> Pipeline:
        pipeline = getattr(trainer.strategy, "pipeline", None)
        if not isinstance(pipeline, Pipeline):
            raise ConfigurationError(
                f"PipelineTimeline records a pipeline, and the strategy is {type(trainer.strategy).__name__}: use "
                "strategy hybrid_pipeline, or StepProfile for where a step's time goes under any strategy"
            )
        return pipeline
