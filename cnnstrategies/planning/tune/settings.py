"""What can be tried on a device: settings that one may choose freely, and those that change what is learned."""

import itertools
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cnnstrategies.planning.candidates import Effect

CALLBACK = "cnnstrategies.callbacks.ComputeSettings"


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested ones.

    Args:
        values: Such as ``{"trainer.precision": "bf16-mixed"}``; keys under ``ComputeSettings`` become the arguments
            of one such callback.
    """
    result: dict[str, Any] = {}
    arguments = {path.partition(".")[2]: value for path, value in values.items() if path.startswith("ComputeSettings.")}
    if arguments:
        result["trainer"] = {"callbacks+": {"class_path": CALLBACK, "init_args": arguments}}
    for path, value in values.items():
        if path.startswith("ComputeSettings."):
            continue
        *parents, name = path.split(".")
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return result


def write_commented(path: Path, content: Mapping[str, Any], comment: Sequence[str] = ()) -> None:
    """Write lines of a configuration, whole or not at all; of programs that do so together, the last one's stay."""
    text = yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=None)
    part = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    part.write_text("".join(f"# {line}\n" for line in comment) + text, encoding="utf-8")
    part.replace(path)


@dataclass(frozen=True)
class Setting:
    """One way to run."""

    name: str
    values: Mapping[str, Any]
    effect: Effect


def joined(settings: Sequence[Setting]) -> Setting:
    """Settings as one; of two values of one key the last one's holds."""
    values: dict[str, Any] = {}
    for one in settings:
        values.update(one.values)
    return Setting(", ".join(one.name for one in settings), values, max(one.effect for one in settings))


def factorial(choices: Sequence[Sequence[Setting]]) -> Iterator[Setting]:
    """All combinations of one or none of each group but the empty one; they interact, so none is left out."""
    for combination in itertools.product(*((None, *group) for group in choices)):
        if chosen := [one for one in combination if one is not None]:
            yield joined(chosen)
