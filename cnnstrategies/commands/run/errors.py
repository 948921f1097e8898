"""One readable line for a mistake in a configuration: the key, the value, and what is accepted."""

import contextlib
import inspect
import pydoc
import re
from collections.abc import Sequence, Set
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from lightning.pytorch.strategies import StrategyRegistry

from cnnstrategies.commands.arguments.keys import OF_CLASS, ROOTS, ConfiguredKey, accepted, configured_keys, misspelt
from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.arguments.refuse import in_one_line
from cnnstrategies.commands.run.strategy_names import explain_nested
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.old_names import ROOT, is_now, renamed

# What jsonargparse says of the other types that a key may have had, null as a rule.
_OTHER_TYPES = re.compile(r"\n\s*-? ?(?:Expected an? <class|Given value)")
SECTIONS = {"model", "data"}  # What a run is of.
OF_LIGHTNING = " (of lightning.pytorch, and not of pytorch_lightning)"
SHARDED = (".metadata", "meta.pt", "checkpoint")  # One of these is in a folder that is a checkpoint.
CHECKPOINT_WORDS = ("best", "last", "hpc")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")
# Where the classes are that a configuration may name without their module.
HOMES = (
    *("cnnstrategies", "cnnstrategies.data", "cnnstrategies.callbacks", "cnnstrategies.strategies"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers", "lightning.pytorch.strategies"),
    *("torch.optim", "torch.optim.lr_scheduler"),
)
FROM_ELSEWHERE = ("params", "optimizer")  # Arguments that no configuration gives: the caller does.


def check_trainer_names(trainer: Any) -> None:
    """Refuse a strategy or accelerator that is not registered."""
    known = {"strategy": ("auto", *StrategyRegistry.available_strategies()), "accelerator": ACCELERATORS}
    for what, value in (("strategy", trainer.strategy), ("accelerator", trainer.accelerator)):
        if isinstance(value, str) and value not in known[what] and re.fullmatch(r"\w+", value):
            raise ConfigurationError(f"trainer.{what}: no {what} {value!r}{accepted(value, known[what])}")


def located(name: Any) -> Any:
    """Return what a configuration names: by import path, as a well-known class, or as a registered strategy.

    Returns None if there is nothing of this name.
    """
    if isinstance(name, str) and name in StrategyRegistry:
        return StrategyRegistry[name]["strategy"]
    paths = [] if not isinstance(name, str) else [name] if "." in name else [f"{home}.{name}" for home in HOMES]
    with contextlib.suppress(pydoc.ErrorDuringImport):
        return next((found for path in paths if (found := pydoc.locate(path)) is not None), None)
    return None


def parameters_of(kind: Any) -> dict[str, inspect.Parameter]:
    """What a class or function takes, with what it hands on to its bases; nothing of what cannot be called."""
    found: dict[str, inspect.Parameter] = {}
    for one in kind.__mro__ if isinstance(kind, type) else (kind,):
        function = vars(one).get("__init__") if isinstance(kind, type) else one
        if not callable(function):
            continue
        try:
            own = inspect.signature(function).parameters
        except ValueError:  # It is written in C.
            break
        found = {**own, **found}
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in own.values()):
            break
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: one for name, one in found.items() if name != "self" and one.kind not in variable}


def check_names(keys: Sequence[ConfiguredKey]) -> None:
    """Refuse keys that have been renamed; the error gives the new name."""
    for key in keys:
        root, _, name = key.path.rpartition(".")
        owner = located(key.owner) if root else ROOT
        if not isinstance(owner, type | str) or name in parameters_of(owner):
            continue
        if (new := renamed(owner, name)) is not None:
            raise ConfigurationError(f"{key.path}: {is_now(name, new)}")


def check_nulls(keys: Sequence[ConfiguredKey]) -> None:
    """Refuse null where a class needs a value: jsonargparse hands it on, and what comes of it is anyone's guess."""
    for key in keys:
        if key.value not in (None, "null"):
            continue
        parameter = parameters_of(located(key.owner)).get(key.path.rpartition(".")[2])
        if parameter is None or parameter.default is None:
            continue
        kind = parameter.annotation
        options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        needed = all(one is not object and isinstance(get_origin(one) or one, type) for one in options)
        if not needed or NoneType in options or (key.value == "null" and str in options):
            continue
        names = " or ".join(re.sub(r"[\w.]+\.", "", inspect.formatannotation(one)) for one in options)
        raise ConfigurationError(f"{key.path}: null is not accepted; it must be {names}, or be left out")


