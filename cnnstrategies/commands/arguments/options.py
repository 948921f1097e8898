"""Declarations of all commands with their options. The parser and the help are made from these declarations.

Each declaration is a dataclass. The docstring of the class describes the command, its fields are the options, and its
section ``Attributes`` describes each option. Every start imports this module, so it must not import torch or Lightning.
"""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cnnstrategies.cluster.options import ClusterOptions, KubernetesOptions, RayOptions
from cnnstrategies.commands.arguments.command import Command, Configuration, declare, option, positional
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import Duration, Size

if TYPE_CHECKING:
    from cnnstrategies.planning.costs import Link
    from cnnstrategies.planning.devices import Device

DOCTOR = "doctor"  # Value of `plan --have` for the devices that `doctor` finds.
COMMANDS: dict[str, Command] = {}  # Commands by name. The help lists them in this order.
PROGRAMS: dict[str, Command] = {}  # Programs of this package other than `cnnstrategies`, by name.
command = partial(declare, COMMANDS)


def _launchers() -> list[str]:
    from cnnstrategies.cluster.launchers import job_launchers

    return job_launchers()


def _process_number() -> int:
    from cnnstrategies.cluster.launchers import process_number

    return process_number(os.environ)


@command(
    "fit",
    "train a network, as a configuration describes",
    "--config quickstart",
    "run.lightning_cli",
    Configuration.LIGHTNING,
    keys=(
        ("--trainer.max_epochs N", "number of passes over the training data"),
        ("--trainer.fast_dev_run true", "train on one batch, and write nothing"),
        ("--run_name NAME", "name of the run; the same command again continues from the run's last checkpoint"),
        ("--seed_everything N", "seed of all random numbers (default: 1)"),
    ),
)
@dataclass
class FitOptions:
    """Train the network with the configured strategy, and write checkpoints and logs to the run's folder.

    Attributes:
        ckpt_path: Checkpoint to continue from: a file, or `last` or `best` for a checkpoint of the newest run in the
            logger's folder. This option is ignored if `--run_name` names a run that already has a checkpoint. Training
            then continues from that run's last checkpoint.
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
    "evaluate a checkpoint on the test data",
    "--config run.yaml --ckpt_path best",
    "run.lightning_cli",
    Configuration.LIGHTNING,
)
@command(
    "validate",
    "evaluate a checkpoint on the validation data",
    "--config run.yaml --ckpt_path best",
    "run.lightning_cli",
    Configuration.LIGHTNING,
)
@dataclass
class EvaluationOptions:
    """Evaluate a network, or predict with it, without training.

    Attributes:
        ckpt_path: Checkpoint with the weights: a file, or `best` or `last` for a checkpoint of the newest run in the
            logger's folder.
    """

    ckpt_path: str | None = option(None, metavar="FILE")


@command(
    "quantize",
    "quantise a trained network to int8",
    "--config run.yaml --ckpt_path best.ckpt",
    "run.lightning_cli",
    Configuration.LIGHTNING,
)
@dataclass
class QuantizeOptions:
    """Quantise a trained network to int8, and print its quality, size and inference time before and after quantisation.

    Attributes:
        ckpt_path: Checkpoint of the trained network: a file, `best` or `last`.
        output: File to write. ``cnnstrategies.deploy.quantize.load_quantized`` loads it.
        calibration_batches: Number of training batches with which the ranges of the activations are measured.
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
    """Export a trained network for use without this package.

    The command also prints the largest difference between the logits of the exported and the original network.

    Attributes:
        ckpt_path: Checkpoint of the trained network: a file, `best` or `last`.
        output: Folder to create for the exported network, export.json and the model card README.md.
        format: File format of the exported network.
    """

    ckpt_path: Path
    output: Path = option(Path("exported"), metavar="FOLDER")
    format: Literal["torch_export", "onnx", "safetensors"] = "torch_export"


