"""What ``cnnstrategies plan`` takes beside a configuration."""

from dataclasses import dataclass
from pathlib import Path


@dataclass
class PlanOptions:
    """What a plan needs beyond the configuration, or without one.

    Attributes:
        profile: A CSV file with the costs of the network's nodes, in place of measuring them; no configuration is
            needed then.
        profile_batch: Samples of the batch that the profile was taken with.
        cluster: A YAML file that describes the machines; when left out, ``trainer.devices`` and ``trainer.num_nodes``
            are equal devices with the same connection between any two.
        bandwidth: Of that connection, in Mbit/s; measured between two processes of this machine when left out.
        latency: Of that connection, in ms.
        batch_size: Samples of a step over all devices; when left out, the data's global_batch_size, or its batch_size
            for each device.
        batch_per_device: The same for each device.
        search: Choose the hybrid pipeline's stages, replicas and microbatches too, where the configuration names them.
        optimizer_states: Copies of the parameters that the optimizer holds: 2 for Adam, 1 for SGD with momentum; when
            left out, those of the configuration's optimizer, and 2 without one.
        samples_per_epoch: Of the training data, for the cost of an epoch; when left out, that of a million samples is
            shown.
        plot: Draw into this PNG file which strategy is the quickest for other networks and more or fewer machines.
        write: Write the best strategy into this YAML file, which ``fit`` takes as one more ``--config``.
        write_profile: Write the measured profile into this CSV file.
        timetable: Draw the hybrid pipeline's predicted timetable into this PNG file.
        trace: Write it into this JSON file, for Perfetto or chrome://tracing.
    """

    profile: Path | None = None
    profile_batch: int | None = None
    cluster: Path | None = None
    bandwidth: float | None = None
    latency: float = 0.05
    batch_size: int | None = None
    batch_per_device: int | None = None
    search: bool = False
    optimizer_states: int | None = None
    samples_per_epoch: int | None = None
    plot: Path | None = None
    write: Path | None = None
    write_profile: Path | None = None
    timetable: Path | None = None
    trace: Path | None = None
