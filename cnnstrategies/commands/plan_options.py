"""What ``cnnstrategies plan`` takes beside a configuration."""

from dataclasses import dataclass
from pathlib import Path


@dataclass
class PlanOptions:
    """What a plan needs beyond the configuration.

    Attributes:
        search: Choose stages and replicas too, for the configuration's devices. Done anyway where the strategy is not
            a hybrid pipeline.
        batch_size: Samples of a batch over all devices; when left out, the data's global_batch_size (of which
            accumulate_grad_batches are made), or its batch_size for each replica of the first stage.
        bandwidth: Of the connection between two devices, in Mbit/s; measured between two processes of this machine
            when left out.
        latency: Of that connection, in ms.
        optimizer_states: Copies of the parameters that the optimizer holds: 2 for Adam, 1 for SGD with momentum.
        plot: Draw the predicted timetable into this PNG file.
        trace: Write the predicted timetable into this JSON file, for Perfetto or chrome://tracing.
    """

    search: bool = False
    batch_size: int | None = None
    bandwidth: float | None = None
    latency: float = 0.05
    optimizer_states: int = 2
    plot: Path | None = None
    trace: Path | None = None