def check_checkpoint(path: Any, words: Sequence[str] = CHECKPOINT_WORDS) -> None:
    """Refuse a checkpoint, as of ``ckpt_path``, that does not exist.

    In place of a path there may be one of ``words`` and, unless they are none, ``registry:...``.
    """
    if path is None or str(path) in words:
        return
    if "://" in str(path):  # Whether it is there is known to its file system alone, which says so when it is loaded.
        return
    if Path(path).is_dir() and not any((Path(path) / name).exists() for name in SHARDED):
        raise ConfigurationError(f"ckpt_path: {str(path)!r} is a folder; give a file, such as last.ckpt in it")
    if Path(path).exists():
        return
    if words and re.match(r"registry(:|$)", str(path), re.IGNORECASE):
        return
    beside = ", ".join(sorted(file.name for file in Path(path).parent.glob("*.ckpt")))
    hint = f"its directory has {beside}" if beside else "its directory has none"
    raise ConfigurationError(f"ckpt_path: no checkpoint {str(path)!r}; {hint}; give {' or '.join((*words, 'a path'))}")


def explain_parse_error(message: str, args: Sequence[str]) -> str:
    """The line that says why a configuration could not be parsed."""
    if match := re.search(r"ption '([\w.]+)'(?: is not accepted)?$", message):
        return _explain_unknown(match[1], args)
    if match := re.search(r"[Uu]nrecognized arguments: (?:--)?(\S*?)(?:[=\s]|$)", message):
        return _explain_unknown(match[1], args)
    if (line := explain_nested(message, configured_keys(args))) is not None:
        return line
    key = match[1] if (match := re.search(r'Parser key "([^"]+)"', message)) else None
    where = f"{_full_key(key, args)}: " if key else ""
    if match := re.search(r"arguments are required: (.+)", message):
        names = [name.rpartition(".")[2] for name in match[1].split(", ")]
        if names == ["ckpt_path"]:
            return "no ckpt_path: give the checkpoint, --ckpt_path FILE"
        return _explain_missing(names, args)
    if match := re.search(r"Problem with given class_path '([^']+)':\s*(.*)", message, re.DOTALL):
        why = in_one_line(_OTHER_TYPES.split(match[2])[0])
        return f"{where}cannot use {match[1]!r}: {why}"
    match = re.search(r"Expected a dot import path string: (\S+)", message)
    if match and not re.search(r"Expected an? <class '(?!NoneType)", message):  # Else a plain value is accepted.
        strategies = StrategyRegistry.available_strategies() if key == "trainer.strategy" else []
        meant = _meant(match[1], strategies)
        return f"{where}no class {match[1]!r}; {meant}give its import path, for example package.module.ClassName"
    if match := re.search(r"Given value: (.*)$", message, re.DOTALL):
        types = re.search(r"Subtypes: \[(.*)\]\s*\n", message)
        value, expected = in_one_line(match[1]), _types(types[1] if types else "")
        # What an import has raised, as of a file that is not Python.
        if raised := re.search(r"Errors:\n\s*- (?!Expected|Does not|Import path)(.*)", message):
            why = raised[1].removeprefix("Not of type timedelta: ")
            return f"{where}cannot use {value!r}: {why}"
        return f"{where}{value!r} is not accepted; it must be {expected}{OF_LIGHTNING * (key in SECTIONS)}"
    if match := re.search(r"Expected (?:an? )?(.*)\. Got value: (.*)$", message, re.DOTALL):
        value, expected = in_one_line(match[2]), _types(match[1])
        expected = f"a list, as in [{value}]" if expected == "list" else expected
        return f"{where}{value!r} is not accepted; it must be {expected}"
    return re.sub(r'^Parser key "[^"]+":\s*', where, in_one_line(message))


def _meant(name: str, others: Sequence[str] = ()) -> str:
    """Return a guess at what was meant, from the classes that are known without their modules and from other names."""
    known = [kind for home in HOMES for kind, value in vars(import_module(home)).items() if isinstance(value, type)]
    return f"{hint} Or " if (hint := misspelt(name, [*known, *others])) else ""