@command(
    "plan",
    "predict step times and costs of the strategies before a run",
    "--config quickstart --trainer.devices 4",
    "plan.command",
    Configuration.BESIDE,
)
@dataclass
class PlanOptions:
    """Predict for each strategy how long a step takes and what it costs.

    The command measures the network of a configuration on this machine, or reads a profile of a network from a file.

    Attributes:
        profile: CSV file with the costs of the network's layers. With this option no configuration is needed.
        profile_batch: Number of samples in the batch with which the profile was measured.
        cluster: YAML file that describes the machines. By default there are ``trainer.devices`` x ``trainer.num_nodes``
            devices of the same speed, with equal connections between all devices.
        have: Devices with unequal memories and speeds, in the order of the ranks, such as ``"1x24GiB@1.0,
            2x8GiB@0.4"``: a number of devices, the memory of each, and the speed relative to the device that is
            measured. With ``doctor``, the devices are those that ``cnnstrategies doctor`` finds on this machine. The
            command then prints the three best plans with each device's peak memory, and writes the best plan.
        largest_batch: Find the largest global batch that fits into the devices' memory by prediction, and confirm it
            with one step on this machine.
        bandwidth: Bandwidth of the connections in Mbit/s, if ``--cluster`` is not given. By default the bandwidth
            between two processes on this machine is measured.
        latency: Latency of the connections in ms. It is used only with ``--bandwidth``.
        sum_latency: Time in ms that a step takes longer for a sum of a few numbers over two devices, as of batch norm's
            statistics. It is used only with ``--bandwidth``. By default it is 1 with CPUs, and 0.03 with GPUs.
        exchange_latency: Time in ms that a step takes longer if two devices exchange small messages, as the rows at the
            edges of an image. It is used only with ``--bandwidth``. By default it is 0.5 with CPUs, and 0.02 with GPUs.
        batch_size: Number of samples in a step over all devices. By default it is the data module's global_batch_size,
            or else the data module's batch_size times the number of devices.
        batch_per_device: Number of samples in a step on each device, instead of ``--batch_size``.
        search: Choose the stages, replicas and microbatches of the hybrid pipeline, even if the configuration already
            sets them.
        optimizer_states: Number of values that the optimizer stores for each parameter: 2 for Adam, 1 for SGD with
            momentum. By default it is read from the configuration's optimizer. Without a configuration it is 2.
        write: YAML file for the best strategy. Pass the file to ``fit`` as an additional ``--config``. With ``--have``
            and a configuration the file is plan.yaml by default, and contains the whole configuration.
        timetable: PNG file for a drawing of the hybrid pipeline's predicted timetable.
    """

    profile: Path | None = None
    profile_batch: int | None = None
    cluster: Path | None = None
    have: str | None = option(None, metavar="DEVICES")
    largest_batch: bool = False
    bandwidth: float | None = None
    latency: float = 0.05
    sum_latency: float | None = None
    exchange_latency: float | None = None
    batch_size: int | None = None
    batch_per_device: int | None = None
    search: bool = False
    optimizer_states: int | None = None
    write: Path | None = None
    timetable: Path | None = None

    def __post_init__(self) -> None:
        if self.have is not None and self.cluster is not None:
            raise ConfigurationError(
                f"have={self.have!r} and cluster={self.cluster} both describe the devices: leave one of them out; in a "
                "cluster file, `devices` of a machine can be a text as for --have"
            )

    def link(self, backend: str) -> "Link | None":
        """Return the connection that the options describe; None if they describe none.

        Args:
            backend: Backend of torch.distributed, whose prices of sums and exchanges are used if no option sets them.
        """
        from cnnstrategies.planning.costs import UNMEASURED, Link

        if self.bandwidth is None:
            return None
        prices = (
            default if milliseconds is None else milliseconds / 1e3
            for milliseconds, default in zip(
                (self.sum_latency, self.exchange_latency), UNMEASURED[backend], strict=True
            )
        )
        return Link(self.bandwidth * 1e6 / 8, self.latency / 1e3, 0.0, *prices)

    def samples_of_a_step(self, devices: int) -> int | None:
        """Return the number of samples in a step over all devices. Return None if no option sets this number."""
        if self.batch_size is not None and self.batch_per_device is not None:
            raise ConfigurationError("batch_size and batch_per_device set the same number: leave one of them out")
        return self.batch_size if self.batch_per_device is None else self.batch_per_device * devices

    def owned_devices(self) -> "tuple[Device, ...]":
        """Return the devices that ``--have`` lists.

        Raises:
            ConfigurationError: The option is not a list of devices.
        """
        from cnnstrategies.planning.devices import read_devices

        assert self.have is not None
        return read_devices(self.have, "have")


