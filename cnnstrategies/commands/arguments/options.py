"""Every command of the command line, with its options: what is declared here is parsed, and shown as help.

A declaration is a dataclass. Its docstring describes the command, its fields are the options, and ``Attributes`` has a
sentence for each option. This module imports neither torch nor Lightning, because every start imports it.
"""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from cnnstrategies.cluster.options import ClusterOptions, KubernetesOptions, RayOptions
from cnnstrategies.commands.arguments.command import Command, Configuration, declare, option, positional
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import Duration, Size

COMMANDS: dict[str, Command] = {}  # in the order of the help
PROGRAMS: dict[str, Command] = {}  # programs beside `cnnstrategies`
command = partial(declare, COMMANDS)


def _launchers() -> list[str]:
    from cnnstrategies.cluster.launchers import job_launchers

    return job_launchers()


def _process_number() -> int:
    from cnnstrategies.cluster.launchers import process_number

    return process_number(os.environ)


@command(
    "fit",
    "train, as a configuration says",
    "--config quickstart",
    "run.lightning_cli",
    Configuration.LIGHTNING,
    keys=(
        ("--trainer.max_epochs N", "passes over the data"),
        ("--trainer.fast_dev_run true", "train on one batch, and write nothing"),
        ("--run_name NAME", "the same command again goes on from the run's last checkpoint"),
        ("--seed_everything N", "seed of all random numbers (default: 1)"),
    ),
)
@dataclass
class FitOptions:
    """Train a network.

    Attributes:
        ckpt_path: Checkpoint to go on from: a file, or the `last` or `best` of this run's name.
    """

    ckpt_path: str | None = option(None, metavar="FILE")


@command(
    "predict",
    "write predictions to a file",
    "--config run.yaml --ckpt_path best",
    "run.lightning_cli",
    Configuration.LIGHTNING,
    keys=(
        (
            "--predictions.images FOLDER",
            "predict the images of this folder, at any depth, instead of the data module's",
        ),
        ("--predictions.output FILE", "CSV file to write (default: predictions.csv in the log directory)"),
    ),
)
@command(
    "test",
    "measure on the test data",
    "--config run.yaml --ckpt_path best",
    "run.lightning_cli",
    Configuration.LIGHTNING,
)
@command(
    "validate",
    "measure on the validation data",
    "--config run.yaml --ckpt_path best",
    "run.lightning_cli",
    Configuration.LIGHTNING,
)
@dataclass
class EvaluationOptions:
    """Evaluate a network, or predict with it, without training.

    Attributes:
        ckpt_path: Checkpoint with the weights: a file, or the `best` or `last` of this run's name.
    """

    ckpt_path: str | None = option(None, metavar="FILE")


@command(
    "quantize",
    "turn a trained network into int8",
    "--config run.yaml --ckpt_path best.ckpt",
    "run.lightning_cli",
    Configuration.LIGHTNING,
)
@dataclass
class QuantizeOptions:
    """Quantise a trained network to int8, and print quality, size and time before and after.

    Attributes:
        ckpt_path: The trained checkpoint, or `best` or `last`.
        output: File to write; ``cnnstrategies.deploy.quantize.load_quantized`` loads it.
        calibration_batches: Number of training batches that set the ranges of the activations.
    """

    ckpt_path: Path
    output: Path = Path("quantized.pt2")
    calibration_batches: int = 16


@command(
    "export",
    "write a trained network for use elsewhere",
    "--config run.yaml --ckpt_path best.ckpt",
    "run.lightning_cli",
    Configuration.LIGHTNING,
)
@dataclass
class ExportOptions:
    """Write a trained network for use without this package, and print how far its logits are from the original's.

    Attributes:
        ckpt_path: The trained checkpoint, or `best` or `last`.
        output: Folder to make, for the network and export.json.
        format: Format of the network.
    """

    ckpt_path: Path
    output: Path = option(Path("exported"), metavar="FOLDER")
    format: Literal["torch_export", "onnx"] = "torch_export"


