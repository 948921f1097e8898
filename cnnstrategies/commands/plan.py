"""``cnnstrategies plan``: how a configuration's network divides into stages, and how long a step should take."""

import contextlib
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry
from rich.console import Console
from torch import Tensor
from typing_extensions import override

from cnnstrategies.commands.lightning_cli import CLI
from cnnstrategies.commands.plan_options import PlanOptions
from cnnstrategies.commands.quiet import quieten
from cnnstrategies.data import ImageDataModule
from cnnstrategies.data.batch_size import share
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batchnorm import has_batch_norm
from cnnstrategies.pipeline.microbatches import default_microbatches
from cnnstrategies.pipeline.timeline import draw_timeline, write_trace
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.tracing import find_cut, trace
from cnnstrategies.planning.costs import Link
from cnnstrategies.planning.measure_links import measure_local_link
from cnnstrategies.planning.measure_network import profile
from cnnstrategies.planning.plan import Plan, make_plan
from cnnstrategies.planning.report import plan_table, summary
from cnnstrategies.planning.request import Request
from cnnstrategies.planning.stage_costs import stage_costs
from cnnstrategies.strategies.hybrid_pipeline.find_network import find_network
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class PlanCLI(CLI):
    """Parses what ``fit`` parses, and builds model and data but no trainer."""

    def __init__(self) -> None:
        super().__init__(run=False)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--ckpt_path", type=Any, default=None, help="Not used: accepted since fit accepts it.")
        parser.add_class_arguments(PlanOptions, None)

    @override
    def before_instantiate_classes(self) -> None:
        """Nothing to check: no trainer is built."""

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None


def main(args: Sequence[str]) -> None:
    """Print the plan for a configuration.

    Args:
        args: The command line from ``plan`` on.

    Raises:
        ConfigurationError: The configuration cannot be planned for; the message says why.
    """
    # What LightningCLI reads, and what errors are explained by.
    sys.argv = ["cnnstrategies plan", *args[1:]]
    quieten()
    cli = PlanCLI()
    config = cli.config
    options = PlanOptions(**{name: getattr(config, name) for name in PlanOptions.__dataclass_fields__})
    plan = plan_for(cli.model, cli.datamodule, config.trainer, options)
    Console().print(plan_table(plan))
    names = {
        rank: f"stage {place.stage}, replica {place.replica}"
        for rank in range(plan.layout.devices)
        for place in [Placement(plan.layout.replicas).place(rank)]
    }
    if options.plot is not None:
        title = summary(plan).split(";")[0]
        draw_timeline(plan.spans, options.plot, title, names)
        print(f"Drew {options.plot}")
    if options.trace is not None:
        write_trace(plan.spans, options.trace, names)
        print(f"Wrote {options.trace}")