@command(
    "verify",
    "check that a strategy trains the same weights as one device",
    "--config quickstart --steps 8",
    configuration=Configuration.BESIDE,
)
@dataclass
class VerifyOptions:
    """Train for a few steps under the configuration's strategy and on one device, and compare the results.

    Attributes:
        steps: Number of optimizer steps of each run.
        precision: Precision of both runs, as Lightning names it. In lower precisions than float64, the errors of
            rounding are measured on one device.
    """

    steps: int = 8
    precision: Literal["64-true", "32-true", "bf16-mixed", "16-mixed"] = "64-true"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigurationError(f"steps={self.steps}: nothing is trained; use 1 or more")


@command(
    "tune",
    "find the fastest settings",
    "--config quickstart --minutes 5",
    "tune.command",
    Configuration.BESIDE,
)
@dataclass
class TuneOptions:
    """Measure which settings make the training of a configuration fastest on this machine.

    Attributes:
        allow: Kinds of settings to try although they change the trained weights: ``precision`` tries bf16 and TF32.
        minutes: Largest duration of the command.
        output: YAML file for the fastest settings. Use the file as in ``fit --config X --config tuned.yaml``.
        learning_rate: Suggest a learning rate instead, with Lightning's learning-rate finder on one device.
        picture: PNG file for the curve of the loss over the learning rate.
    """

    allow: list[Literal["precision"]] = field(default_factory=list)
    minutes: float = option(5.0, metavar="MINUTES")
    output: Path = Path("tuned.yaml")
    learning_rate: bool = False
    picture: Path = Path("learning_rate.png")