@command(
    "plan",
    "price the strategies before a run",
    "--config quickstart --trainer.devices 4",
    "plan.command",
    Configuration.BESIDE,
)
@dataclass
class PlanOptions:
    """Predict for each strategy how long a step takes and what it costs.

    The network is the configuration's, measured on this machine, or that of a profile in a file.

    Attributes:
        profile: CSV file with the costs of the network's nodes, in place of a configuration.
        profile_batch: Samples of the batch that the profile was taken with.
        cluster: YAML file that describes the machines. By default ``trainer.devices`` and ``trainer.num_nodes`` are
            equal devices with the same connection between any two.
        bandwidth: Bandwidth of that connection, in Mbit/s; by default it is measured between two processes of this
            machine.
        latency: Latency of that connection, in ms.
        batch_size: Samples of a step over all devices; by default the data's global_batch_size, or its batch_size for
            each device.
        batch_per_device: Samples of a step on each device, in place of batch_size.
        search: Also choose the hybrid pipeline's stages, replicas and microbatches if the configuration names them.
        optimizer_states: Copies of the parameters that the optimizer holds: 2 for Adam, 1 for SGD with momentum. By
            default those of the configuration's optimizer, and 2 without a configuration.
        write: YAML file for the best strategy, which ``fit`` takes as one more ``--config``.
        timetable: PNG file for a picture of the hybrid pipeline's predicted timetable.
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
        """Return the samples of a step over all devices; None if the options leave them open."""
        if self.batch_size is not None and self.batch_per_device is not None:
            raise ConfigurationError("batch_size and batch_per_device say the same: leave one of them out")
        return self.batch_size if self.batch_per_device is None else self.batch_per_device * devices


@command(
    "verify",
    "see that a strategy trains the same model as one device",
    "--config quickstart --steps 8",
    configuration=Configuration.BESIDE,
)
@dataclass
class VerifyOptions:
    """Train a few steps under the configuration's strategy and on one device, and compare.

    Attributes:
        steps: Optimizer steps of each run.
    """

    steps: int = 8

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigurationError(f"steps={self.steps}: nothing is trained; give at least 1")


@command(
    "tune",
    "find the fastest settings",
    "--config quickstart --minutes 5",
    "tune.command",
    Configuration.BESIDE,
)
@dataclass
class TuneOptions:
    """Find the settings with which this machine trains a configuration fastest, by measurement.

    Attributes:
        allow: Settings that may be changed although they change what is learned: ``precision`` (bf16, TF32).
        minutes: Longest time.
        output: YAML file for the settings: ``fit --config X --config tuned.yaml`` takes it.
    """

    allow: list[Literal["precision"]] = field(default_factory=list)
    minutes: float = option(5.0, metavar="MINUTES")
    output: Path = Path("tuned.yaml")


@command(
    "scaling",
    "see why more devices are not faster, and what would help",
    "--config quickstart --devices 1,2",
    "scaling.command",
    Configuration.BESIDE,
)
@dataclass
class ScalingOptions:
    """Train for some minutes on one device and on more, and list the causes of lost speed, largest possible gain first.

    Attributes:
        devices: Numbers of devices to train on; by default 1, and the configuration's or else 2.
        minutes: Longest time, and as long again with ``--try``.
        picture: PNG file for the samples/s and the parts of a step.
        try_: Measure the proposed settings, and write those that are faster.
        output: YAML file for these settings: ``fit --config X --config scaling.yaml`` takes it.
    """

    devices: list[int] = option(default_factory=list, metavar="1,2,4")
    minutes: float = option(3.0, metavar="MINUTES")
    picture: Path = Path("scaling.png")
    try_: bool = False
    output: Path = Path("scaling.yaml")

    def __post_init__(self) -> None:
        if any(count < 1 for count in self.devices):
            counts = ",".join(map(str, self.devices))
            raise ConfigurationError(f"devices={counts}: give numbers of devices, as in --devices 1,2,4")
        self.devices = sorted({*self.devices})


@command(
    "submit",
    "send a run to a cluster's queue",
    "fit --config run.yaml --cluster.time 2:00:00",
    "submit.command",
    Configuration.BESIDE,
    sections=(("cluster", ClusterOptions), ("cluster.kubernetes", KubernetesOptions), ("cluster.ray", RayOptions)),
)
@dataclass
class SubmitOptions:
    """Check a configuration, and send its run to a cluster.

    Attributes:
        command: Command of the job; it is always ``fit``.
        to: The launcher that the run is sent to.
        dry_run: Print the job, and submit nothing.
    """

    command: str = positional(metavar="fit")
    to: str = option("slurm", choices=_launchers)
    dry_run: bool = False


@command("watch", "see how a run with a parameter server goes", "--run runs/digits")
@dataclass
class WatchOptions:
    """Show the members of a run with a parameter server, their speeds and waiting times, and what has failed.

    The run is not slowed down. Ctrl-C ends the display.

    Attributes:
        run: The run's folder, or its coordinator's address: tcp://HOST:PORT or ipc://PATH.
        key_file: File with the run's keys; by default the one that the run's folder names.
        once: Print the table once, and end.
    """

    run: str = option(metavar="RUN")
    key_file: Path | None = None
    once: bool = False


@command(
    "join",
    "help a run with a parameter server",
    "--run runs/digits --config run.yaml",
    configuration=Configuration.BESIDE,
)
@dataclass
class JoinOptions:
    """Add this process to a run with a parameter server, as one more worker, with the run's own configuration.

    Attributes:
        run: The run's folder, or its coordinator's address: tcp://HOST:PORT or ipc://PATH.
        key_file: File with the run's keys; by default the one that the run's folder names.
    """

    run: str = option(metavar="RUN")
    key_file: Path | None = None


@command("doctor", "check the machines before training on them", "")
@dataclass
class DoctorOptions:
    """Check versions, connections and the shared directory of a cluster.

    Start it as the training will be started, with srun, torchrun or mpirun, one process on each machine.

    Attributes:
        shared: Directory on shared storage, for checkpoints; by default the working directory.
        interface: Network interface, by name or subnet; by default that of the route.
        wait: How long to wait for the other hosts, in seconds or as 1:30.
    """

    shared: Path = option(Path(), metavar="FOLDER")
    interface: str | None = option(None, metavar="NAME")
    wait: Duration = 60.0


@command("pack", "put images into shards", "datasets/imagenet shards/imagenet --size 256")
@dataclass
class PackOptions:
    """Put images into tar files (shards) with an index, for ShardedImageDataModule. WebDataset's tools read them too.

    Attributes:
        source: Folder of images, as ImageFolderDataModule reads it.
        out: Folder to make.
        size: Shrink larger images to this shorter side, as JPEGs; by default images stay as they are.
        quality: Make every image a JPEG of this quality, 1 to 95; by default 90 with ``--size``.
        shard_size: Approximate size of a shard, measured in files of the source: bytes, or such as 256MB or 1GiB.
        workers: Number of shards that are written at the same time; by default one per core.
        check: Compare packed shards with their checksums, and do nothing else.
    """

    source: Path | None = positional(None, metavar="SOURCE")
    out: Path | None = positional(None, metavar="OUT")
    size: int | None = None
    quality: int | None = None
    shard_size: Size = "256MB"
    workers: int | None = None
    check: Path | None = option(None, metavar="FOLDER")


@command("configs", "list the recipes, or print one", "quickstart", "arguments.recipes")
@dataclass
class ConfigsOptions:
    """List the configurations that come with the package, with a line each, or print those that are named.

    Attributes:
        names: Recipes to print.
    """

    names: list[str] = positional(default_factory=list, metavar="NAME")


@declare(PROGRAMS, "cnnstrategies-server", "serve a run's parameters", "--config run.yaml --index 0", "server")
@dataclass
class ServerOptions:
    """Start a dedicated server of a parameter server, on a machine of its own.

    Attributes:
        config: The run's configuration, whose strategy names ``endpoints`` and ``coordinator``; later files add to it.
        index: Number of the endpoint that this server is; by default the number that srun or mpirun gives it, or 0.
        make_keys: File for a new pair of keys for a run; nothing is served.
    """

    config: list[Path] = field(default_factory=list)
    index: int = field(default_factory=_process_number)
    make_keys: Path | None = None
