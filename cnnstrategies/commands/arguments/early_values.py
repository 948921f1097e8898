"""Checks of a configuration's values against each other and against the machine, without torch and Lightning."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cnnstrategies.commands.arguments import recipes
from cnnstrategies.commands.arguments.keys import ACCELERATORS, OF_CLASS, ConfiguredKey, accepted, closest, read_yaml
from cnnstrategies.errors import ConfigurationError

PRECISIONS = (
    *("32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true", "32", "16", "64", "bf16"),
    *("transformer-engine", "transformer-engine-float16"),
)
# Names of strategies, without the suffixes for the ways to start processes.
STRATEGIES = (
    *("auto", "ddp", "fsdp", "deepspeed", "single_device", "single_tpu", "single_xla", "xla"),
    *("ddp_fp16", "ddp_bf16", "ddp_powersgd", "ddp_balanced", "hybrid_pipeline", "spatial"),
    *("parameter_server", "parameter_server_async", "parameter_server_ssp"),
)
# Channels of an image, and number of classes, of data modules for which the configuration does not set them.
DATA = {
    "DigitsDataModule": (1, 10),
    "MNISTDataModule": (1, 10),
    "FashionMNISTDataModule": (1, 10),
    "CIFAR10DataModule": (3, 10),
    "CIFAR100DataModule": (3, 100),
    "ImageFolderDataModule": (3, None),
    "ImageTableDataModule": (3, None),
    "SegmentationFolderDataModule": (3, None),
    "ShardedImageDataModule": (3, None),
}
# Data modules that read a folder of the user.
OF_FOLDERS = ("ImageFolderDataModule", "SegmentationFolderDataModule", "ShardedImageDataModule")
CHANNELS = ("in_channels", "in_chans")  # Names of a network's parameter for the number of channels of its images.
NETWORK = "model.init_args.network"
OF_OBJECTS = "|".join(OF_CLASS)
# Beginnings of the import paths of networks whose argument `num_classes` is their number of logits.
BUILDERS = ("cnnstrategies.networks.", "cnnstrategies.pretrained.", "torchvision.models.", "timm.create_model")


def values_of(keys: Sequence[ConfiguredKey]) -> dict[str, Any]:
    """Return the values of a configuration by key, with ``init_args`` in all keys of model, network and data.

    Texts from the command line are read as YAML. Keys whose values refer to other keys (`${...}`) are left out.
    """
    values: dict[str, Any] = {}
    for key in keys:
        value = key.value
        if isinstance(value, str) and not key.path.endswith("class_path"):
            try:
                value = read_yaml(value)
            except yaml.YAMLError:
                value = key.value
        path = re.sub(rf"^(model|data)\.(?!{OF_OBJECTS})", r"\1.init_args.", key.path)
        path = re.sub(rf"^({re.escape(NETWORK)})\.(?!{OF_OBJECTS})", r"\1.init_args.", path)
        if "${" not in str(key.value) and not isinstance(value, Mapping):
            values.setdefault(path, value)
    return values


def check_values(values: Mapping[str, Any], foreign: bool) -> None:
    """Raise a ConfigurationError if a value cannot be used, or if two values contradict each other.

    Args:
        values: Values by key.
        foreign: Whether the configuration names a module of the user, which may register strategies.
    """
    _check_trainer(values, foreign)
    _check_pipeline(values)
    _check_folder(values)
    _check_data(values)


def _check_trainer(values: Mapping[str, Any], foreign: bool) -> None:
    accelerator, devices = values.get("trainer.accelerator", "auto"), values.get("trainer.devices")
    if isinstance(accelerator, str) and accelerator not in ACCELERATORS and re.fullmatch(r"\w+", accelerator):
        raise ConfigurationError(
            f"trainer.accelerator: unknown accelerator {accelerator!r}{accepted(accelerator, ACCELERATORS)}"
        )
    text = str(devices)
    if isinstance(devices, str | int) and not re.fullmatch(r"auto|-1|[1-9]\d*|\d+(\s*,\s*\d*)+", text):
        raise ConfigurationError(
            f"trainer.devices: {text!r} is not accepted; give a number of devices, such as 2, a list of their indices, "
            "such as [0,1], or auto"
        )
    precision = values.get("trainer.precision")
    if isinstance(precision, str | int) and str(precision) not in PRECISIONS:
        raise ConfigurationError(
            f"trainer.precision: {precision!r} is not accepted; use one of: {', '.join(PRECISIONS[:6])}"
        )
    strategy = values.get("trainer.strategy")
    if not isinstance(strategy, str) or foreign or "." in strategy or f"strategy/{strategy}" in recipes.names():
        return
    known = strategy in STRATEGIES or strategy.startswith(tuple(f"{name}_" for name in STRATEGIES))
    if not known and (guess := closest(strategy, STRATEGIES)) != ";":
        raise ConfigurationError(f"trainer.strategy: unknown strategy {strategy!r}{guess}")


def check_batches(values: Mapping[str, Any], keys: Sequence[ConfiguredKey]) -> None:
    """Raise a ConfigurationError if a global batch cannot be divided into the batches that a step accumulates.

    Args:
        values: Values by key.
        keys: The keys of the configuration, in which several callbacks may have the same path.
    """
    samples, batches = values.get("data.init_args.global_batch_size"), values.get("trainer.accumulate_grad_batches")
    if type(samples) is not int or not _class(values, "data"):
        return
    if type(size := values.get("data.init_args.batch_size")) is int:
        raise ConfigurationError(
            f"data.init_args.batch_size={size} (for each process) and data.init_args.global_batch_size={samples} (for "
            f"all processes) are both set: set one of them, and the other to null"
        )
    callbacks = [str(key.value) for key in keys if key.path.startswith("trainer.callbacks")]
    if any(name.rpartition(".")[2] == "GradientAccumulationScheduler" for name in callbacks):
        raise ConfigurationError(
            "global_batch_size cannot be used with GradientAccumulationScheduler, which changes the number of samples "
            "in a step: set data.init_args.batch_size (for each process), and data.init_args.global_batch_size=null"
        )
    devices, nodes = values.get("trainer.devices"), values.get("trainer.num_nodes", 1)
    alike = str(values.get("trainer.strategy")).startswith("ddp")  # Other strategies may load data in fewer processes.
    processes = devices * nodes if alike and type(devices) is int and type(nodes) is int and devices > 0 else 1
    batches = batches if type(batches) is int else 1
    if samples < processes * batches:
        by = f"trainer.accumulate_grad_batches={batches} batches"
        by = f"{processes} processes x {by}" if processes > 1 else by
        raise ConfigurationError(
            f"data.init_args.global_batch_size={samples} is less than one sample for each of {by}: set it to at least "
            f"{processes * batches}, or accumulate fewer batches"
        )


def _check_pipeline(values: Mapping[str, Any]) -> None:
    strategy = str(values.get("trainer.strategy.class_path", values.get("trainer.strategy")))
    replicas = values.get("trainer.strategy.init_args.replicas", values.get("trainer.strategy.replicas"))
    devices, nodes = values.get("trainer.devices"), values.get("trainer.num_nodes", 1)
    if "pipeline" not in strategy.lower() or type(devices) is not int or type(nodes) is not int or devices < 1:
        return
    if not isinstance(replicas, list) or not all(type(count) is int for count in replicas):
        return
    if sum(replicas) != devices * nodes:
        raise ConfigurationError(
            f"replicas={replicas} need {sum(replicas)} devices, but there are {devices * nodes} devices "
            "(trainer.devices x trainer.num_nodes): change trainer.strategy.replicas or the number of devices"
        )


def _check_folder(values: Mapping[str, Any]) -> None:
    root = values.get("data.init_args.root")
    if _class(values, "data") in OF_FOLDERS and isinstance(root, str) and "://" not in root and not Path(root).is_dir():
        raise ConfigurationError(
            f"no directory {Path(root).resolve()}: set data.init_args.root to the data set's directory"
        )


def _class(values: Mapping[str, Any], section: str) -> str:
    """Return the name of a section's class without its module; an empty text for a class of another package."""
    path = str(values.get(f"{section}.class_path", values.get(section, "")))
    module, _, name = path.rpartition(".")
    return name if module in ("", "cnnstrategies") or module.startswith("cnnstrategies.") else ""


