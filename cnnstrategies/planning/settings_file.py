"""What was chosen as a YAML file that goes behind a configuration."""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

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
    """Write lines of a configuration, whole or not at all; of programs that do so together, the last one's stay.

    Args:
        path: The file.
        content: The configuration's part.
        comment: Lines for its head.
    """
    text = yaml.safe_dump(dict(content), sort_keys=False, default_flow_style=None)
    part = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.partial")
    part.write_text("".join(f"# {line}\n" for line in comment) + text, encoding="utf-8")
    part.replace(path)
