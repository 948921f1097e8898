"""What the commands take beside, or instead of, a configuration: known before their code is imported."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cnnstrategies.errors import ConfigurationError


def doctor_parser() -> argparse.ArgumentParser:
    """The parser of ``doctor``."""
    from cnnstrategies.cluster.launchers import start_programs

    result = argparse.ArgumentParser(
        prog="cnnstrategies doctor",
        description="Check a cluster before training: versions, connections, shared directory. Start it as the "
        f"training will be, with {start_programs()}, one process on each machine.",
        allow_abbrev=False,
    )
    result.add_argument(
        "--shared", type=Path, default=Path(), help="directory for checkpoints on shared storage (default: this one)"
    )
    result.add_argument("--interface", help="network interface, by name or subnet (default: by route)")
    result.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the other hosts (default: 60)")
    return result


def parse_join(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of ``join``, and the words of the configuration."""
    result = argparse.ArgumentParser(prog="cnnstrategies join", allow_abbrev=False, add_help=False)
    result.add_argument("--run", required=True)
    result.add_argument("--key_file")
    return result.parse_known_args(words)


QUALITY, SHARD_MB = 90, 256


def pack_parser() -> argparse.ArgumentParser:
    """The parser of ``pack``."""
    result = argparse.ArgumentParser(
        prog="cnnstrategies pack",
        description="Put images into tar files (shards) with an index, for ShardedImageDataModule; WebDataset's tools "
        "read them too.",
        allow_abbrev=False,
    )
    result.add_argument("source", nargs="?", type=Path, help="folder of images, as ImageFolderDataModule reads it")
    result.add_argument("out", nargs="?", type=Path, help="folder to make")
    result.add_argument("--size", type=int, help="shrink larger images to this shorter side (default: as they are)")
    result.add_argument(
        "--quality",
        type=int,
        help=f"make every image a JPEG of this quality, 1 to 95 (default with --size: {QUALITY})",
    )
    result.add_argument("--shard_mb", type=int, default=SHARD_MB, help=f"MB of a shard, about (default: {SHARD_MB})")
    result.add_argument("--workers", type=int, help="shards written at the same time (default: one per core)")
    result.add_argument("--check", type=Path, metavar="FOLDER", help="compare packed shards with their checksums")
    return result


@dataclass
class PlanOptions:
    """What a plan needs beyond the configuration, or without one.

    Attributes:
        profile: A CSV file with the costs of the network's nodes, in place of a configuration.
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
        write: Write the best strategy into this YAML file, which ``fit`` takes as one more ``--config``.
        timetable: Draw the hybrid pipeline's predicted timetable into this PNG file.
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
    write: Path | None = None
    timetable: Path | None = None

    def samples_of_a_step(self, devices: int) -> int | None:
        """Those over all devices, where the options say so."""
        if self.batch_size is not None and self.batch_per_device is not None:
            raise ConfigurationError("batch_size and batch_per_device say the same: leave one of them out")
        return self.batch_size if self.batch_per_device is None else self.batch_per_device * devices


@dataclass
class TuneOptions:
    """What is tried, for how long, and where the result goes.

    Attributes:
        allow: What may be changed although it changes what is learned: ``precision`` (bf16, TF32).
        minutes: Longest time.
        output: YAML file for the settings that were found: ``fit --config X --config tuned.yaml`` takes it.
    """

    allow: list[Literal["precision"]] = field(default_factory=list)
    minutes: float = 5.0
    output: Path = Path("tuned.yaml")


def parse_scaling(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of ``scaling``, and the words of the configuration."""
    result = argparse.ArgumentParser(prog="cnnstrategies scaling", allow_abbrev=False, add_help=False)
    result.add_argument("--devices", default="")
    result.add_argument("--minutes", type=float, default=3.0)
    result.add_argument("--picture", type=Path, default=Path("scaling.png"))
    result.add_argument("--try", dest="tries", action="store_true")
    result.add_argument("--output", type=Path, default=Path("scaling.yaml"))
    options, others = result.parse_known_args(words)
    counts = [int(one) if one.isdigit() else 0 for one in options.devices.split(",") if options.devices]
    if 0 in counts:
        raise ConfigurationError(f"devices={options.devices}: give numbers of devices, as in --devices 1,2,4")
    options.devices = sorted({*counts})
    return options, others


@dataclass
class VerifyOptions:
    """How much is trained.

    Attributes:
        steps: Optimizer steps of each run.
    """

    steps: int = 8

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigurationError(f"steps={self.steps}: nothing is trained; give at least 1")


def watch_parser() -> argparse.ArgumentParser:
    """The parser of ``watch``."""
    result = argparse.ArgumentParser(
        prog="cnnstrategies watch",
        description="Show how a run with a parameter server goes: who takes part, how fast, who waits for whom, and "
        "what has died. The run does not notice. Ctrl-C ends it.",
        allow_abbrev=False,
    )
    result.add_argument(
        "--run", required=True, help="the run's folder, or its coordinator's address: tcp://HOST:PORT or ipc://PATH"
    )
    result.add_argument("--key_file", help="the run's keys (default: those that the run's folder names)")
    result.add_argument("--once", action="store_true", help="print the table once")
    return result
