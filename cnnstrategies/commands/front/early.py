"""Refuses misspelt keys and values before torch and Lightning are imported, which takes seconds.

It knows less than the parsers, which look again: what it does not understand it lets pass.
"""

import ast
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import yaml

from cnnstrategies.commands.front.given import Given, given_keys, misspelt
from cnnstrategies.commands.front.options import PlanOptions, TuneOptions, VerifyOptions
from cnnstrategies.commands.front.signatures import MOST_STEPS, Module, Parameter, Signature, find, signature
from cnnstrategies.errors import ConfigurationError

# The keys of a configuration, and what those configure that have no class_path.
ROOTS: dict[str, str | None] = {
    "trainer": "lightning.pytorch.Trainer",
    "model": None,
    "data": None,
    "checkpoint": "lightning.pytorch.callbacks.ModelCheckpoint",
    "predictions": "cnnstrategies.callbacks.PredictionWriter",
    "stop": "cnnstrategies.callbacks.GracefulStop",
    "cluster": "cnnstrategies.cluster.options.ClusterOptions",
    "network": "cnnstrategies.cluster.hosts.Network",
    "seed_everything": None,
    "ckpt_path": None,
    "run_name": None,
    "fresh": None,
}
# And those below.
NESTED = {
    "cluster.kubernetes": "cnnstrategies.cluster.options.KubernetesOptions",
    "cluster.ray": "cnnstrategies.cluster.options.RayOptions",
}
# Where the classes are that a configuration may name without their module.
HOMES = (
    *("cnnstrategies", "cnnstrategies.data", "cnnstrategies.callbacks", "cnnstrategies.strategies"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers", "lightning.pytorch.strategies"),
    *("torch.optim", "torch.optim.lr_scheduler"),
)
# Arguments that no configuration gives: the caller does.
FROM_ELSEWHERE = ("params", "optimizer")
ANYTHING = object()
MOST_NAMES = 20  # that are listed beside a guess
# Of the commands themselves, and not of a configuration.
OPTIONS = {
    *("config", "help", "help_full", "print_config", "weights_only", "verbose", "return_predictions", "output"),
    *("calibration_batches", "format", "int8", "dry_run", "to", "run", "key_file"),
    *(field.name for field in (*fields(PlanOptions), *fields(TuneOptions), *fields(VerifyOptions))),
}
# Lightning's and ours; `tests/commands/test_early.py` compares with the registry.
_DDP = [f"ddp{start}{unused}" for unused in ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
        for start in ("", "_spawn", "_fork", "_notebook")]  # fmt: skip
_OURS = [f"{name}{start}" for name in
         ("ddp_fp16", "ddp_bf16", "ddp_powersgd", "ddp_local_sgd", "hybrid_pipeline",
          "parameter_server", "parameter_server_async", "parameter_server_ssp")
         for start in ("", "_spawn", "_fork")]  # fmt: skip
STRATEGIES = (
    *("auto", *_DDP, "deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_2_offload"),
    *("deepspeed_stage_3", "deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme", "fsdp", "fsdp_cpu_offload"),
    *("single_device", "single_xla", "xla_debug", "xla", "single_tpu", *_OURS),
)
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")
# None of these registers strategies of its own.
KNOWN_PACKAGES = ("cnnstrategies", "lightning", "torch", "torchvision", "torchmetrics", "timm")


def given(args: Sequence[str]) -> list[Given]:
    """What a command line gives; see :func:`~cnnstrategies.commands.front.given.given_keys`."""
    return given_keys(args, {**ROOTS, **NESTED})


def check(args: Sequence[str]) -> None:
    """Look at a command line that gives a configuration.

    Raises:
        ConfigurationError: A key that does not exist, or a value that it cannot have.
    """
    keys = given(args)
    for key in keys:
        if "." not in key.path and key.path not in {*ROOTS, *OPTIONS}:
            raise ConfigurationError(unknown_key(key.path, None))
        known = signature_of(key.owner)
        if known is None or key.name == "help":
            continue
        if key.name in known.parameters:
            check_value(key, known.parameters[key.name])
        elif not known.takes_others:
            raise ConfigurationError(unknown_key(key.path, key.owner))
    classes = [str(key.value) for key in keys if key.name == "class_path" and "." in str(key.value)]
    for key in keys:
        if key.path == "trainer.strategy" and all(one.partition(".")[0] in KNOWN_PACKAGES for one in classes):
            check_name(key.path, key.value, STRATEGIES)
        if key.path == "trainer.accelerator":
            check_name(key.path, key.value, ACCELERATORS)


def check_name(path: str, value: Any, names: Sequence[str]) -> None:
    """Refuse a strategy or accelerator that is not registered.

    Raises:
        ConfigurationError: The name is unknown; the message lists the known ones.
    """
    if isinstance(value, str) and value not in names and re.fullmatch(r"\w+", value):
        what = path.rpartition(".")[2]
        raise ConfigurationError(f"{path}: no {what} {value!r}{accepted(value, names)}")


def check_value(key: Given, parameter: Parameter) -> None:
    """Refuse a single value that a parameter's annotation excludes.

    Raises:
        ConfigurationError: It does.
    """
    annotation = "" if parameter.annotation is None else ast.unparse(parameter.annotation)
    is_null = key.value is None or (key.value == "null" and "str" not in annotation)
    if is_null and not takes_null(parameter):
        expected = annotation.replace(" | ", " or ")
        raise ConfigurationError(f"{key.path}: null is not accepted; it must be {expected}, or be left out")
    if isinstance(key.value, Mapping | list) or "${" in str(key.value):
        return
    try:
        value = yaml.safe_load(key.value) if isinstance(key.value, str) else key.value
    except yaml.YAMLError:
        return
    names = []
    # One that fits will do: to find the next may take the source of torch.
    for one in _members(parameter.annotation, parameter.module):
        if one is ANYTHING or _fits(value, one):
            return
        names.append("null" if one is None else one.__name__ if isinstance(one, type) else repr(one))
    expected = " or ".join(", ".join(names).rsplit(", ", 1))
    raise ConfigurationError(f"{key.path}: {str(key.value)!r} is not accepted; it must be {expected}")


def takes_null(parameter: Parameter) -> bool:
    """Whether a parameter admits null, or may."""
    return parameter.optional or _may_be_none(parameter.annotation, parameter.module)


def _may_be_none(annotation: ast.expr | None, module: Module, steps: int = 0) -> bool:
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _may_be_none(left, module, steps) or _may_be_none(right, module, steps)
        case ast.Subscript(value=ast.Name("Union"), slice=ast.Tuple(elts=parts)):
            return any(_may_be_none(part, module, steps) for part in parts)
        case (
            ast.Name("str" | "int" | "float" | "bool")
            | ast.Subscript(value=ast.Name("list" | "dict" | "tuple" | "Sequence" | "Mapping" | "Callable"))
        ):
            return False
        case ast.Name(name) if steps < MOST_STEPS:
            found = find(f"{module.name}.{name}")
            if found is not None and isinstance(found[0], ast.Assign):
                return _may_be_none(found[0].value, found[1], steps + 1)
            return found is None or not isinstance(found[0], ast.ClassDef)
    return True


def accepted_by(parameter: Parameter) -> list[Any]:
    """The types and constants that a parameter admits; ANYTHING is among them if there are others."""
    return list(_members(parameter.annotation, parameter.module))


def _fits(value: Any, one: Any) -> bool:
    if one is None:
        return value is None
    if one is bool:
        return isinstance(value, bool)
    if one in (int, float):
        try:
            one(value)
        except (TypeError, ValueError):
            return False
        return True
    return str(value) == str(one)


def _members(annotation: ast.expr | None, module: Module, steps: int = 0) -> Iterator[Any]:
    match annotation:
        case ast.Constant(value=None):
            yield None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _members(left, module, steps)
            yield from _members(right, module, steps)
        case ast.Subscript(value=ast.Name("Literal"), slice=inner):
            for one in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
                yield one.value if isinstance(one, ast.Constant) else ANYTHING
        case ast.Subscript(value=ast.Name("Optional"), slice=inner):
            yield from _members(inner, module, steps)
            yield None
        case ast.Subscript(value=ast.Name("Union"), slice=ast.Tuple(elts=parts)):
            for part in parts:
                yield from _members(part, module, steps)
        case ast.Name("int" | "float" | "bool" as name):
            yield {"int": int, "float": float, "bool": bool}[name]
        case ast.Name(name) if steps < MOST_STEPS:
            found = find(f"{module.name}.{name}")
            if found is None or not isinstance(found[0], ast.Assign):
                yield ANYTHING
            else:
                yield from _members(found[0].value, found[1], steps + 1)
        case _:
            yield ANYTHING


def signature_of(owner: str | None) -> Signature | None:
    """What a class takes, by its import path or, for well-known ones, its name."""
    paths = [] if not isinstance(owner, str) else [owner] if "." in owner else [f"{home}.{owner}" for home in HOMES]
    return next((found for path in paths if (found := signature(path)) is not None), None)


def unknown_key(path: str, owner: str | None) -> str:
    """What is said of a key that does not exist."""
    name = path.rpartition(".")[2]
    if owner is None:
        return f"unknown key {path}{accepted(name, list(ROOTS))}"
    if hint := misspelt(name):
        return f"unknown key {path}: {hint}"
    found = signature_of(owner)
    names = [one for one in found.parameters if one not in FROM_ELSEWHERE] if found else []
    label = owner if path.count(".") > 1 else owner.rpartition(".")[2]
    return f"unknown key {path}: {label} has no {name!r}{accepted(name, names)}"


def accepted(value: str, names: Sequence[str]) -> str:
    """The names that there are, and the one that may have been meant."""
    if not names:
        return ""
    close = difflib.get_close_matches(value, names, n=1)
    if close and len(names) > MOST_NAMES:
        return f"; did you mean {close[0]!r}?"
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} accepted: {', '.join(names)}"