def _check_data(values: Mapping[str, Any]) -> None:
    """Check that the images and classes of this package's data modules fit the network."""
    kind = _class(values, "data")
    channels, classes = DATA.get(kind, (None, None))
    if kind == "SyntheticDataModule":
        channels, classes = values.get("data.init_args.channels", 3), values.get("data.init_args.num_classes", 1000)
    model_classes = values.get("model.init_args.num_classes")
    if _class(values, "model") in ("ImageClassifier", "ImageSegmenter"):
        if type(model_classes) is int and type(classes) is int and model_classes != classes:
            raise ConfigurationError(
                f"the model has num_classes={model_classes}, but {kind} has num_classes={classes}: set "
                f"model.init_args.num_classes={classes}"
            )
        own_classes = values.get(f"{NETWORK}.init_args.num_classes")
        ours = str(values.get(f"{NETWORK}.class_path")).startswith(BUILDERS)
        if ours and type(model_classes) is int and type(own_classes) is int and model_classes != own_classes:
            raise ConfigurationError(
                f"{NETWORK}.init_args.num_classes={own_classes}, but the model has num_classes={model_classes}: set "
                f"{NETWORK}.init_args.num_classes={model_classes}, or model.init_args.num_classes={own_classes}"
            )
    key, taken = _network_channels(values)
    if type(channels) is int and type(taken) is int and channels != taken:
        remedy = f"set {key}={channels}" if key else f"choose a network for {channels} channels"
        raise ConfigurationError(
            f"the network takes images with {taken} channels, but {kind}'s images have {channels}: {remedy}, or change "
            "data"
        )


def _network_channels(values: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key of the network's number of channels and the number; None if the number is not known."""
    path = str(values.get(f"{NETWORK}.class_path", values.get(NETWORK, "")))
    for below in ("init_args", "dict_kwargs"):
        for name in CHANNELS:
            if (key := f"{NETWORK}.{below}.{name}") in values:
                return key, values[key]
    if path.startswith("torchvision.models.") or path == "cnnstrategies.pretrained.pretrained":
        return "", 3
    return "", None
