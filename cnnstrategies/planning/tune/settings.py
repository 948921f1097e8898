"""Settings that ``tune`` can try, and their conversion to a configuration."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cnnstrategies.planning.candidates import Effect

CALLBACK = "cnnstrategies.callbacks.ComputeSettings"


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with nested keys from values with dotted keys.

    Args:
        values: Values by dotted keys, such as ``{"trainer.precision": "bf16-mixed"}``. Values whose keys begin with
            ``ComputeSettings.`` become arguments of one callback of the class ``ComputeSettings``.
    """
    result: dict[str, Any] = {}
    arguments = {path.partition(".")[2]: value for path, value in values.items() if path.startswith("ComputeSettings.")}
    if arguments:
        result["trainer"] = {"callbacks+": {"class_path": CALLBACK, "init_args": arguments}}
    for path, value in values.items():
        if path.startswith("ComputeSettings."):
            continue
        *parents, name = path.split(".")
        section = result
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return result


@dataclass(frozen=True)
class Setting:
    """A change of the configuration that ``tune`` can try.

    Attributes:
        name: Name that tables show.
        values: Values that the setting changes. Keys are dotted keys of the configuration.
        effect: Effect on the training result.
    """

    name: str
    values: Mapping[str, Any]
    effect: Effect


def joined(settings: Sequence[Setting]) -> Setting:
    """Return one setting with the values of several settings.

    If several settings have a value for the same key, the value of the last of these settings is used.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        values.update(setting.values)
    return Setting(", ".join(setting.name for setting in settings), values, max(setting.effect for setting in settings))


def factorial(choices: Sequence[Sequence[Setting]]) -> Iterator[Setting]:
    """Yield every combination of settings with at most one setting from each group. The empty combination is left out.

    All these combinations are needed, because the effect of a setting may depend on the other settings.
    """
    for combination in itertools.product(*((None, *group) for group in choices)):
        if chosen := [setting for setting in combination if setting is not None]:
            yield joined(chosen)
