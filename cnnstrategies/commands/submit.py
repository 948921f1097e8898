"""``cnnstrategies submit fit``: a SLURM job from a configuration."""

import itertools
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from typing_extensions import override

from cnnstrategies.cluster.job import Size, job_size, sbatch_script
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.run_name import keep_version
from cnnstrategies.cluster.submit import submit
from cnnstrategies.commands.errors import check_checkpoint, check_trainer_names
from cnnstrategies.commands.lightning_cli import CLI
from cnnstrategies.data import ImageDataModule
from cnnstrategies.data.batch_size import share
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline.contract import check_module
from cnnstrategies.strategies.parameter_server import ParameterServerStrategy


class SubmitCLI(CLI):
    """Parses what ``fit`` parses, and builds model, data and strategy but no trainer: the devices are elsewhere."""

    def __init__(self) -> None:
        super().__init__(run=False)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--ckpt_path", type=Path | None, default=None, help="A checkpoint to start from.")
        parser.add_argument("--dry_run", "--dry-run", action="store_true", help="Print the script and submit nothing.")

    @override
    def before_instantiate_classes(self) -> None:
        check_trainer_names(self.config.trainer.strategy, self.config.trainer.accelerator)
        check_checkpoint(self.config.ckpt_path, words=())

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None


@dataclass(frozen=True)
class Submission:
    """One configuration that can run.

    Attributes:
        cli: Its parser and configuration.
        options: The ``cluster`` section.
        size: Nodes, tasks and GPUs.
        goes_on: Whether the strategy goes on without a rank that dies.
    """

    cli: SubmitCLI
    options: ClusterOptions
    size: Size
    goes_on: bool

    @property
    def checkpoints(self) -> str | None:
        """Where the configuration wants its checkpoints; None where it leaves that open."""
        directory = _checkpoint_arguments(self.cli.config)[0].dirpath
        return None if directory is None else str(Path(directory).resolve())

    def write(self, folder: Path) -> None:
        """Write the whole configuration, so that later changes of the files do not reach a job in the queue."""
        config = self.cli.config.clone()
        for name in ("config", "dry_run"):
            config.pop(name, None)
        for arguments in _checkpoint_arguments(config):
            if arguments.dirpath is None:
                arguments.dirpath = str(folder / "checkpoints")
        keep_version(config.trainer, folder.name)
        if self.options.requeue:
            config.stop.warning_signal = self.options.signal
            config.stop.warning_grace = float(self.options.grace)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(self.cli.parser.dump(config, skip_none=False), encoding="utf-8")


def main(args: Sequence[str]) -> None:
    """Check a configuration and submit it; print the job's number and where its logs will be.

    Args:
        args: The command line from ``submit`` on.

    Raises:
        ConfigurationError: The configuration cannot run, or SLURM does not take the job.
    """
    if args[1:2] != ["fit"]:
        raise ConfigurationError(
            f"submit {' '.join(args[1:2])}: submit takes fit, as in: cnnstrategies submit fit --config ..."
        )
    command = shlex.join(["cnnstrategies", *args])
    base = check(args[2:])
    variants = [check([*args[2:], *overrides]) for overrides in _combinations(base.options.sweep)]
    for variant in variants:
        if variant.size != base.size:
            raise ConfigurationError(
                f"cluster.sweep: the tasks of an array are of one size, and it makes {base.size} and {variant.size}: "
                "submit them one by one"
            )
    if variants and base.checkpoints is not None:
        raise ConfigurationError(
            f"checkpoint.dirpath={base.checkpoints}: the runs of a sweep would overwrite each other's checkpoints; "
            "leave it out, and each has a folder of its own"
        )
    folder = _run_folder(base.options)
    last = "$run/checkpoints/last.ckpt" if base.checkpoints is None else shlex.quote(f"{base.checkpoints}/last.ckpt")
    script = sbatch_script(base.options, base.size, folder, last, sys.executable, command, len(variants), base.goes_on)
    if base.cli.config.dry_run:
        print(script, end="")
        return
    base.write(folder)
    for number, variant in enumerate(variants):
        variant.write(folder / str(number))
    file = folder / "job.sh"
    file.write_text(script, encoding="utf-8")
    try:
        job = submit(file)
    except ConfigurationError:
        shutil.rmtree(folder)
        raise
    logs = f"{job}_0.log to {job}_{len(variants) - 1}.log" if variants else f"{job}.log"
    servers = f", and {base.options.server_nodes} server nodes" if base.options.server_nodes else ""
    print(f"Submitted job {job}: {base.size.nodes} nodes x {base.size.tasks_per_node} tasks{servers}")
    print(f"Logs, checkpoints and script: {folder} ({logs})")


