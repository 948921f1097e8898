"""Checks of a configuration, and error messages of one line with the key, its value and the accepted values."""

import contextlib
import inspect
import pydoc
import re
from collections.abc import Sequence
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import nn

from cnnstrategies.commands.arguments.keys import (
    ACCELERATORS,
    FROM_ELSEWHERE,
    HOMES,
    OF_CLASS,
    ROOTS,
    SECTIONS,
    ConfiguredKey,
    accepted,
    as_network,
    configured_keys,
    misspelt,
    none_given,
    unknown_key,
)
from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.arguments.refuse import in_one_line
from cnnstrategies.commands.run.strategy_names import KEY, explain_nested, unknown
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.old_names import ROOT, is_now, renamed

# If a key accepts several types, jsonargparse gives a reason for each type that the value does not fit. This pattern
# matches the start of reasons that do not help the user, for example that the value is not null. Error messages of this
# package leave these reasons out.
_OTHER_TYPES = re.compile(r"\n\s*-? ?(?:Expected an? <class|Given value)")
OF_LIGHTNING = " (of lightning.pytorch, and not of pytorch_lightning)"


def check_trainer_names(trainer: Any) -> None:
    """Raise a ConfigurationError if the name of the strategy or of the accelerator is not known.

    Args:
        trainer: The configuration's section ``trainer``.
    """
    strategy, accelerator = trainer.strategy, trainer.accelerator
    names = ("auto", *StrategyRegistry.available_strategies())
    if isinstance(strategy, str) and strategy not in names and re.fullmatch(r"\w+", strategy):
        raise ConfigurationError(unknown(strategy))
    if isinstance(accelerator, str) and accelerator not in ACCELERATORS and re.fullmatch(r"\w+", accelerator):
        message = f"unknown accelerator {accelerator!r}{accepted(accelerator, ACCELERATORS)}"
        raise ConfigurationError(f"trainer.accelerator: {message}")


def check_strategy_class(keys: Sequence[ConfiguredKey]) -> None:
    """Raise a ConfigurationError if the import path of a strategy does not name a strategy.

    jsonargparse itself would accept such an import path as a registered name, because ``trainer.strategy`` also accepts
    registered names.

    Args:
        keys: The keys of the configuration.
    """
    paths = [key.value for key in keys if key.path in (KEY, f"{KEY}.class_path")]
    path = next((value for value in reversed(paths) if isinstance(value, str)), "")
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", path):
        return
    target = located(path)
    if isinstance(target, type) and not issubclass(target, Strategy):
        raise ConfigurationError(f"{KEY}: {path!r} is not a strategy{OF_LIGHTNING}")
    if target is not None:
        return
    module, _, name = path.rpartition(".")
    try:
        import_module(module)
        reason = f"module {module!r} has no class {name!r}"
    except ModuleNotFoundError as error:
        in_path = f"{module}.".startswith(f"{error.name}.")
        remedy = "run the command from the directory of the module's file" if in_path else "install this module"
        reason = f"No module named {error.name!r}; {remedy}"
    except Exception as error:
        reason = f"{type(error).__name__}: {in_one_line(str(error))}"
    raise ConfigurationError(f"{KEY}: cannot use {path!r}: {reason}")


def located(name: Any) -> Any:
    """Return the class, function or other object that a name in a configuration refers to.

    Return None if there is no object with this name.

    Args:
        name: An import path, the name of a class in `HOMES`, or the registered name of a strategy.
    """
    if isinstance(name, str) and name in StrategyRegistry:
        return StrategyRegistry[name]["strategy"]
    paths = [] if not isinstance(name, str) else [name] if "." in name else [f"{home}.{name}" for home in HOMES]
    with contextlib.suppress(pydoc.ErrorDuringImport):
        return next((target for path in paths if (target := pydoc.locate(path)) is not None), None)
    return None


