"""``cnnstrategies submit fit``: a job from a configuration, for SLURM or another launcher."""

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from typing_extensions import override

from cnnstrategies.cluster.job import Size, job_size
from cnnstrategies.cluster.launchers import job_launchers, launcher_named
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.run_folder import checked
from cnnstrategies.cluster.submission import Submission
from cnnstrategies.commands.run.errors import check_checkpoint
from cnnstrategies.commands.run.lightning_cli import ModelAndData
from cnnstrategies.data import ImageDataModule
from cnnstrategies.data.module import share
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import network_at
from cnnstrategies.strategies.hybrid_pipeline import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline.contract import check_module
from cnnstrategies.strategies.parameter_server import ParameterServerStrategy


class SubmitCLI(ModelAndData):
    """A configuration whose devices are elsewhere."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--dry_run", "--dry-run", action="store_true", help="Print the job and submit nothing.")
        parser.add_argument(
            "--to", type=Literal[*job_launchers()], default="slurm", help="The launcher that the run is sent to."
        )

    @override
    def before_instantiate_classes(self) -> None:
        check_checkpoint(self.config.ckpt_path, words=())
        if self.config.run_name is not None:
            checked(self.config.run_name)


def check(args: Sequence[str]) -> Submission:
    """Parse a configuration as ``fit`` does and refuse what cannot run; no process is started."""
    cli = SubmitCLI("submit fit", args)
    options: ClusterOptions = cli.config_init.cluster
    trainer = cli.config.trainer
    size = job_size(trainer.num_nodes, trainer.devices, trainer.accelerator)
    parameter_server = _check_strategy(cli, size, options.server_nodes)
    return Submission(cli.config, _dump(cli), cli.datamodule, options, size, parameter_server)


def _dump(cli: SubmitCLI) -> Callable[[Namespace], str]:
    """Return a function that writes a configuration of this command as YAML, with all of its keys."""
    return lambda config: str(cli.parser.dump(config, skip_none=False))


def _check_strategy(cli: SubmitCLI, size: Size, server_nodes: int) -> ParameterServerStrategy | None:
    """Refuse a strategy that cannot run as the job; a parameter server that can is returned."""
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
    loading = size.tasks
    if isinstance(strategy, Strategy) and isinstance(strategy, HybridPipelineStrategy):
        network = network_at(cli.model, check_module(cli.model, strategy.network_path))
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
    if not isinstance(strategy, ParameterServerStrategy):
        return None
    if server_nodes and strategy.options.endpoints:
        raise ConfigurationError(
            f"cluster.server_nodes={server_nodes} and endpoints={list(strategy.options.endpoints)}: the servers of "
            "a job listen on the nodes that it is given; leave out endpoints"
        )
    return strategy


def main(args: Sequence[str]) -> None:
    """Check a configuration and submit it; print what was queued and where its logs will be."""
    if args[1:2] != ["fit"]:
        raise ConfigurationError(
            f"submit {' '.join(args[1:2])}: submit takes fit, as in: cnnstrategies submit fit --config ..."
        )
    submission = check(args[2:])
    launcher = launcher_named(submission.config.to)
    job = submission.job(launcher, shlex.join(["cnnstrategies", *args]))
    if ignored := submission.ignored_keys(launcher):
        print(f"Note: with --to {launcher.name} these keys do not count: {', '.join(ignored)}", file=sys.stderr)
    if submission.config.dry_run:
        print(job.show(), end="")
        return
    print(job.submit())
