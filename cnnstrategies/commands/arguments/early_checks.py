"""Checks of a configuration that need neither torch nor Lightning, so that a mistake is reported within a second.

The checks read the configuration's keys, and the source files of the classes that the keys name. They refuse only what
the parser and the checks of the later start would refuse as well, and leave to them what the sources do not show.
"""

import ast
import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cnnstrategies.commands.arguments.checkpoint_path import CHECKPOINT_KEYWORDS, check_checkpoint
from cnnstrategies.commands.arguments.definitions import (
    KNOWN,
    AbsentError,
    Definition,
    UnknownError,
    definition_of,
    method_parameters,
    parameters_in,
)
from cnnstrategies.commands.arguments.early_sources import check_source
from cnnstrategies.commands.arguments.early_values import check_batches, check_values, values_of
from cnnstrategies.commands.arguments.keys import (
    HOMES,
    NESTED,
    OF_CLASS,
    ROOTS,
    SECTIONS,
    ConfiguredKey,
    accepted,
    as_network,
    closest,
    configured_keys,
    misspelt,
    none_given,
    read_yaml,
    unknown_key,
)
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.old_names import ROOT, renamed

# Keys whose value is a class, in addition to `class_path`.
OF_CLASSES = (
    *("model", "data", "trainer.callbacks", "trainer.logger"),
    *(f"model.{below}{name}" for below in ("", "init_args.") for name in ("network", "optimizer", "lr_scheduler")),
)
# Names that other programs use for keys of a configuration.
OF_OTHERS = {
    **dict.fromkeys(("epochs", "max_epochs"), "trainer.max_epochs"),
    **dict.fromkeys(("gpus", "devices"), "trainer.devices"),
    **dict.fromkeys(("lr", "learning_rate"), "model.init_args.optimizer.init_args.lr"),
    "batch_size": "data.init_args.batch_size",
    "seed": "seed_everything",
    **{name: f"model.init_args.{name}" for name in ("optimizer", "lr_scheduler", "network")},
}
TRAINER = "lightning.pytorch.Trainer"
# Beginnings of the import paths of networks, which are not LightningModules.
OF_NETWORKS = ("cnnstrategies.networks.", "cnnstrategies.pretrained.", "torchvision.models.", "timm.", "torch.nn.")
PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "None": type(None), "Tensor": ()}


def check_early(command: str, arguments: Sequence[str], options: Sequence[str] | None = None) -> None:
    """Raise a ConfigurationError for a mistake that is visible without importing the configuration's classes.

    Args:
        command: Name of the command.
        arguments: Command-line arguments of the configuration, with the paths of its files.
        options: Names of the command's own options; None if the arguments may also be options of other parsers.
    """
    keys = configured_keys(arguments)
    if any(key.path.endswith(".help") for key in keys):  # The help of a class, as in --data.help CLASS.
        return
    foreign = _names_foreign_modules(keys)
    if options is not None:
        for key in keys:
            _check_section(key.path, command, [*dict.fromkeys((*options, *ROOTS))])
        sections = {key.path.partition(".")[0] for key in keys}
        if not {"model", "print_config"} & sections:
            raise ConfigurationError(none_given(SECTIONS - sections))
    for key in keys:
        if _names_class(key):
            _check_network(key)
            _check_class(key, foreign)
    _check_class_paths(keys)
    for key in keys:
        _check_key(key)
    if any(key.path == "print_config" for key in keys):  # The user may want to complete the configuration in a file.
        return
    values = values_of(keys)
    check_values(values, foreign)
    check_batches(values, keys)
    if command in RUNS_HERE:
        check_accelerator(values)
    if options is not None and isinstance(values.get("ckpt_path"), str):
        keywords = CHECKPOINT_KEYWORDS[:2] if command in ("quantize", "export") else CHECKPOINT_KEYWORDS
        check_checkpoint(values["ckpt_path"], keywords, values.get("trainer.default_root_dir"))


