"""``cnnstrategies submit fit``: check a configuration, and submit its run to SLURM or another launcher."""

import shlex
import sys
from collections.abc import Callable, Sequence

from jsonargparse import Namespace
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from cnnstrategies.cluster.job import Size, job_size
from cnnstrategies.cluster.job_files import FilesTakenError
from cnnstrategies.cluster.launchers import launcher_named
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.run_folder import checked
from cnnstrategies.cluster.submission import Submission
from cnnstrategies.commands.arguments.checkpoint_path import check_checkpoint
from cnnstrategies.commands.arguments.options import SubmitOptions
from cnnstrategies.commands.run.lightning_cli import ModelAndData
from cnnstrategies.data import ImageDataModule
from cnnstrategies.data.module import share
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.parameter_server.options import ParameterServerOptions
from cnnstrategies.strategies.protocol import facts_of


class SubmitCLI(ModelAndData):
    """Command line that parses a configuration of ``fit`` for a run on other machines."""

    @override
    def before_instantiate_classes(self) -> None:
        check_checkpoint(self.config.ckpt_path, keywords=())
        if self.config.run_name is not None:
            checked(self.config.run_name)


def check(args: Sequence[str]) -> Submission:
    """Parse a configuration as ``fit`` does, and check whether it can run as a job.

    Args:
        args: Command-line arguments of the configuration.

    Raises:
        ConfigurationError: The configuration cannot run as a job.
    """
    cli = SubmitCLI("submit fit", args)
    options: ClusterOptions = cli.config_init.cluster
    trainer = cli.config.trainer
    size = job_size(trainer.num_nodes, trainer.devices, trainer.accelerator)
    server_options = _check_strategy(cli, size, options.server_nodes)
    return Submission(cli.config, _dump(cli), cli.datamodule, options, size, server_options)


def _dump(cli: SubmitCLI) -> Callable[[Namespace], str]:
    """Return a function that converts a parsed configuration to YAML. The YAML contains all keys with their values."""
    return lambda config: str(cli.parser.dump(config, skip_none=False))


def _check_strategy(cli: SubmitCLI, size: Size, server_nodes: int) -> ParameterServerOptions | None:
    """Check whether a configuration's strategy can run as a job.

    Args:
        cli: The parsed configuration.
        size: Numbers of nodes and processes of the job.
        server_nodes: Number of additional nodes for dedicated servers.

    Returns:
        The options of the strategy's parameter servers; None for a strategy without servers.

    Raises:
        ConfigurationError: The strategy cannot run as this job.
    """
    configured = cli.config.trainer.strategy
    if isinstance(configured, str):
        arguments = StrategyRegistry[configured]["init_params"] if configured in StrategyRegistry else {}
    else:
        arguments = dict(getattr(configured, "init_args", None) or {})
    start_method = arguments.get("start_method", "popen")
    if start_method != "popen":
        name = configured if isinstance(configured, str) else configured.class_path.rpartition(".")[2]
        raise ConfigurationError(
            f"trainer.strategy={name}: the strategy starts its processes itself ({start_method}), but in a job the "
            "launcher starts all processes: use the strategy's name without _spawn, _fork or _notebook, or "
            "`start_method: popen`"
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
    if server_nodes and (isinstance(configured, str) or servers is None):
        name = configured if isinstance(configured, str) else configured.class_path.rpartition(".")[2]
        raise ConfigurationError(
            f"cluster.server_nodes={server_nodes} with trainer.strategy={name}: server nodes need the strategy "
            "parameter_server, written with class_path: set trainer.strategy.class_path to parameter_server"
        )
    if server_nodes and servers is not None and servers.endpoints:
        raise ConfigurationError(
            f"cluster.server_nodes={server_nodes} and endpoints={list(servers.endpoints)}: the servers of a job listen "
            "on the job's nodes, whose addresses are not known yet; leave out endpoints"
        )
    return servers


def main(options: SubmitOptions, arguments: Sequence[str]) -> None:
    """Check a configuration, submit its run, and print the job's id and the location of the job's logs.

    Args:
        options: The options of the command.
        arguments: Command-line arguments of the configuration.
    """
    if options.command != "fit":
        raise ConfigurationError(
            f"submit {options.command}: only fit can be submitted, as in `cnnstrategies submit fit --config run.yaml`"
        )
    call = shlex.join(["cnnstrategies", *sys.argv[1:]])
    submission = check(arguments)
    launcher = launcher_named(options.to)
    job = submission.job(launcher, call)
    if ignored := submission.ignored_keys(launcher):
        print(f"Note: --to {launcher.name} ignores these keys: {', '.join(ignored)}", file=sys.stderr)
    if options.dry_run:
        print(job.show(), end="")
        return
    while True:
        try:
            print(job.submit())
            return
        except FilesTakenError:
            job = submission.job(launcher, call)