def _types(text: str) -> str:
    """Turn ``typing.Literal['a', 'b'], <class 'int'>, <class 'NoneType'>`` into ``'a', 'b', int or null``."""
    text = re.sub(r"(?:typing\.)?Literal\[([^\]]*)\]", r"\1", text)
    text = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text).replace("typing.", "").replace("NoneType", "null")
    return " or ".join(text.rsplit(", ", 1))


def _explain_unknown(key: str, args: Sequence[str]) -> str:
    """Name the whole key and the parameters that its class has."""
    keys = configured_keys(args)
    if key == "class_path":  # What is wrong is what stands beside it.
        parents = {one.path.removesuffix(key) for one in keys if one.path.endswith(key)}
        beside = (one.path.rpartition(".") for one in keys)
        parent, _, name = next(one for one in beside if f"{one[0]}." in parents and one[2] not in OF_CLASS)
        return f"{parent}.{name} stands beside class_path: arguments of a class go under {parent}.init_args"
    for one in keys:
        if one.path == key or one.path.endswith("." + key):
            return _unknown_key(one.path, one.owner, args)
    if hint := misspelt(key.partition(".")[0]):
        return f"unknown option {key}: {hint}"
    command = args[0] if args and args[0] in COMMANDS else "fit"
    return f"unknown option {key}; `cnnstrategies {command} --help` lists the options"


def _unknown_key(path: str, owner: str | None, args: Sequence[str]) -> str:
    """Return the line for a key that does not exist, with the names that are accepted in its place."""
    parts = path.split(".")
    for place, part in enumerate(parts, start=1):
        if part not in OF_CLASS and (hint := misspelt(part)):
            return f"unknown key {'.'.join(parts[:place])}: {hint}"
    if owner is None:
        options = [option.name for option in COMMANDS[args[0]].options] if args and args[0] in COMMANDS else []
        return f"unknown key {path}{accepted(parts[-1], list(dict.fromkeys([*options, *ROOTS])))}"
    names = [one for one in parameters_of(located(owner)) if one not in FROM_ELSEWHERE]
    label = owner if len(parts) > 2 else owner.rpartition(".")[2]
    return f"unknown key {path}: {label} has no {parts[-1]!r}{accepted(parts[-1], names)}"


def _explain_missing(names: Sequence[str], args: Sequence[str]) -> str:
    """Name the class in the configuration that needs some arguments, or the sections that are not there."""
    keys, missing = configured_keys(args), " and ".join(names)
    roots = {one.path.partition(".")[0] for one in keys}
    if "model" in names and "model" not in roots:
        return none_given(SECTIONS - roots)
    needs = f"needs {missing}"
    takers = [one for one in keys if set(names) <= parameters_of(located(one.value)).keys()]
    functions = [one for one in takers if inspect.isfunction(located(one.value))]
    if functions and set(names) <= {*FROM_ELSEWHERE}:  # To a class the caller gives them.
        return _of_function(functions[0].path.removesuffix(".class_path"), functions[0].value)
    for one in takers:
        key = one.path.removesuffix(".class_path")
        return f"{key}: {one.value} {needs}: give {' and '.join(f'--{key}.{name}' for name in names)}"
    return f"a class in the configuration {needs}: give that among its init_args"


def none_given(sections: Set[str]) -> str:
    """What is said where a configuration lacks some of its sections."""
    missing = " and ".join(sorted(sections))
    classes = " and ".join(f"--{name} CLASS" for name in sorted(sections))
    return f"no {missing}: give {classes}, or a configuration that has {missing}, as in --config quickstart"


def check_functions(model: Any) -> None:
    """Refuse a function in the place of the class of a model's optimizer or schedule: that is given to none."""
    for name in ("optimizer", "lr_scheduler"):
        path: Any = getattr((getattr(model, "init_args", None) or {}).get(name), "class_path", None)
        if inspect.isfunction(located(path)):
            raise ConfigurationError(_of_function(f"model.init_args.{name}", path))


def _of_function(key: str, name: str) -> str:
    return (
        f"{key}: {name} is a function, and class_path is for classes: name it alone, --{key}={name}, and have it say "
        "what it returns (-> LRScheduler); its other arguments keep their defaults"
    )


def _full_key(key: str, args: Sequence[str]) -> str:
    """The key from the root, where jsonargparse names only its end."""
    return next((one.path for one in configured_keys(args) if one.path == key or one.path.endswith("." + key)), key)