def check(args: Sequence[str]) -> Submission:
    """Parse a configuration as ``fit`` does and refuse what cannot run; no process is started.

    Args:
        args: Options of ``fit``.

    Raises:
        ConfigurationError: It cannot run; the message says why.
    """
    # What LightningCLI reads, and what errors are explained by.
    sys.argv = ["cnnstrategies submit fit", *args]
    cli = SubmitCLI()
    options: ClusterOptions = cli.config_init.cluster
    trainer = cli.config.trainer
    size = job_size(trainer.num_nodes, trainer.devices, trainer.accelerator)
    goes_on = _check_strategy(cli, size, options.server_nodes)
    if options.requeue and (trainer.enable_checkpointing is False or trainer.fast_dev_run):
        raise ConfigurationError(
            "trainer.enable_checkpointing=false or fast_dev_run: without checkpoints a requeued job would start from "
            "the beginning each time; set cluster.requeue to false"
        )
    if options.check_data and cli.datamodule is not None:
        cli.datamodule.prepare_data()
    return Submission(cli, options, size, goes_on)


def _check_strategy(cli: SubmitCLI, size: Size, server_nodes: int) -> bool:
    """Refuse a strategy that cannot run as the job; whether it goes on without a rank that dies."""
    asked = cli.config.trainer.strategy
    if isinstance(asked, str):
        arguments = StrategyRegistry[asked]["init_params"] if asked in StrategyRegistry else {}
    else:
        arguments = dict(getattr(asked, "init_args", None) or {})
    method = arguments.get("start_method", "popen")
    if method != "popen":
        name = asked if isinstance(asked, str) else asked.class_path.rpartition(".")[2]
        raise ConfigurationError(
            f"trainer.strategy={name}: it starts its processes itself ({method}), and in a job srun does: use the name "
            "without _spawn, _fork or _notebook, or start_method: popen"
        )
    strategy = cli.config_init.trainer.strategy
    if isinstance(strategy, str) and strategy in StrategyRegistry:
        strategy = StrategyRegistry.get(strategy)
    loading = size.tasks
    if isinstance(strategy, Strategy) and isinstance(strategy, HybridPipelineStrategy):
        network = cli.model.get_submodule(check_module(cli.model, strategy.network_path))
        strategy.request.check(network, size.tasks)
        loading = strategy.request.replicas_on(size.tasks)[0]
    if isinstance(cli.datamodule, ImageDataModule) and cli.datamodule.global_batch_size is not None:
        share(cli.datamodule.global_batch_size, loading, cli.config.trainer.accumulate_grad_batches)
    if server_nodes and (isinstance(asked, str) or not isinstance(strategy, ParameterServerStrategy)):
        name = asked if isinstance(asked, str) else asked.class_path.rpartition(".")[2]
        raise ConfigurationError(
            f"cluster.server_nodes={server_nodes} with trainer.strategy={name}: they are for a strategy that is "
            "written as class_path: ParameterServerStrategy"
        )
    if isinstance(strategy, ParameterServerStrategy) and size.nodes + server_nodes > 1:
        strategy.options.encrypted("tcp://first-node:15000")  # It says what is missing.
        if server_nodes and strategy.options.endpoints:
            raise ConfigurationError(
                f"cluster.server_nodes={server_nodes} and endpoints={list(strategy.options.endpoints)}: the servers of "
                "a job listen on the nodes that SLURM gives it; leave out endpoints"
            )
    return isinstance(strategy, ParameterServerStrategy)


def _combinations(sweep: dict[str, list[Any]]) -> Iterator[list[str]]:
    """The overrides of each combination of a sweep; none without one."""
    if sweep:
        for values in itertools.product(*sweep.values()):
            yield [
                f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
                for key, value in zip(sweep, values, strict=True)
            ]


def _run_folder(options: ClusterOptions) -> Path:
    """A new folder's path; two submissions in one second get different ones."""
    stem = f"{options.job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := options.folder.resolve() / name).exists())


def _checkpoint_arguments(config: Any) -> list[Any]:
    """The arguments of the configuration's own ModelCheckpoints, or else of the command line's."""
    callbacks = config.trainer.callbacks or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    own = [c.init_args for c in callbacks if c.class_path.rpartition(".")[2] == ModelCheckpoint.__name__]
    return own or [config.checkpoint]
