"""One readable line for a mistake in a configuration: the key, the value, and what is accepted."""

import difflib
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cnnstrategies.callbacks import GracefulStop, PredictionWriter
from cnnstrategies.cluster.hosts import Network
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.commands.refuse import in_one_line
from cnnstrategies.errors import ConfigurationError

# The keys of a configuration that have no class_path, and what they configure.
ROOTS: dict[str, type | None] = {
    "trainer": Trainer,
    "model": None,
    "data": None,
    "checkpoint": ModelCheckpoint,
    "predictions": PredictionWriter,
    "stop": GracefulStop,
    "cluster": ClusterOptions,
    "network": Network,
    "seed_everything": None,
    "ckpt_path": None,
}
# Arguments that no configuration gives: the caller does.
FROM_ELSEWHERE = ("params", "optimizer")
CHECKPOINT_WORDS = ("best", "last", "hpc")
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")


def check_trainer_names(strategy: Any, accelerator: Any) -> None:
    """Refuse a strategy or accelerator that is not registered.

    Args:
        strategy: ``trainer.strategy``; only a name is checked.
        accelerator: ``trainer.accelerator``; only a name is checked.

    Raises:
        ConfigurationError: The name is unknown; the message lists the known ones.
    """
    names = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy not in names:
        raise ConfigurationError(f"trainer.strategy: no strategy {strategy!r}{_accepted(strategy, names)}")
    if isinstance(accelerator, str) and accelerator not in ACCELERATORS:
        raise ConfigurationError(
            f"trainer.accelerator: no accelerator {accelerator!r}{_accepted(accelerator, ACCELERATORS)}"
        )


def check_checkpoint(path: Any, words: Sequence[str] = CHECKPOINT_WORDS) -> None:
    """Refuse a checkpoint that does not exist.

    Args:
        path: ``ckpt_path``: a file or directory, a URL, one of ``words``, or None.
        words: What may stand in place of a path; ``registry:...`` may too, unless they are none.

    Raises:
        ConfigurationError: There is no such file; the message lists the checkpoints beside it.
    """
    if path is None or path in words or "://" in str(path) or Path(path).exists():
        return
    if words and re.match(r"registry(:|$)", str(path), re.IGNORECASE):
        return
    beside = ", ".join(sorted(file.name for file in Path(path).parent.glob("*.ckpt")))
    hint = f"its directory has {beside}" if beside else "its directory has none"
    raise ConfigurationError(f"ckpt_path: no checkpoint {str(path)!r}; {hint}; give {' or '.join((*words, 'a path'))}")


def explain_parse_error(message: str, args: Sequence[str]) -> str:
    """The line that says why a configuration could not be parsed.

    Args:
        message: What jsonargparse says, over several lines.
        args: The command line, which names the configuration files.
    """
    if match := re.search(r"ption '([\w.]+)'(?: is not accepted)?$", message):
        return _unknown_key(match[1], args)
    if match := re.search(r"[Uu]nrecognized arguments: (?:--)?(\S*?)(?:[=\s]|$)", message):
        return _unknown_key(match[1], args)
    key = match[1] if (match := re.search(r'Parser key "([^"]+)"', message)) else None
    where = f"{_full_key(key, args)}: " if key else ""
    if match := re.search(r"Problem with given class_path '([^']+)':\s*(.*)", message, re.DOTALL):
        return f"{where}cannot use {match[1]!r}: {in_one_line(match[2])}{_similar_attribute(match[1])}"
    if match := re.search(r"Expected a dot import path string: (\S+)", message):
        return f"{where}no class {match[1]!r}{_classes_for(key)}"
    if match := re.search(r"Given value: (.*)$", message, re.DOTALL):
        types = re.search(r"Subtypes: \[(.*)\]\s*\n", message)
        return f"{where}{in_one_line(match[1])!r} is not accepted; it must be {_types(types[1] if types else '')}"
    if match := re.search(r"Expected (?:an? )?(.*)\. Got value: (.*)$", message, re.DOTALL):
        return f"{where}{in_one_line(match[2])!r} is not accepted; it must be {_types(match[1])}"
    return re.sub(r'^Parser key "[^"]+":\s*', where, in_one_line(message))


