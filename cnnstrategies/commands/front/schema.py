"""``cnnstrategies schema``: what a configuration may say, as a JSON schema, so that editors complete and check it.

jsonargparse can write one too, but not of the classes here: it fails at Lightning's callbacks, where a type may be any
class. This one has what the early checks know, from the source, and takes for right what they do not know.
"""

import ast
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cnnstrategies.commands.front import early
from cnnstrategies.commands.front.signatures import Parameter
from cnnstrategies.errors import ConfigurationError

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TYPES = {int: "integer", float: "number", bool: "boolean"}
REFERENCE = {"type": "string", "pattern": r"\$\{"}  # `${trainer.max_epochs}` may stand for any value.
# Where the classes are that editors are to know, by key.
CLASSES = {
    "model": ("cnnstrategies",),
    "data": ("cnnstrategies.data",),
    "trainer.callbacks": ("cnnstrategies.callbacks",),
    "trainer.strategy": ("cnnstrategies.strategies",),
}
ABSTRACT = ("ImageDataModule",)


def main(args: Sequence[str]) -> None:
    """Print the schema.

    Args:
        args: The command line from ``schema`` on.

    Raises:
        ConfigurationError: Something follows.
    """
    if len(args) > 1:
        raise ConfigurationError(f"schema {' '.join(args[1:])}: it takes nothing; write `cnnstrategies schema > FILE`")
    print(json.dumps(schema(), indent=1))


def schema() -> dict[str, Any]:
    """The schema of a configuration, as JSON has it."""
    properties: dict[str, Any] = {}
    for root, owner in early.ROOTS.items():
        if owner is not None:
            properties[root] = _arguments(owner, root)
        else:
            properties[root] = {"anyOf": [{"type": "string"}, _class(root)]} if root in CLASSES else {}
    return {"$schema": DRAFT, "title": "cnnstrategies", "type": "object", **_only(properties)}


def _arguments(owner: str, place: str = "") -> dict[str, Any]:
    """What a class takes."""
    known = early.signature_of(owner)
    if known is None:
        return {"type": "object"}
    properties = {name: _value(parameter, f"{place}.{name}") for name, parameter in known.parameters.items()}
    return {"type": "object", **({"properties": properties} if known.takes_others else _only(properties))}


def _value(parameter: Parameter, place: str) -> dict[str, Any]:
    if place == "trainer.strategy":
        return {"anyOf": [{"enum": list(early.STRATEGIES)}, _class(place), REFERENCE]}
    if place == "trainer.callbacks":
        one = {"anyOf": [{"type": "string"}, _class(place)]}
        return {"anyOf": [{"type": "array", "items": one}, one, {"type": "null"}]}
    if place == "trainer.accelerator":
        return {"anyOf": [{"enum": list(early.ACCELERATORS)}, {"type": "object"}, REFERENCE]}
    types = early.accepted_by(parameter)
    if early.ANYTHING in types:
        return {}
    constants = [one for one in types if not isinstance(one, type)]
    plain = [{"type": TYPES[one]} for one in types if isinstance(one, type)]
    return {"anyOf": [*plain, *([{"enum": constants}] if constants else []), REFERENCE]}


def _class(place: str) -> dict[str, Any]:
    """One of the classes of a place with its arguments, or any other by its import path."""
    known = {name: path for home in CLASSES[place] for name, path in _exported(home).items()}
    listed = {"anyOf": [{"enum": [*known.values(), *known]}, {"type": "string"}]}
    rules = [
        {
            "if": {"properties": {"class_path": {"enum": [path, name]}}, "required": ["class_path"]},
            "then": {"properties": {"init_args": _arguments(path)}},
        }
        for name, path in known.items()
    ]
    properties = {"class_path": listed, "init_args": {"type": "object"}, "dict_kwargs": {"type": "object"}}
    return {"type": "object", "properties": properties, "allOf": rules}


def _exported(package: str) -> dict[str, str]:
    """The classes that a package exports, by their names; read, not imported."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    for statement in ast.parse(Path(found.origin).read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name("__all__")], value=value):
                names = [name for name in ast.literal_eval(value) if name[0].isupper() and name not in ABSTRACT]
                paths = {name: f"{package}.{name}" for name in names if not name.endswith("Error")}
                return {name: path for name, path in paths.items() if early.signature_of(path) is not None}
    return {}


def _only(properties: dict[str, Any]) -> dict[str, Any]:
    return {"properties": properties, "additionalProperties": False}