def plan_for(model: LightningModule, data: LightningDataModule, trainer: Any, options: PlanOptions) -> Plan:
    """Measure the model's network on this machine and plan its layout.

    Args:
        model: Its network is divided.
        data: Gives the shape of the images and the batch size.
        trainer: The trainer's arguments: devices, num_nodes, accelerator, precision, strategy.
        options: What a plan needs beyond them.
    """
    named = getattr(getattr(trainer.strategy, "init_args", None), "network", None)
    network = model.get_submodule(find_network(model, named))
    device = _device(trainer.accelerator)
    devices = _count(trainer.devices) * int(trainer.num_nodes)
    asked = _asked(trainer.strategy)
    traced = trace(network.to(device))
    replicas = asked.replicas_on(devices) if asked and not options.search else None
    loading = replicas[0] if replicas else devices
    _load_one_share(data, options.batch_size, loading, int(trainer.accumulate_grad_batches))
    images, per_replica = _images(data)
    batch = options.batch_size or per_replica * loading
    if asked and (replicas or asked.microbatches):
        microbatches = asked.microbatches_on(devices, network, batch // loading)
    else:
        # The layout is not known yet: as for a stage on each device, and enough for as many replicas.
        usual = default_microbatches((1,) * devices, batch if has_batch_norm(network) else None)
        microbatches = max(devices, usual)
    size = max(1, batch // microbatches)
    if device.type == "cpu":
        # What a launcher of several processes on this machine would leave to each.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // _count(trainer.devices)))
    precision = AUTOCAST.get(str(trainer.precision))
    autocast = torch.autocast(device.type, precision) if precision else contextlib.nullcontext()
    memory_format = torch.channels_last if getattr(model, "channels_last", False) else torch.contiguous_format
    with autocast:
        costs = profile(traced, _batch_of(images, size, device, memory_format))
        share = profile(traced, _batch_of(images, max(1, batch // devices), device, memory_format))
    cuts = asked.cuts if asked and not options.search else None
    request = Request(
        devices=devices,
        microbatches=microbatches,
        schedule=asked.schedule if asked else "1f1b",
        replicas=replicas,
        cuts=tuple(find_cut(traced, name) for name in cuts) if cuts is not None else None,
        memory_limit=asked.memory_limit if asked else None,
        activation_checkpointing=asked.activation_checkpointing if asked else "never",
        run_ahead=asked.run_ahead if asked else None,
        state_copies=2 + options.optimizer_states,
    )
    return make_plan(costs, _link(options, device), request, stage_costs(share, ())[0])


def _asked(strategy: Any) -> LayoutRequest | None:
    """What a hybrid pipeline in a configuration asks for, with its defaults; None for another strategy."""
    if isinstance(strategy, str):
        if strategy not in StrategyRegistry:
            return None
        entry = StrategyRegistry[strategy]
        defaults = {name: value.default for name, value in inspect.signature(entry["strategy"]).parameters.items()}
        arguments = {**defaults, **entry["init_params"]}
    else:
        arguments = dict(getattr(strategy, "init_args", None) or {})
    names = [field.name for field in fields(LayoutRequest)]
    return LayoutRequest(**{name: arguments[name] for name in names}) if set(names) <= set(arguments) else None


def _count(devices: Any) -> int:
    if isinstance(devices, list):
        return len(devices)
    if not str(devices).isdigit() or int(devices) < 1:
        raise ConfigurationError(
            f"trainer.devices={devices}: a plan needs their number, for example --trainer.devices 2"
        )
    return int(devices)


def _device(accelerator: Any) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator == "cpu" or (accelerator == "auto" and found is None):
        return torch.device("cpu")
    if found is None:
        raise ConfigurationError(
            f"trainer.accelerator={accelerator}: this machine has none, and a plan measures on the real device: run it "
            "there, or plan for --trainer.accelerator cpu"
        )
    return found


def _load_one_share(data: LightningDataModule, batch_size: int | None, loading: int, accumulated: int) -> None:
    """Have this process, where no trainer divides a global batch, load what one of the run's processes would."""
    if isinstance(data, ImageDataModule) and data.global_batch_size is not None:
        own = share(data.global_batch_size, loading, accumulated) if batch_size is None else batch_size // loading
        data.global_batch_size = max(1, own)


def _images(data: LightningDataModule) -> tuple[Tensor, int]:
    """Some training images, and the samples of a batch of one process."""
    data.prepare_data()
    data.setup("fit")
    images = next(iter(data.train_dataloader()))[0]
    return images, len(images)


def _batch_of(images: Tensor, size: int, device: torch.device, memory_format: torch.memory_format) -> Tensor:
    repeats = -(-size // len(images))
    return images.repeat(repeats, *[1] * (images.ndim - 1))[:size].to(device).contiguous(memory_format=memory_format)


def _link(options: PlanOptions, device: torch.device) -> Link:
    if options.bandwidth is not None:
        return Link(options.bandwidth * 1e6 / 8, options.latency / 1e3)
    return measure_local_link(device, "gloo" if device.type == "cpu" else "nccl")
