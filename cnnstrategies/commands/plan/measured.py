"""What ``cnnstrategies plan`` measures: the network of a configuration, on the device that it will train on."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, fx
from torch.optim import Optimizer

from cnnstrategies.commands.arguments.options import PlanOptions
from cnnstrategies.commands.run.lightning_cli import ModelAndData, device_of
from cnnstrategies.data import ImageDataModule
from cnnstrategies.data.module import share
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.own_forward import network_at
from cnnstrategies.pipeline.tracing import decide_by_shapes, find_cut, trace
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster, read_cluster
from cnnstrategies.planning.costs import Link, Profile
from cnnstrategies.planning.measure import USUAL_STATES, measure_profile, states_of
from cnnstrategies.planning.measure_links import measure_local_link
from cnnstrategies.strategies.hybrid_pipeline.contract import find_network
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest


def job_from_configuration(options: PlanOptions, words: Sequence[str]) -> Job:
    """Return what to plan for, from the words of a configuration."""
    cli = ModelAndData("plan", words)
    return job_for(cli.model, cli.data(), cli.config.trainer, options)


def job_for(model: LightningModule, data: LightningDataModule, trainer: Any, options: PlanOptions) -> Job:
    """Measure the model's network on this machine."""
    if options.profile is not None:
        raise ConfigurationError("profile: the network of a configuration is measured: leave one of the two out")
    named = getattr(getattr(trainer.strategy, "init_args", None), "submodule", None)
    network = network_at(model, find_network(model, named))
    device = device_of(trainer.accelerator)
    devices = _count(trainer.devices) * int(trainer.num_nodes)
    described = read_cluster(options.cluster, devices) if options.cluster is not None else None
    asked = None if options.search else _asked(trainer.strategy)
    decide_by_shapes(network, lambda size: _images(data)[0][:size])
    traced = trace(network)
    loading = asked.replicas_on(devices)[0] if asked else devices
    samples = _samples(data, options, devices, loading, int(trainer.accumulate_grad_batches))
    images, own = _images(data)
    samples = samples or own * loading
    return Job(
        profile=_measure(traced, images, max(1, samples // devices), device, model, trainer),
        cluster=described or Cluster.flat(devices, _link(options, device, devices)),
        samples=samples,
        microbatches=asked.microbatches_on(devices, network, samples // loading) if asked else None,
        replicas=asked.replicas_on(devices) if asked else None,
        shares=asked.shares_on(devices) if asked else None,
        cuts=tuple(find_cut(traced, name) for name in asked.cuts) if asked and asked.cuts is not None else None,
        schedule=asked.schedule if asked else "1f1b",
        activation_checkpointing=asked.activation_checkpointing if asked else "never",
        run_ahead=asked.run_ahead if asked else None,
        state_copies=2 + _states(model, options),
        memory_limit=asked.memory_limit if asked else None,
    )


def _samples(
    data: LightningDataModule, options: PlanOptions, devices: int, loading: int, accumulated: int
) -> int | None:
    """Samples of a step where options or data say so; where no trainer divides them, this process loads one share."""
    given = options.samples_of_a_step(devices)
    if isinstance(data, ImageDataModule) and data.global_batch_size is not None:
        whole = data.global_batch_size
        # What the configuration's own strategy refuses is refused here too.
        own = share(whole, loading, accumulated) if given is None else given // loading
        data.global_batch_size = max(1, own)
        return given if given is not None else whole // accumulated
    return given


def _measure(
    traced: fx.GraphModule, images: Tensor, size: int, device: torch.device, model: LightningModule, trainer: Any
) -> Profile:
    if device.type == "cpu":
        # What a launcher of several processes on this machine would leave to each.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // _count(trainer.devices)))
    channels_last = bool(getattr(model, "channels_last", False))
    return measure_profile(traced, images, size, device, str(trainer.precision), channels_last)


def _states(model: LightningModule, options: PlanOptions) -> int:
    """Copies of the parameters that the configuration's optimizer holds, unless the options say it."""
    if options.optimizer_states is not None:
        return options.optimizer_states
    try:
        configured: Any = model.configure_optimizers()
    except Exception:  # It may need a trainer.
        return USUAL_STATES
    optimizer = configured.get("optimizer") if isinstance(configured, dict) else configured
    return states_of(optimizer) if isinstance(optimizer, Optimizer) else USUAL_STATES


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


def _images(data: LightningDataModule) -> tuple[Tensor, int]:
    """Some training images, and the samples of a batch of one process."""
    data.prepare_data()
    data.setup("fit")
    images = next(iter(data.train_dataloader()))[0]
    return images, len(images)


def _link(options: PlanOptions, device: torch.device, devices: int) -> Link:
    if options.bandwidth is not None:
        return Link(options.bandwidth * 1e6 / 8, options.latency / 1e3)
    if devices == 1:
        return Link(1.0, 0.0)  # Nothing is sent.
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise ConfigurationError(
            "the connection between GPUs is measured between two of them, and this machine has one: give --bandwidth "
            "(Mbit/s) and --latency (ms), or describe the machines with --cluster"
        )
    return measure_local_link(device, "gloo" if device.type == "cpu" else "nccl")
