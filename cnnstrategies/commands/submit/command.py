"""``cnnstrategies submit fit``: a job from a configuration, for SLURM or another target."""

import importlib
import itertools
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from cnnstrategies.cluster.job import Size, job_size
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.run_folder import CHECKPOINTS, checked, checkpoint_arguments, keep_version, refuse_anothers
from cnnstrategies.commands.arguments.options import SubmitOptions
from cnnstrategies.commands.run.errors import check_checkpoint
from cnnstrategies.commands.run.lightning_cli import ModelAndData
from cnnstrategies.data import ImageDataModule
from cnnstrategies.data.module import share
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions
from cnnstrategies.strategies.protocol import facts_of

# By the word after --to: the module of this package whose `target` makes it.
TARGETS = ("slurm", "kubernetes", "ray")  # Each has a module here.
EVERYWHERE = ("job_name", "setup", "python", "folder")  # Keys of `cluster` that count there, too.


class SubmitCLI(ModelAndData):
    """A configuration whose devices are elsewhere."""

    @override
    def before_instantiate_classes(self) -> None:
        check_checkpoint(self.config.ckpt_path, words=())
        if self.config.run_name is not None:
            checked(self.config.run_name)


@dataclass(frozen=True)
class Submission:
    """One configuration that can run; ``server_options`` are those of its parameter servers, if it has some."""

    cli: SubmitCLI
    options: ClusterOptions
    size: Size
    server_options: ParameterServerOptions | None

    @property
    def checkpoints(self) -> str | None:
        """Where the configuration wants its checkpoints; None where it leaves that open."""
        directory: str | None = checkpoint_arguments(self.cli.config)[0].dirpath
        return directory

    def refuse_without_checkpoints(self, what: str, remedy: str) -> None:
        """Refuse ``what`` could never go on where it was; ``remedy`` is how it does not start again."""
        trainer = self.cli.config.trainer
        if trainer.enable_checkpointing is False or trainer.fast_dev_run:
            raise ConfigurationError(
                f"trainer.enable_checkpointing=false or fast_dev_run: without checkpoints {what} would start from the "
                f"beginning each time; {remedy}"
            )

    def run_folder(self, below: Path) -> Path:
        """The run's folder on a disk that all nodes see: its own by name, or a new one."""
        if self.server_options is not None and self.size.nodes + self.options.server_nodes > 1:
            self.server_options.encrypted("tcp://first-node:15000")  # It says what is missing.
        folder = below.resolve()
        name: str | None = self.cli.config.run_name
        if name is None:
            stem = f"{self.options.job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
            # Two submissions in one second get different ones.
            names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
            name = next(name for name in names if not (folder / name).exists())
        if self.checkpoints is not None:
            refuse_anothers(Path(self.checkpoints) / "last.ckpt", name)
        return folder / name

    def text(self, folder: PurePath, changes: Mapping[str, Any]) -> str:
        """The whole configuration, so that later changes of the files do not reach a job in the queue.

        Checkpoints go to ``folder``, which is as the processes see it, unless the configuration says otherwise;
        ``changes`` is what the target decides, by key.
        """
        config = self.cli.config.clone()
        config.pop("config", None)
        for arguments in checkpoint_arguments(config):
            if arguments.dirpath is None:
                arguments.dirpath = str(folder / CHECKPOINTS)
        config.run_name = folder.name
        keep_version(config.trainer, config.run_name)
        for key, value in changes.items():
            config[key] = value
        return str(self.cli.parser.dump(config, skip_none=False))


