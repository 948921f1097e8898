"""Registered names of strategies, such as ``hybrid_pipeline``, in the place of a class in a configuration.

Lightning's Trainer looks up a name without options. A name with options is replaced by the class that is registered
under this name, with the registered arguments, so that the configuration that a run saves names the class.
"""

import re
from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import cnnstrategies.strategies  # noqa: F401  # registers the names of this package
from cnnstrategies._jsonargparse_private import NestedArg, import_path, pass_values_through
from cnnstrategies.commands.arguments.keys import ConfiguredKey, accepted
from cnnstrategies.commands.arguments.recipes import names
from cnnstrategies.errors import ConfigurationError

KEY = "trainer.strategy"


def is_registered(name: Any) -> bool:
    """Whether a strategy is registered under a name."""
    return isinstance(name, str) and name in StrategyRegistry


def class_path_of(name: str) -> str:
    """Return the import path of the class that is registered under a name."""
    return str(import_path(StrategyRegistry[name]["strategy"]))


def _with_class(value: Any, previous: Any) -> tuple[Any, Any]:
    """Return a value of ``trainer.strategy``, and the value that it changes, with classes in the place of names."""
    if is_registered(previous):
        previous = _class_of(previous, {})
    if isinstance(value, NestedArg) and value.key == "class_path":
        value = {"class_path": value.val}
    if isinstance(value, dict | Namespace) and is_registered(value.get("class_path")):
        mapping = value if isinstance(value, dict) else vars(value)
        value = {**mapping, **_class_of(mapping["class_path"], mapping.get("init_args") or {})}
    return value, previous


def _class_of(name: str, arguments: Any) -> dict[str, Any]:
    """Return class and arguments of a registered name; the user's arguments replace the registered ones."""
    arguments = arguments if isinstance(arguments, dict) else vars(arguments)
    return {"class_path": class_path_of(name), "init_args": {**StrategyRegistry[name]["init_params"], **arguments}}


def accept_names() -> None:
    """Have every parser accept registered names where a strategy's class may stand."""
    pass_values_through(Strategy, _with_class)


def with_help_of_class(words: Sequence[str]) -> list[str]:
    """Return a command line in which ``--trainer.strategy.help`` asks for a class and not for a registered name."""
    result = list(words)
    for position, word in enumerate(words):
        option, equals, name = word.partition("=")
        if option != f"--{KEY}.help":
            continue
        if equals and is_registered(name):
            result[position] = f"{option}={class_path_of(name)}"
        elif not equals and is_registered(following := "".join(words[position + 1 : position + 2])):
            result[position + 1] = class_path_of(following)
    return result


def check_recipe_names(keys: Sequence[ConfiguredKey]) -> None:
    """Refuse the name of a configuration of this package where a strategy's name belongs."""
    for key in keys:
        if key.path in (KEY, f"{KEY}.class_path") and not is_registered(key.value):
            recipe = f"strategy/{key.value}"
            if recipe in names():
                raise ConfigurationError(
                    f"{KEY}: {key.value!r} is the name of a configuration and not of a strategy; give --config "
                    f"{recipe} after the other --config"
                )


def explain_nested(message: str, keys: Sequence[ConfiguredKey]) -> str | None:
    """Return the line for an option of a strategy whose class is not known; None for other messages."""
    match = re.search(rf'Parser key "{re.escape(KEY)}".*NestedArg\(key=\'([\w.]+)\'', message, re.DOTALL)
    if not match:
        return None
    values = {key.path: key.value for key in keys}
    name = values.get(f"{KEY}.class_path", values.get(KEY))
    if not isinstance(name, str):
        name = "auto"
    if name not in ("auto", "null"):
        return f"{KEY}: no strategy {name!r}{accepted(name, StrategyRegistry.available_strategies())}"
    return (
        f"{KEY}.{match[1]}: strategy {name!r} takes no options; name a strategy that does, as in --{KEY} "
        f"hybrid_pipeline --{KEY}.stages 2"
    )