def _check_section(path: str, command: str, names: Sequence[str]) -> None:
    """Raise a ConfigurationError if a key at the root of a configuration does not exist."""
    name = path.partition(".")[0]
    if name in (*names, "config", "print_config") or misspelt(name) or renamed(ROOT, name) is not None:
        return
    try:
        if name in method_parameters(definition_of(TRAINER), command):  # LightningCLI makes options of them.
            return
    except (AbsentError, UnknownError):
        return
    hint = f"; did you mean {OF_OTHERS[name]!r}?" if name in OF_OTHERS else accepted(name, names)
    hint = f": put the keys below {name} at the top level" if name == command else hint
    raise ConfigurationError(f"unknown key {path}{hint}; see `cnnstrategies {command} --help_full`")


def _names_class(key: ConfiguredKey) -> bool:
    named = key.path in OF_CLASSES or key.path.endswith(".class_path")
    return named and isinstance(key.value, str) and key.value.replace(".", "_").isidentifier()


def _names_foreign_modules(keys: Sequence[ConfiguredKey]) -> bool:
    """Return whether a key names a module of the user.

    The module may define classes that a configuration names without the module, and may register strategies.
    """
    paths = [key.value for key in keys if _names_class(key) and "." in key.value]
    return any(path.partition(".")[0] not in (*KNOWN, "timm") for path in paths)


def _definition(name: str) -> Definition:
    """Return the definition of a class that a configuration names, with or without its module."""
    if "." in name:
        return definition_of(name)
    names: list[str] = []
    for home in HOMES:
        try:
            return definition_of(f"{home}.{name}")
        except (AbsentError, UnknownError) as error:
            names += error.others
    if name in names:
        raise UnknownError(name)
    raise AbsentError(f"there is no class {name!r}", name, names)


def _check_network(key: ConfiguredKey) -> None:
    """Raise a ConfigurationError if the section ``model`` names a network in place of a LightningModule."""
    where = key.path.removesuffix(".class_path")
    if where == "model" and key.value.startswith(OF_NETWORKS):
        raise ConfigurationError(as_network(key.value))


def _check_class(key: ConfiguredKey, foreign: bool) -> None:
    if "." in key.value and key.value.partition(".")[0] not in KNOWN:
        check_source(key.path.removesuffix(".class_path"), key.value)
    try:
        _definition(key.value)
    except UnknownError:
        return
    except AbsentError as error:
        others = [name for name in error.others if not name.startswith("_")]
        where = key.path.removesuffix(".class_path")
        if "." not in key.value:
            # The value may also be true, the name of a registered strategy, or a class from elsewhere.
            classes = [name for name in others if name[0].isupper()]
            if where != "trainer.strategy" and not foreign and (suggestion := misspelt(error.name, classes)):
                raise ConfigurationError(
                    f"{where}: {error}; {suggestion} Or give an import path, such as package.module.ClassName"
                ) from error
            return
        guess = closest(error.name, others)
        if error.name == key.value.partition(".")[0]:
            guess = closest(error.name, (*KNOWN, "timm"))
            guess += " run the command from the directory of the module's file, or install the module"
        raise ConfigurationError(f"{where}: cannot use {key.value!r}: {error}{guess.removesuffix(';')}") from error


def _check_class_paths(keys: Sequence[ConfiguredKey]) -> None:
    """Raise a ConfigurationError if a section has arguments of a class, but no class."""
    paths = {key.path for key in keys}
    for section, example in (
        ("model", "cnnstrategies.ImageClassifier"),
        ("data", "cnnstrategies.data.MNISTDataModule"),
    ):
        if f"{section}.init_args" in paths and f"{section}.class_path" not in paths:
            raise ConfigurationError(
                f"{section}.class_path is missing: name the class whose arguments are below {section}.init_args, as in "
                f"{section}.class_path: {example}"
            )