class Target(ABC):
    """Where runs are sent: a scheduler, or something like it.

    ``command`` is the command line that asks for it, for the reader of what is made of it.
    """

    READS: frozenset[str]  # The keys of ``cluster`` that count there, beside those that count everywhere.

    def __init__(self, base: Submission, command: str) -> None:
        self.base = base
        self.command = command
        self.check()

    @property
    def unread(self) -> list[str]:
        """The keys of ``cluster`` that the configuration sets and that do not count here."""
        options, default = self.base.options, ClusterOptions()
        names = [one.name for one in fields(options) if one.name not in {*EVERYWHERE, *self.READS, *TARGETS}]
        return [f"cluster.{name}" for name in names if getattr(options, name) != getattr(default, name)]

    @abstractmethod
    def check(self) -> None:
        """Refuse what cannot run there, as far as this machine knows."""

    @abstractmethod
    def show(self) -> str:
        """What would be submitted, for ``--dry_run``."""

    @abstractmethod
    def submit(self) -> str:
        """Put it into the queue; what was queued, and where its logs and checkpoints will be, for the user."""


def check(args: Sequence[str]) -> Submission:
    """Parse a configuration as ``fit`` does and refuse what cannot run; no process is started."""
    cli = SubmitCLI("submit fit", args)
    options: ClusterOptions = cli.config_init.cluster
    trainer = cli.config.trainer
    size = job_size(trainer.num_nodes, trainer.devices, trainer.accelerator)
    server_options = _check_strategy(cli, size, options.server_nodes)
    return Submission(cli, options, size, server_options)


def _check_strategy(cli: SubmitCLI, size: Size, server_nodes: int) -> ParameterServerOptions | None:
    """Refuse a strategy that cannot run as the job; return the options of its parameter servers, if it has some."""
    asked = cli.config.trainer.strategy
    if isinstance(asked, str):
        arguments = StrategyRegistry[asked]["init_params"] if asked in StrategyRegistry else {}
    else:
        arguments = dict(getattr(asked, "init_args", None) or {})
    method = arguments.get("start_method", "popen")
    if method != "popen":
        name = asked if isinstance(asked, str) else asked.class_path.rpartition(".")[2]
        raise ConfigurationError(
            f"trainer.strategy={name}: it starts its processes itself ({method}), and a job's are "
            "started for it: use the name without _spawn, _fork or _notebook, or start_method: popen"
        )
    strategy = cli.config_init.trainer.strategy
    if isinstance(strategy, str) and strategy in StrategyRegistry:
        strategy = StrategyRegistry.get(strategy)
    facts = facts_of(strategy)
    facts.check_job(cli.model, size.tasks)
    loading = facts.loading_processes(size.tasks)
    if isinstance(cli.datamodule, ImageDataModule) and cli.datamodule.global_batch_size is not None:
        share(cli.datamodule.global_batch_size, loading, cli.config.trainer.accumulate_grad_batches)
    servers = facts.server_options
    if server_nodes and (isinstance(asked, str) or servers is None):
        name = asked if isinstance(asked, str) else asked.class_path.rpartition(".")[2]
        raise ConfigurationError(
            f"cluster.server_nodes={server_nodes} with trainer.strategy={name}: they are for a strategy that is "
            "written as class_path: ParameterServerStrategy"
        )
    if server_nodes and servers is not None and servers.endpoints:
        raise ConfigurationError(
            f"cluster.server_nodes={server_nodes} and endpoints={list(servers.endpoints)}: the servers of "
            "a job listen on the nodes that it is given; leave out endpoints"
        )
    return servers


def main(options: SubmitOptions, words: Sequence[str]) -> None:
    """Check a configuration and submit it; print what was queued and where its logs will be."""
    if options.command != "fit":
        raise ConfigurationError(
            f"submit {options.command}: submit takes fit, as in: cnnstrategies submit fit --config ..."
        )
    call = shlex.join(["cnnstrategies", *sys.argv[1:]])
    base = check(words)
    module = importlib.import_module(f"cnnstrategies.commands.submit.{options.to}")
    target: Target = module.target(base, call)
    if target.unread:
        print(f"Note: with --to {options.to} these keys do not count: {', '.join(target.unread)}", file=sys.stderr)
    if options.dry_run:
        print(target.show(), end="")
        return
    print(target.submit())
