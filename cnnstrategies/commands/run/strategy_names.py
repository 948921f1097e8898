"""Support for registered names of strategies in ``class_path``, as in ``class_path: hybrid_pipeline``.

Lightning's Trainer itself accepts a registered name only if the configuration sets no options of the strategy. If a
configuration sets options, this module replaces the name by the registered class, and adds the registered arguments.
The configuration that a run saves contains the class.
"""

import re
from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import cnnstrategies.strategies  # noqa: F401  # Registers this package's strategies by name.
from cnnstrategies._jsonargparse_private import NestedArg, import_path, pass_values_through
from cnnstrategies.commands.arguments.keys import ConfiguredKey, closest
from cnnstrategies.commands.arguments.recipes import names
from cnnstrategies.errors import ConfigurationError

KEY = "trainer.strategy"
# Strategies of Lightning that the error message for an unknown strategy lists.
COMMON_NAMES = ("auto", "ddp", "fsdp", "deepspeed")
PACKAGE = "cnnstrategies"


def is_registered(name: Any) -> bool:
    """Return whether a strategy is registered under a name."""
    return isinstance(name, str) and name in StrategyRegistry


def unknown(name: str) -> str:
    """Return the error message for a strategy's name that is not registered.

    The message suggests the most similar registered name. If no name is similar, the message lists the strategies of
    this package and the common strategies of Lightning, without the variants ``_spawn`` and ``_fork``.
    """
    guess = closest(name, ["auto", *StrategyRegistry.available_strategies()])
    own_names = [
        key
        for key, entry in StrategyRegistry.items()
        if entry["strategy"].__module__.partition(".")[0] == PACKAGE and not key.endswith(("_spawn", "_fork"))
    ]
    choices = "" if guess != ";" else f" use one of: {', '.join((*COMMON_NAMES, *own_names))}; or an import path"
    return f"{KEY}: unknown strategy {name!r}{guess}{choices}"


def class_path_of(name: str) -> str:
    """Return the import path of the class that is registered under a name."""
    return str(import_path(StrategyRegistry[name]["strategy"]))


def _with_class(value: Any, previous: Any) -> tuple[Any, Any]:
    """Replace registered names in two values of ``trainer.strategy`` by their classes.

    Args:
        value: The value that the parser reads now.
        previous: The value that the parser has read before, from an earlier file or argument.

    Returns:
        The two values after the replacement.
    """
    if is_registered(previous):
        previous = _class_of(previous, {})
    if isinstance(value, NestedArg) and value.key == "class_path":
        value = {"class_path": value.val}
    if isinstance(value, dict | Namespace) and is_registered(value.get("class_path")):
        mapping = value if isinstance(value, dict) else vars(value)
        value = {**mapping, **_class_of(mapping["class_path"], mapping.get("init_args") or {})}
    return value, previous


def _class_of(name: str, arguments: Any) -> dict[str, Any]:
    """Return the class that is registered under a name and its arguments, as ``class_path`` and ``init_args``.

    Args:
        name: The registered name.
        arguments: The user's arguments, which override the registered arguments.
    """
    arguments = arguments if isinstance(arguments, dict) else vars(arguments)
    return {"class_path": class_path_of(name), "init_args": {**StrategyRegistry[name]["init_params"], **arguments}}


def accept_names() -> None:
    """Make all parsers accept the registered name of a strategy as its ``class_path``."""
    pass_values_through(Strategy, _with_class)


def with_help_of_class(arguments: Sequence[str]) -> list[str]:
    """Replace a registered name after ``--trainer.strategy.help`` by its class.

    Args:
        arguments: Command-line arguments.

    Returns:
        The changed command-line arguments.
    """
    result = list(arguments)
    for position, argument in enumerate(arguments):
        option, equals, name = argument.partition("=")
        if option != f"--{KEY}.help":
            continue
        if equals and is_registered(name):
            result[position] = f"{option}={class_path_of(name)}"
        elif not equals and is_registered(following := "".join(arguments[position + 1 : position + 2])):
            result[position + 1] = class_path_of(following)
    return result


def check_recipe_names(keys: Sequence[ConfiguredKey]) -> None:
    """Raise a ConfigurationError if ``trainer.strategy`` is the name of a configuration, and not of a strategy."""
    for key in keys:
        if key.path in (KEY, f"{KEY}.class_path") and not is_registered(key.value):
            configuration = f"strategy/{key.value}"
            if configuration in names():
                raise ConfigurationError(
                    f"{KEY}: {key.value!r} is the name of a configuration and not of a strategy; add --config "
                    f"{configuration} after the other --config"
                )


def explain_nested(message: str, keys: Sequence[ConfiguredKey]) -> str | None:
    """Return the error message for an option whose strategy has no options or does not exist.

    Args:
        message: jsonargparse's error message.
        keys: The keys of the configuration.

    Returns:
        The error message of one line; None if jsonargparse's error message is about something else.
    """
    match = re.search(rf'Parser key "{re.escape(KEY)}".*NestedArg\(key=\'([\w.]+)\'', message, re.DOTALL)
    if not match:
        return None
    values = {key.path: key.value for key in keys}
    name = values.get(f"{KEY}.class_path", values.get(KEY))
    if not isinstance(name, str):
        name = "auto"
    if name not in ("auto", "null"):
        return unknown(name)
    return (
        f"{KEY}.{match[1]}: strategy {name!r} has no options; choose a strategy that has this option, as in --{KEY} "
        f"hybrid_pipeline --{KEY}.stages 2"
    )