def _accepted(value: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    close = difflib.get_close_matches(value, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} accepted: {', '.join(names)}"


def _types(text: str) -> str:
    """Turn ``typing.Literal['a', 'b'], <class 'int'>, <class 'NoneType'>`` into ``'a', 'b', int or null``."""
    text = re.sub(r"(?:typing\.)?Literal\[([^\]]*)\]", r"\1", text)
    text = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", text).replace("typing.", "").replace("NoneType", "null")
    return " or ".join(text.rsplit(", ", 1))


def _unknown_key(key: str, args: Sequence[str]) -> str:
    """Name the whole key and the parameters that its class has."""
    for path, parent in _given_keys(args):
        if path != key and not path.endswith("." + key):
            continue
        name = key.rpartition(".")[2]
        owner = parent.get("class_path") or ROOTS.get(path.rpartition(".")[0])
        if owner is None:
            return f"unknown key {path}{_accepted(name, list(ROOTS))}"
        return f"unknown key {path}: {_name(owner)} has no {name!r}{_accepted(name, _parameters(owner))}"
    return f"unknown option {key}; `cnnstrategies fit --help` lists the options"


def _full_key(key: str, args: Sequence[str]) -> str:
    """The key from the root, where jsonargparse names only its end."""
    return next((path for path, _ in _given_keys(args) if path == key or path.endswith("." + key)), key)


def _given_keys(args: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every key that was given, from the root, with the mapping that holds its ``class_path`` if it has one."""
    files: dict[str, Any] = {}
    for position, argument in enumerate(args):
        if match := re.fullmatch(r"(?:--config|-c)(?:=(.*))?", argument):
            file = Path(match[1] or (args[position + 1] if position + 1 < len(args) else ""))
            if file.is_file():
                _merge(files, yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    flags: dict[str, Any] = {}
    for position, argument in enumerate(args):
        if match := re.fullmatch(r"--([\w.]+)\+?(?:=(.*))?", argument, re.DOTALL):
            value = match[2] if match[2] is not None else (args[position + 1] if position + 1 < len(args) else None)
            nested: Any = value
            for part in reversed(match[1].split(".")):
                nested = {part: nested}
            _merge(flags, nested)
    merged = _merge(_merge({}, files), flags)
    # What was given on the command line is the likelier culprit.
    yield from _walk(flags, merged, "")
    yield from _walk(merged, merged, "")


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in new.items():
        old = into.get(key)
        if isinstance(value, Mapping):
            into[key] = _merge(old if isinstance(old, dict) else _as_class(old), value)
        elif isinstance(old, dict) and "class_path" in old and isinstance(value, str):
            old["class_path"] = value
        else:
            into[key] = value
    return into


def _as_class(value: Any) -> dict[str, Any]:
    return {"class_path": value} if isinstance(value, str) else {}


def _walk(tree: Any, merged: Any, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(tree, list):
        for item in tree:
            yield from _walk(item, item, prefix)
    if not isinstance(tree, Mapping):
        return
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        beside = merged.get(key) if isinstance(merged, Mapping) else None
        if key == "init_args" and isinstance(value, Mapping):
            for name in value:
                yield f"{path}.{name}", merged
        elif isinstance(merged, Mapping):
            yield path, merged
        yield from _walk(value, beside, path)


def _name(owner: str | type) -> str:
    return owner if isinstance(owner, str) else owner.__name__


def _parameters(owner: str | type) -> list[str]:
    """The parameters of a class, or of the class or function at a path; a class name may stand for its path."""
    target: Any = owner
    if isinstance(owner, str):
        module, _, name = owner.rpartition(".")
        bases = (LightningDataModule, LightningModule, Callback, Strategy, Logger, nn.Module, Optimizer, LRScheduler)
        if module:
            target = getattr(importlib.import_module(module), name)
        else:
            target = next(cls for base in bases for cls in _subclasses(base) if cls.__name__ == name)
    names: dict[str, None] = {}
    for cls in inspect.getmro(target) if inspect.isclass(target) else (target,):
        if inspect.isclass(cls) and "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(cls).parameters.values()
        names |= dict.fromkeys(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in names if name not in FROM_ELSEWHERE]


def _similar_attribute(class_path: str) -> str:
    module, _, name = class_path.rpartition(".")
    try:
        names = dir(importlib.import_module(module))
    except ImportError:
        return ""
    close = difflib.get_close_matches(name, names, n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""


def _classes_for(key: str | None) -> str:
    if key == "data":
        names = sorted(cls.__name__ for cls in _subclasses(LightningDataModule) if _is_ours(cls))
        return f"; accepted: {', '.join(names)}, or the import path of your own LightningDataModule"
    return "; give its import path, for example package.module.ClassName"


def _subclasses(cls: type) -> Iterator[type]:
    subclasses: list[type] = cls.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _subclasses(subclass)


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("cnnstrategies.") and not inspect.isabstract(cls) and cls.__name__[0] != "_"
