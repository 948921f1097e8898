"""Measurement of a configuration's network for ``cnnstrategies plan``, on this machine."""

import copy
import inspect
import os
import resource
import warnings
from collections.abc import Sequence, Sized
from dataclasses import fields, replace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, fx
from torch.optim import Optimizer

from cnnstrategies.cluster.devices import measured_devices, relative_speeds
from cnnstrategies.commands.arguments.options import DOCTOR, PlanOptions
from cnnstrategies.commands.run.lightning_cli import ModelAndData, device_of
from cnnstrategies.data import ImageDataModule
from cnnstrategies.data.module import share
from cnnstrategies.data.without_run import give_trainer
from cnnstrategies.deploy.inference import images_of
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.tracing import decide_by_shapes, find_cut, trace_open
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.cluster import Cluster, read_cluster
from cnnstrategies.planning.costs import Link, Profile
from cnnstrategies.planning.devices import Device
from cnnstrategies.planning.measure import USUAL_STATES, measure_profile, states_of, update_of
from cnnstrategies.planning.measure_links import measure_local_link
from cnnstrategies.planning.measure_parts import possible_parts
from cnnstrategies.planning.measure_values import step_values
from cnnstrategies.planning.memory import NO_UPDATE
from cnnstrategies.planning.step_values import StepValues
from cnnstrategies.runtime.host_memory import host_memory
from cnnstrategies.strategies.hybrid_pipeline.layout import LayoutRequest
from cnnstrategies.strategies.hybrid_pipeline.loading import SMALL
from cnnstrategies.strategies.hybrid_pipeline.metric_values import share_metrics
from cnnstrategies.strategies.hybrid_pipeline.network import find_network, module_at
from cnnstrategies.strategies.hybrid_pipeline.order import order_of

HALF = "bf16-mixed"  # Precision that is tried if nothing fits with the configured precision.
KIB = 1024  # Unit of `ru_maxrss` in bytes.


def job_from_configuration(options: PlanOptions, arguments: Sequence[str]) -> tuple[ModelAndData, Job]:
    """Measure the network of a configuration, and return the configuration and the planner's input.

    Args:
        options: The options of the command.
        arguments: Command-line arguments of the configuration.
    """
    cli = ModelAndData("plan", arguments)
    return cli, job_for(cli.model, cli.data(), cli.config.trainer, options)