def _check_key(key: ConfiguredKey) -> None:
    """Raise a ConfigurationError if a key is not a parameter of its class, or if its type does not fit."""
    root, _, name = key.path.rpartition(".")
    if key.owner is None or not root or name in OF_CLASS or ".dict_kwargs" in key.path:
        return
    try:
        parameters = parameters_in(_definition(key.owner))
    except (AbsentError, UnknownError):
        return
    if name not in parameters:
        if misspelt(name) or renamed(key.owner.rpartition(".")[2], name) is not None or _beside_class(key):
            return  # A later check explains these mistakes.
        if key.owner == TRAINER and name in OF_OTHERS:
            raise ConfigurationError(f"unknown key {key.path}; did you mean {OF_OTHERS[name]!r}?")
        raise ConfigurationError(unknown_key(key.path, key.owner, [*parameters]))
    if (needed := _needed(parameters[name], key.value)) is not None:
        raise ConfigurationError(f"{key.path}: {str(key.value)!r} is not accepted; it must be {needed}")


def _beside_class(key: ConfiguredKey) -> bool:
    """Return whether a key may be at the level of ``class_path`` in place of below ``init_args``."""
    return "init_args" not in key.path and key.owner not in {*ROOTS.values(), *NESTED.values()}


def _needed(annotation: ast.expr | None, value: Any) -> str | None:
    """Return the types that an annotation accepts if a value certainly has another type; None otherwise."""
    kinds = _members(annotation)
    if kinds is None or not kinds <= PLAIN.keys() or "str" in kinds:
        return None
    if isinstance(value, str):
        if "${" in value:
            return None
        try:
            value = read_yaml(value)
        except yaml.YAMLError:
            return None
    fits = value is None or isinstance(value, bool)  # Later checks judge these values.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            fits = False
    if isinstance(value, int | float):
        fits = bool({"float", "bool"} & kinds) or ("int" in kinds and float(value).is_integer())
    return None if fits else " or ".join([*sorted(kinds - {"None"}, key=str.lower), *["null"] * ("None" in kinds)])


def _members(annotation: ast.expr | None) -> set[str] | None:
    """Return the names of the types in an annotation; None if the annotation has other types than plain ones."""
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return {"None"}
    if isinstance(annotation, ast.Name):
        return {annotation.id}
    parts: list[ast.expr] = []
    optional = False
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        parts = [annotation.left, annotation.right]
    elif isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        optional = annotation.value.id == "Optional"
        if annotation.value.id not in ("Optional", "Union"):
            return None
        inner = annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    else:
        return None
    names = {"None"} if optional else set()
    for part in parts:
        if (below := _members(part)) is None:
            return None
        names |= below
    return names


# Commands that train or measure on this machine. The others, such as submit, may describe another machine.
RUNS_HERE = ("fit", "validate", "test", "predict", "verify", "tune", "scaling")
# Files of drivers: NVIDIA's on servers, under WSL and on Jetson boards, and AMD's.
DRIVER_FILES = ("nvidiactl", "nvidia0", "dxg", "nvmap", "nvhost-ctrl-gpu", "kfd")
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def check_accelerator(values: Mapping[str, Any], devices: Path = Path("/dev")) -> None:
    """Raise a ConfigurationError if a configuration asks for a GPU, and this machine certainly has none.

    torch is asked later and decides. This check needs no torch, and refuses only what torch would certainly refuse.

    Args:
        values: Values of the configuration by key.
        devices: Folder with the files of the machine's devices.
    """
    accelerator = values.get("trainer.accelerator")
    if "torch" in sys.modules or sys.platform != "linux" or accelerator not in ("gpu", "cuda", "mps"):
        return
    hidden = [name for name in HIDING if os.environ.get(name) in ("", "-1")]
    reason = ""
    if accelerator == "mps":
        reason = "is for macOS"
    elif hidden:
        reason = f"needs a GPU, and the environment variable {hidden[0]}={os.environ[hidden[0]]!r} hides all GPUs"
    elif not any((devices / name).exists() for name in DRIVER_FILES) and not _has_driver():
        reason = "needs a GPU, and this machine has no driver of a GPU"
    if reason:
        raise ConfigurationError(
            f"trainer.accelerator: {accelerator!r} {reason}: to run on this machine, use --trainer.accelerator=cpu"
        )


def _has_driver() -> bool:
    """Return whether the library of NVIDIA's driver can be loaded, which does not start the driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