def parameters_of(target: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function, or of the constructor of a class, by name.

    If a constructor has ``**kwargs``, the parameters of the base class's constructor are included. If `target` is not
    callable, the result is empty.
    """
    parameters: dict[str, inspect.Parameter] = {}
    for function_or_class in target.__mro__ if isinstance(target, type) else (target,):
        function = vars(function_or_class).get("__init__") if isinstance(target, type) else function_or_class
        if not callable(function):
            continue
        try:
            signature = inspect.signature(function).parameters
        except ValueError:  # Python does not know the parameters of some functions that are written in C.
            break
        parameters = {**signature, **parameters}
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature.values()):
            break
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: entry for name, entry in parameters.items() if name != "self" and entry.kind not in variable}


def check_names(keys: Sequence[ConfiguredKey]) -> None:
    """Raise a ConfigurationError if a key has been renamed. The error message gives the new name."""
    for key in keys:
        root, _, name = key.path.rpartition(".")
        owner = located(key.owner) if root else ROOT
        if not isinstance(owner, type | str) or name in parameters_of(owner):
            continue
        if (new := renamed(owner, name)) is not None:
            raise ConfigurationError(f"{key.path}: {is_now(name, new, root)}")


def check_nulls(keys: Sequence[ConfiguredKey]) -> None:
    """Raise a ConfigurationError if a configuration sets a parameter to null, and the parameter's type excludes None.

    jsonargparse accepts null for such a parameter. The class would then fail, or work incorrectly.
    """
    for key in keys:
        if key.value not in (None, "null"):
            continue
        parameter = parameters_of(located(key.owner)).get(key.path.rpartition(".")[2])
        if parameter is None or parameter.default is None:
            continue
        kind = parameter.annotation
        options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        needed = all(option is not object and isinstance(get_origin(option) or option, type) for option in options)
        if not needed or NoneType in options or (key.value == "null" and str in options):
            continue
        names = " or ".join(re.sub(r"[\w.]+\.", "", inspect.formatannotation(option)) for option in options)
        raise ConfigurationError(f"{key.path}: null is not accepted; use a value of type {names}, or leave the key out")


def explain_parse_error(message: str, args: Sequence[str]) -> str:
    """Return an error message of one line for a configuration that cannot be parsed.

    Args:
        message: jsonargparse's error message.
        args: Command-line arguments.
    """
    if match := re.search(r"ption '([\w.]+)'(?: is not accepted)?$", message):
        return _explain_unknown(match[1], args)
    if match := re.search(r"[Uu]nrecognized arguments: (?:--)?(\S*?)(?:[=\s]|$)", message):
        return _explain_unknown(match[1], args)
    if (line := explain_nested(message, configured_keys(args))) is not None:
        return line
    key = match[1] if (match := re.search(r'Parser key "([^"]+)"', message)) else None
    where = f"{_full_key(key, args)}: " if key else ""
    if match := re.fullmatch(r"argument (--\S+): expected one argument", message):
        return f"{match[1]} needs a value, as in {match[1]} VALUE"
    if match := re.search(r"arguments are required: (.+)", message):
        names = [name.rpartition(".")[2] for name in match[1].split(", ")]
        if names == ["ckpt_path"]:
            return "ckpt_path is missing: give a checkpoint, as in --ckpt_path FILE"
        return _explain_missing(names, args)
    if match := re.search(r"Problem with given class_path '([^']+)':\s*(.*)", message, re.DOTALL):
        reason = in_one_line(_OTHER_TYPES.split(match[2])[0])
        return f"{where}cannot use {match[1]!r}: {reason}"
    match = re.search(r"Expected a dot import path string: (\S+)", message)
    # Use this error message only for a key that needs a class. A key that also accepts plain values, such as numbers,
    # gets the error message below, which lists the accepted types.
    if match and not re.search(r"Expected an? <class '(?!NoneType)", message):
        strategies = StrategyRegistry.available_strategies() if key == "trainer.strategy" else []
        meant = _meant(match[1], strategies)
        return f"{where}there is no class {match[1]!r}; {meant}give an import path, such as package.module.ClassName"
    if match := re.search(r"Given value: (.*)$", message, re.DOTALL):
        types = re.search(r"Subtypes: \[(.*)\]\s*\n", message)
        value, expected = in_one_line(match[1]), _types(types[1] if types else "")
        # If a module could not be imported or a value could not be converted, show jsonargparse's reason to the user.
        if raised := re.search(r"Errors:\n\s*- (?!Expected|Does not|Import path)(.*)", message):
            why = raised[1].removeprefix("Not of type timedelta: ")
            return f"{where}cannot use {value!r}: {why}"
        if key == "model" and _is_network(located(value)):
            return as_network(value)
        return f"{where}{value!r} is not accepted; it must be {expected}{OF_LIGHTNING * (key in SECTIONS)}"
    if match := re.search(r"Expected (?:an? )?(.*)\. Got value: (.*)$", message, re.DOTALL):
        value, expected = in_one_line(match[2]), _types(match[1])
        expected = f"a list, as in [{value}]" if expected == "list" else expected
        return f"{where}{value!r} is not accepted; it must be {expected}"
    return re.sub(r'^Parser key "[^"]+":\s*', where, in_one_line(message))


def _is_network(target: Any) -> bool:
    """Return whether an object is a function, or a class of networks that is not a LightningModule of any package."""
    is_module = isinstance(target, type) and issubclass(target, nn.Module) and not hasattr(target, "training_step")
    return is_module or inspect.isfunction(target)


def _meant(name: str, others: Sequence[str] = ()) -> str:
    """Return the part of an error message that suggests the correct name for a wrong name.

    The suggestion is the most similar class in `HOMES`, or the most similar name in `others`. The result is empty if no
    name is similar.
    """
    members = [item for home in HOMES for item in vars(import_module(home)).items()]
    known = [class_name for class_name, kind in members if isinstance(kind, type)]
    return f"{hint} Or " if (hint := misspelt(name, [*known, *others])) else ""


def _types(text: str) -> str:
    """Return a readable text for jsonargparse's list of types.

    For example, ``typing.Literal['a', 'b'], <class 'int'>, <class 'NoneType'>`` becomes ``'a', 'b', int or null``.
    """
    text = re.sub(r"(?:typing\.)?Literal\[([^\]]*)\]", r"\1", text)
    text = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text).replace("typing.", "").replace("NoneType", "null")
    return " or ".join(text.rsplit(", ", 1))


def _explain_unknown(key: str, args: Sequence[str]) -> str:
    """Return the error message for an unknown key.

    Args:
        key: The key from jsonargparse's error message, which may be without the keys above it: ``lr`` instead of
            ``model.init_args.lr``.
        args: Command-line arguments.
    """
    keys = configured_keys(args)
    if key == "class_path":  # jsonargparse reports class_path, but the mistake is another key beside class_path.
        parents = {configured.path.removesuffix(key) for configured in keys if configured.path.endswith(key)}
        beside = (configured.path.rpartition(".") for configured in keys)
        parent, _, name = next(
            configured for configured in beside if f"{configured[0]}." in parents and configured[2] not in OF_CLASS
        )
        return f"{parent}.{name} is at the level of class_path: put the arguments of a class below {parent}.init_args"
    for configured in keys:
        if configured.path == key or configured.path.endswith("." + key):
            return _unknown_key(configured.path, configured.owner, args)
    if hint := misspelt(key.partition(".")[0]):
        return f"unknown option {key}: {hint}"
    command = args[0] if args and args[0] in COMMANDS else "fit"
    return f"unknown option {key}; `cnnstrategies {command} --help_full` lists the options"


def _unknown_key(path: str, owner: str | None, args: Sequence[str]) -> str:
    """Return the error message for an unknown key, with the accepted names.

    Args:
        path: The key with all keys above it.
        owner: Name of the class that should have the key as a parameter; None if the class is not known.
        args: Command-line arguments.
    """
    parts = path.split(".")
    for depth, part in enumerate(parts, start=1):
        if part not in OF_CLASS and (hint := misspelt(part)):
            return f"unknown key {'.'.join(parts[:depth])}: {hint}"
    if owner is None:
        command = args[0] if args and args[0] in COMMANDS else "fit"
        names = list(dict.fromkeys([*(option.name for option in COMMANDS[command].options), *ROOTS]))
        return f"unknown key {path}{accepted(parts[-1], names)}; see `cnnstrategies {command} --help_full`"
    return unknown_key(path, owner, [*parameters_of(located(owner))])


def _explain_missing(names: Sequence[str], args: Sequence[str]) -> str:
    """Return the error message for missing arguments.

    The message names the class that needs the arguments, or the sections of the configuration that are missing.

    Args:
        names: Names of the missing arguments.
        args: Command-line arguments.
    """
    keys, missing = configured_keys(args), " and ".join(names)
    roots = {key.path.partition(".")[0] for key in keys}
    if "model" in names and "model" not in roots:
        return none_given(SECTIONS - roots)
    needs = f"needs {missing}"
    takers = [taker for taker in keys if set(names) <= parameters_of(located(taker.value)).keys()]
    # A class that has the arguments already is not the class that needs them.
    paths = {key.path.replace(".init_args.", ".") for key in keys}
    lacking = [
        taker
        for taker in takers
        if not {f"{taker.path.removesuffix('.class_path').replace('.init_args.', '.')}.{name}" for name in names}
        <= paths
    ]
    takers = lacking or takers
    functions = [taker for taker in takers if inspect.isfunction(located(taker.value))]
    # The module passes these arguments to an optimizer's or schedule's class. If they are missing, the configuration
    # names a function in place of the class, so the error message is about the function.
    if functions and set(names) <= {*FROM_ELSEWHERE}:
        return _of_function(functions[0].path.removesuffix(".class_path"), functions[0].value)
    for taker in takers:
        key = taker.path.removesuffix(".class_path")
        return f"{key}: {taker.value} {needs}: give {' and '.join(f'--{key}.{name}' for name in names)}"
    return f"a class in the configuration {needs}: add {missing} to its init_args"


def check_functions(model: Any) -> None:
    """Raise a ConfigurationError if the ``class_path`` of a model's optimizer or schedule names a function.

    jsonargparse accepts only a class in ``class_path``.

    Args:
        model: The configuration's section ``model``.
    """
    for name in ("optimizer", "lr_scheduler"):
        path: Any = getattr((getattr(model, "init_args", None) or {}).get(name), "class_path", None)
        if inspect.isfunction(located(path)):
            raise ConfigurationError(_of_function(f"model.init_args.{name}", path))


def _of_function(key: str, name: str) -> str:
    return (
        f"{key}: {name} is a function, and class_path is for classes: write --{key}={name} without class_path, and "
        "annotate the type that the function returns (-> LRScheduler); its other arguments keep their defaults"
    )


def _full_key(key: str, args: Sequence[str]) -> str:
    """Return a key with all keys above it, such as ``trainer.max_epochs`` for ``max_epochs``.

    jsonargparse's error messages may contain only the last part of the path.
    """
    return next(
        (
            configured.path
            for configured in configured_keys(args)
            if configured.path == key or configured.path.endswith("." + key)
        ),
        key,
    )