@command(
    "scaling",
    "find out why training on more devices is not faster, and what helps",
    "--config quickstart --devices 1,2",
    "scaling.command",
    Configuration.BESIDE,
)
@dataclass
class ScalingOptions:
    """Train for some minutes on one device and on more devices, and list the causes of lost speed.

    The cause with the largest possible gain comes first.

    Attributes:
        devices: Numbers of devices to train on. By default they are 1, and the larger of 2 and ``trainer.devices``.
        minutes: Largest duration of the measurement. With ``--try`` it is also the largest duration of the trials.
        picture: PNG file for a drawing of the samples/s, and of the times that the parts of a step take.
        try_: Measure the proposed settings, and write the settings that are faster to a file.
        output: YAML file for the faster settings. Use the file as in ``fit --config X --config scaling.yaml``.
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
    "submit a run to a cluster",
    "fit --config run.yaml --cluster.time 2:00:00",
    "submit.command",
    Configuration.BESIDE,
    sections=(("cluster", ClusterOptions), ("cluster.kubernetes", KubernetesOptions), ("cluster.ray", RayOptions)),
)
@dataclass
class SubmitOptions:
    """Check a configuration, and submit its run to a cluster.

    Attributes:
        command: The command that the job runs. Only ``fit`` is possible.
        to: Launcher to which the run is submitted.
        dry_run: Print the job instead of submitting it.
    """

    command: str = positional(metavar="fit")
    to: str = option("slurm", choices=_launchers)
    dry_run: bool = False


@command("watch", "show the progress of a run with a parameter server", "--run runs/digits")
@dataclass
class WatchOptions:
    """Show the workers and servers of a run with a parameter server, their speeds and waiting times, and failures.

    The display does not slow the run down. Ctrl-C ends the display.

    Attributes:
        run: Folder of the run, or address of its coordinator: tcp://HOST:PORT or ipc://PATH.
        key_file: File with the run's keys. By default its path is read from the run's folder.
        once: Print the table once, and exit.
    """

    run: str = option(metavar="RUN")
    key_file: Path | None = None
    once: bool = False


@command(
    "join",
    "add a worker to a run with a parameter server",
    "--run runs/digits --config run.yaml",
    configuration=Configuration.BESIDE,
)
@dataclass
class JoinOptions:
    """Add this process as a worker to a parameter server's run that is in progress.

    The configuration must be the run's own configuration.

    Attributes:
        run: Folder of the run, or address of its coordinator: tcp://HOST:PORT or ipc://PATH.
        key_file: File with the run's keys. By default its path is read from the run's folder.
    """

    run: str = option(metavar="RUN")
    key_file: Path | None = None


@command("doctor", "check the machines of a cluster before training", "")
@dataclass
class DoctorOptions:
    """Check the versions, the connections and the shared directory of a cluster.

    Start the command with the launcher that will start the training (srun, torchrun or mpirun), one process on each
    machine, for example ``srun cnnstrategies doctor``.

    Attributes:
        shared: Directory on shared storage where checkpoints will be saved; by default the working directory.
        interface: Name or subnet of the network interface; by default the interface on the route to the other hosts.
        wait: Longest time to wait for the other hosts, in seconds or as 1:30 (minutes and seconds).
    """

    shared: Path = option(Path(), metavar="FOLDER")
    interface: str | None = option(None, metavar="NAME")
    wait: Duration = 60.0


@command("pack", "pack a folder of images into shards", "datasets/imagenet shards/imagenet --size 256")
@dataclass
class PackOptions:
    """Pack a folder of images into tar files (shards) with an index, for ShardedImageDataModule.

    WebDataset can also read the shards.

    Attributes:
        source: Folder of images, with the subfolders that ImageFolderDataModule needs.
        out: Folder to create for the shards and the index.
        size: Largest length of an image's shorter side, in pixels. Larger images are shrunk to this length and encoded
            as JPEG. By default images do not change.
        quality: Encode all images as JPEG with this quality, from 1 to 95. With ``--size`` it is 90 by default.
        shard_size: Approximate size of all images in a shard, before the images are shrunk: a number of bytes, or a
            size such as 256MB or 1GiB.
        workers: Number of threads that write shards at the same time; by default one for each core.
        bits: Number of bits that images with 16 bits per pixel use, from 8 to 16; by default the number that 32
            training images use. These images are packed with 8 bits.
        check: Folder of shards to check. Each shard is compared with its checksum in the index, and nothing is packed.
    """

    source: Path | None = positional(None, metavar="SOURCE")
    out: Path | None = positional(None, metavar="OUT")
    size: int | None = None
    quality: int | None = None
    shard_size: Size = "256MB"
    workers: int | None = None
    bits: int | None = None
    check: Path | None = option(None, metavar="FOLDER")


@command("configs", "list the named configurations, or print a configuration", "quickstart", "arguments.recipes")
@dataclass
class ConfigsOptions:
    """List the named configurations, which are YAML files that are part of the package, or print some of them.

    Attributes:
        names: Names of the configurations to print. Without a name all named configurations are listed.
    """

    names: list[str] = positional(default_factory=list, metavar="NAME")


@declare(PROGRAMS, "cnnstrategies-server", "start a dedicated server", "--config run.yaml --index 0", "server")
@dataclass
class ServerOptions:
    """Start a dedicated server for the strategy ``parameter_server``.

    Attributes:
        config: The run's configuration file. Its strategy must set ``endpoints`` and ``coordinator``. The option may be
            repeated; later files override earlier files.
        index: Position of this server's address in ``endpoints``, from 0. By default it is the process number from srun
            or mpirun, or else 0.
        make_keys: File for the keys of a new run. The command writes this file, and starts no server.
    """

    config: list[Path] = field(default_factory=list)
    index: int = field(default_factory=_process_number)
    make_keys: Path | None = None