def job_for(model: LightningModule, data: LightningDataModule, trainer: Any, options: PlanOptions) -> Job:
    """Measure a module's network on this machine, and return the planner's input.

    Args:
        model: The module.
        data: The data module. Its images are used for the measurement.
        trainer: The configuration's section ``trainer``.
        options: The options of the command.

    Raises:
        ConfigurationError: The options contradict the configuration, or a number that the planner needs is missing.
    """
    if options.profile is not None:
        raise ConfigurationError(
            "profile: the arguments have a configuration and a profile, but the network can come from only one of "
            "them: leave out --profile or --config"
        )
    submodule = getattr(getattr(trainer.strategy, "init_args", None), "submodule", None)
    network = module_at(model, find_network(model, submodule))
    device = device_of(trainer.accelerator)
    machines = int(trainer.num_nodes)
    owned = _owned(options, trainer, device)
    devices = len(owned)
    if devices % machines:
        raise ConfigurationError(
            f"have={options.have!r}: {devices} devices do not divide evenly among the machines of "
            f"trainer.num_nodes={machines}: give as many devices for each machine, or describe the machines with "
            "--cluster"
        )
    backend = "gloo" if device.type == "cpu" else "nccl"
    cluster = read_cluster(options.cluster, devices, backend) if options.cluster is not None else None
    request = None if options.search else _request(trainer.strategy, model)
    # This package's data modules get a global batch for one process from `_samples`.
    give_trainer(data, *((1, 1) if isinstance(data, ImageDataModule) else (devices // machines, machines)))
    decide_by_shapes(network, lambda size: _images(data)[0][:size])
    traced = trace_open(network, True)
    loading = request.replicas_on(devices)[0] if request else max(1, devices // _image_parts(trainer.strategy))
    samples = _samples(data, options, devices, loading, int(trainer.accumulate_grad_batches))
    images, batch = _images(data)
    samples = samples or batch * loading
    optimizer = _optimizer(model)
    image_parts, reason = possible_parts(
        traced, images, devices, device, str(trainer.precision), _divided_axis(trainer.strategy)
    )
    return Job(
        profile=_measure(traced, images, max(1, samples // devices), device, devices // machines, model, trainer),
        cluster=cluster or Cluster.connected(owned, _link(options, device, devices, backend), machines),
        samples=samples,
        microbatches=request.microbatches_on(devices, network, samples // loading) if request else None,
        replicas=request.replicas_on(devices) if request else None,
        shares=request.shares_on(devices) if request else None,
        cuts=tuple(find_cut(traced, name) for name in request.cuts) if request and request.cuts is not None else None,
        schedule=request.schedule if request else "1f1b",
        activation_checkpointing=request.activation_checkpointing if request else None,
        run_ahead=request.run_ahead if request else None,
        state_copies=2 + (_states(optimizer) if options.optimizer_states is None else options.optimizer_states),
        memory_limit=request.memory_limit_on(devices) if request else None,
        update=NO_UPDATE if optimizer is None else update_of(optimizer, device),
        image_parts=image_parts,
        whole_images=reason,
        values=_values(model, submodule, data, samples, device),
    )


def families_of(configuration: ModelAndData) -> tuple[str, ...]:
    """Return the names of the candidates that use a configuration's strategy."""
    configured = configuration.config.trainer.strategy
    if _request(configured, configuration.model) is not None:
        return ("hybrid",)
    name = _name_of(configured)
    if "parameter_server" in name or "ParameterServer" in name:
        return ("parameter_server",)
    if _divides_images(configured):
        return ("spatial",)
    return ("ddp_balanced", "ddp") if "balanced" in name.lower() else ("ddp",)


def training_samples(data: LightningDataModule, unknown: int) -> int:
    """Return the number of training samples, or ``unknown`` if the dataset has no length."""
    dataset = getattr(data.train_dataloader(), "dataset", None)
    return len(dataset) if isinstance(dataset, Sized) else unknown


def in_half_precision(configuration: ModelAndData, job: Job) -> Job | None:
    """Measure the network with the precision bf16-mixed, in which most activations have half as many bytes.

    Args:
        configuration: The configuration.
        job: The job with the configured precision.

    Returns:
        The job with the new profile; None if the configuration already sets a precision of 16 bits.
    """
    trainer, model = configuration.config.trainer, configuration.model
    if str(trainer.precision) not in ("32-true", "32", "None"):
        return None
    submodule = getattr(getattr(trainer.strategy, "init_args", None), "submodule", None)
    traced = trace_open(module_at(model, find_network(model, submodule)), True)
    images, _ = _images(configuration.data())
    channels_last = bool(getattr(model, "channels_last", False))
    size = max(1, job.samples // job.cluster.devices)
    device = device_of(trainer.accelerator)
    return replace(job, profile=measure_profile(traced, images, size, device, HALF, channels_last), precision=HALF)


def _samples(
    data: LightningDataModule, options: PlanOptions, devices: int, loading: int, accumulated: int
) -> int | None:
    """Return the number of samples in a step over all devices.

    Return None if neither the options nor the data module set this number.

    If the data module has a ``global_batch_size``, the function replaces this number by the batch size of one process.
    In a training, the trainer divides the global batch among the processes, but this command has no trainer.

    Args:
        data: The data module.
        options: The options of the command.
        devices: Number of devices.
        loading: Number of processes that load data.
        accumulated: Number of batches whose gradients are accumulated for a step.
    """
    samples = options.samples_of_a_step(devices)
    if isinstance(data, ImageDataModule) and data.global_batch_size is not None:
        global_batch = data.global_batch_size
        # As in a training, `share` raises an error if there is less than one sample for each process.
        batch = share(global_batch, loading, accumulated) if samples is None else samples // loading
        data.global_batch_size = max(1, batch)
        return samples if samples is not None else global_batch // accumulated
    return samples


def _owned(options: PlanOptions, trainer: Any, device: torch.device) -> Sequence[Device]:
    """Return the devices for which the plan is made, in the order of the ranks.

    Args:
        options: The options of the command.
        trainer: The configuration's section ``trainer``.
        device: Device of this machine on which the network is measured.

    Raises:
        ConfigurationError: ``--have`` and ``--cluster`` are both given, or ``--have`` is not a list of devices.
    """
    if options.have is None and (not options.largest_batch or options.cluster is not None):
        return [Device()] * (_device_count(trainer.devices) * int(trainer.num_nodes))
    if options.have not in (None, DOCTOR):
        return options.owned_devices()
    machines = int(trainer.num_nodes)
    if device.type != "cpu":
        return relative_speeds(measured_devices()) * machines
    # The processes share the memory of this machine. Each process needs as much memory as this process has now, before
    # it makes a tensor for training: for imported modules, for example.
    processes = _device_count(trainer.devices)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    return [Device(memory=max(1, host_memory() // processes - used))] * (processes * machines)


def _measure(
    traced: fx.GraphModule,
    images: Tensor,
    size: int,
    device: torch.device,
    processes: int,
    model: LightningModule,
    trainer: Any,
) -> Profile:
    """Measure the network on a device of this machine, where a training would have ``processes`` processes."""
    if device.type == "cpu":
        # When this machine trains, its cores are divided among the processes. The measurement uses as many threads as
        # one of these processes would have.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    channels_last = bool(getattr(model, "channels_last", False))
    return measure_profile(traced, images, size, device, str(trainer.precision), channels_last)


def _values(
    model: LightningModule, submodule: str | None, data: LightningDataModule, samples: int, device: torch.device
) -> StepValues:
    """Return the values that the module's own step sends between the stages of a pipeline.

    A copy of the module runs its step with some samples, without a trainer and on the CPU. The user's step may need
    more.
    """
    batch = next(iter(data.train_dataloader()))
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = copy.deepcopy(model)
            network = module_at(module, find_network(module, submodule))
            return step_values(
                lambda part: module.training_step(part, 0),
                module,
                network,
                batch,
                samples,
                SMALL,
                device.type == "cpu",
                lambda places: share_metrics(places, [module]),
            )
    # Any code of the user can fail here.
    except Exception as error:
        reason = (str(error) or "no message").splitlines()[0]
        return StepValues(unknown=f"training_step without a trainer fails with {type(error).__name__}: {reason}")


def _states(optimizer: Optimizer | None) -> int:
    """Return the number of values that the optimizer stores for each parameter; for an unknown one that of Adam."""
    return USUAL_STATES if optimizer is None else states_of(optimizer)


def _optimizer(model: LightningModule) -> Optimizer | None:
    """Return the module's optimizer; None if it cannot be made."""
    try:
        configured: Any = model.configure_optimizers()
    # The user's `configure_optimizers` may fail, for example because it reads `self.trainer` and this command has no
    # trainer.
    except Exception:
        return None
    optimizer = configured.get("optimizer") if isinstance(configured, dict) else configured
    return optimizer if isinstance(optimizer, Optimizer) else None


def _request(configured: Any, module: LightningModule) -> LayoutRequest | None:
    """Return the layout options of the strategy ``hybrid_pipeline`` in a configuration.

    Return None for all other strategies.

    Args:
        configured: The configuration's value of ``trainer.strategy``: a registered name, or a class with its options.
        module: The module.
    """
    if isinstance(configured, str):
        if configured not in StrategyRegistry:
            return None
        entry = StrategyRegistry[configured]
        # A subclass may pass its keyword arguments on to the class that has the options.
        bases = reversed(entry["strategy"].__mro__)
        constructors = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)]
        signatures = [inspect.signature(constructor).parameters for constructor in constructors]
        defaults = {name: value.default for parameters in signatures for name, value in parameters.items()}
        arguments = {**defaults, **entry["init_params"]}
    else:
        arguments = dict(getattr(configured, "init_args", None) or {})
    if not {field.name for field in fields(LayoutRequest)} <= set(arguments):
        return None
    request = LayoutRequest.of(arguments)
    return replace(request, schedule=order_of(module, request.schedule))


def _name_of(configured: Any) -> str:
    """Return the name or the class path of the strategy in a configuration."""
    return configured if isinstance(configured, str) else str(configured.class_path)


def _divides_images(configured: Any) -> bool:
    """Whether the strategy in a configuration is ``spatial``."""
    return "spatial" in _name_of(configured).lower()


def _image_parts(configured: Any) -> int:
    """Return the number of devices that have parts of the same images under the strategy in a configuration."""
    if not _divides_images(configured):
        return 1
    return int((getattr(configured, "init_args", None) or {}).get("parts", 2))


def _divided_axis(configured: Any) -> int | None:
    """Return the option ``axis`` of the strategy ``spatial`` in a configuration; None for all other strategies."""
    axis: int | None = (getattr(configured, "init_args", None) or {}).get("axis")
    return axis


def _device_count(devices: Any) -> int:
    if isinstance(devices, list):
        return len(devices)
    if not str(devices).isdigit() or int(devices) < 1:
        raise ConfigurationError(
            f"trainer.devices={devices}: a plan needs the number of devices; give it, for example --trainer.devices 2"
        )
    return int(devices)


def _images(data: LightningDataModule) -> tuple[Tensor, int]:
    """Return a batch of training images, and the number of samples in the batch."""
    data.prepare_data()
    data.setup("fit")
    images = images_of(next(iter(data.train_dataloader())), "plan")
    return images, len(images)


def _link(options: PlanOptions, device: torch.device, devices: int, backend: str) -> Link:
    described = options.link(backend)
    if described is not None:
        return described
    if devices == 1:
        return Link(1.0, 0.0)  # With one device nothing is sent, so the values of the link do not matter.
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise ConfigurationError(
            "measuring the connection between GPUs needs two GPUs, but this machine has one: give --bandwidth (Mbit/s) "
            "and --latency (ms), or describe the machines with --cluster"
        )
    return measure_local_link(device, backend)
