"""Reading of a configuration's keys from command-line arguments and files, without LightningCLI's parser.

Checks and error messages use the keys, because the parser may fail on a configuration with mistakes.
"""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cnnstrategies.commands.arguments.refuse import in_one_line
from cnnstrategies.errors import ConfigurationError

# Maps each top-level key of a configuration to the class whose parameters are the keys below it. The class is None for
# `model` and `data`, because the configuration names their classes, and for keys with a plain value.
ROOTS: dict[str, str | None] = {
    "trainer": "lightning.pytorch.Trainer",
    "model": None,
    "data": None,
    "checkpoint": "lightning.pytorch.callbacks.ModelCheckpoint",
    "predictions": "cnnstrategies.callbacks.PredictionWriter",
    "pictures": None,
    "stop": "cnnstrategies.callbacks.GracefulStop",
    "cluster": "cnnstrategies.cluster.options.ClusterOptions",
    "interconnect": "cnnstrategies.cluster.hosts.Interconnect",
    "seed_everything": None,
    "ckpt_path": None,
    "run_name": None,
    "guard": None,
    "slow_lines": None,
}
# Maps the path of a nested key to the class whose parameters are the keys below the nested key.
NESTED = {
    "cluster.kubernetes": "cnnstrategies.cluster.options.KubernetesOptions",
    "cluster.ray": "cnnstrategies.cluster.options.RayOptions",
}
OF_CLASS = ("class_path", "init_args", "dict_kwargs")  # Keys with which a configuration describes an object.
SECTIONS = {"model", "data"}  # Names of the two sections that most configurations need.
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")
# Modules whose classes a configuration may name without the module, as in `class_path: Adam`.
HOMES = (
    *("cnnstrategies", "cnnstrategies.data", "cnnstrategies.callbacks", "cnnstrategies.strategies"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers", "lightning.pytorch.strategies"),
    *("torch.optim", "torch.optim.lr_scheduler"),
)
# Arguments that a configuration must not set, because the module itself passes them to its optimizers and schedules.
FROM_ELSEWHERE = ("params", "optimizer")
# Names of options whose values are mappings. The user chooses the keys of these mappings, so their dashes are kept.
MAPPINGS = ("dict_kwargs", "env", "pod", "resources", "server_resources", "volumes")
# Largest number of accepted names that an error message lists in addition to a suggestion.
MOST_NAMES = 20


def with_underscores(arguments: Sequence[str]) -> list[str]:
    """Replace dashes in the names of options by underscores: ``--run-name`` becomes ``--run_name``.

    Values do not change. The keys of mappings (:data:`MAPPINGS`) do not change either, because the user chooses them.

    Args:
        arguments: Command-line arguments.

    Returns:
        The changed command-line arguments.
    """
    return [_with_underscores(argument) for argument in arguments]


def _with_underscores(argument: str) -> str:
    match = re.fullmatch(r"--([A-Za-z][\w.-]*)(.*)", argument, re.DOTALL)
    if not match or not (match[2] == "" or match[2][0] in "+=/"):
        return argument
    parts = match[1].split(".")
    end = next((place for place, part in enumerate(parts, start=1) if part.replace("-", "_") in MAPPINGS), len(parts))
    parts[:end] = [part.replace("-", "_") for part in parts[:end]]
    return f"--{'.'.join(parts)}{match[2]}"


@dataclass(frozen=True)
class ConfiguredKey:
    """A key of a configuration, with its value.

    Attributes:
        path: The key with all keys above it, joined by dots, such as ``trainer.max_epochs``.
        value: The value from YAML, or the text from the command line.
        owner: Name of the class whose parameter the key is, spelled as in the configuration; None if the class is not
            known.
    """

    path: str
    value: Any
    owner: str | None


def configured_keys(args: Sequence[str]) -> list[ConfiguredKey]:
    """Return all keys of a configuration, from the command line and from the files that ``--config`` names.

    Keys from the command line come first, because a mistake is more likely on the command line than in a file.

    Args:
        args: Command-line arguments.
    """
    tree: dict[str, Any] = {}
    for position, argument in enumerate(args):
        if match := re.fullmatch(r"(?:--config|-c)(?:=(.*))?", argument):
            file = Path(match[1] or (args[position + 1] if position + 1 < len(args) else ""))
            if file.is_file():
                _merge(tree, _read(file))
    flags = set()
    for position, argument in enumerate(args):
        if match := re.fullmatch(r"--([\w.]+)\+?(?:=(.*))?", argument, re.DOTALL):
            value = match[2] if match[2] is not None else (args[position + 1] if position + 1 < len(args) else "")
            nested: Any = value
            for part in reversed(match[1].split(".")):
                nested = {part: nested}
            _merge(tree, nested)
            flags.add(match[1])
    return sorted(_walk(tree, "", None), key=lambda key: key.path not in flags)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = _read_cached(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeError) as error:
        reason = in_one_line(str(error).replace(' in "<unicode string>",', ""))
        if not isinstance(error, yaml.MarkedYAMLError):
            raise ConfigurationError(f"config: {file}: {reason}") from error
        remedy = "indent with spaces in place of tabs" if "'\\t'" in reason else "check the indentation and the colons"
        raise ConfigurationError(f"config: {file} is not YAML: {reason}; {remedy}") from error
    if not isinstance(content, Mapping):
        raise ConfigurationError(
            f"config: {file} has no keys: write a configuration as keys and values, as in `trainer: {{max_epochs: 3}}`"
        )
    return content


def read_yaml(text: str) -> Any:
    """Return the content of a YAML text.

    The function uses libyaml, which is ten times as fast as PyYAML's own parser. If libyaml finds an error, PyYAML's
    own parser reads the text again, because PyYAML's error messages are more exact than libyaml's.
    """
    try:
        return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError:
        return yaml.safe_load(text)


def _read_file(text: str) -> Any:
    """Return the content of a YAML file, and refuse keys that occur twice, of which YAML readers ignore the first."""
    content = read_yaml(text)
    waiting = [yaml.compose(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and lines.setdefault(key.value, line) != line and key.value != "<<":
                raise yaml.YAMLError(f"the key {key.value!r} is in lines {lines[key.value]} and {line}: join both")
            waiting.append(value)
    return content


_read_cached = functools.cache(_read_file)  # Cached, because a command reads the same files several times at its start.


def accepted(value: str, names: Sequence[str]) -> str:
    """Return the end of an error message about a wrong name, with a suggestion and the accepted names.

    Args:
        value: The wrong name.
        names: The accepted names. The message does not list them if there are more than `MOST_NAMES` names and one of
            the names is similar to the wrong name.
    """
    if not names:
        return ""
    guess = closest(value, names)
    return guess if guess != ";" and len(names) > MOST_NAMES else f"{guess} use one of: {', '.join(names)}"


def unknown_key(path: str, owner: str, names: Sequence[str]) -> str:
    """Return the error message for a key that is not a parameter of its class.

    Args:
        path: The key with all keys above it.
        owner: Name of the class, spelled as in the configuration.
        names: Names of the parameters of the class.
    """
    name = path.rpartition(".")[2]
    label = owner if path.count(".") > 1 else owner.rpartition(".")[2]
    known = [known for known in names if known not in FROM_ELSEWHERE]
    return f"unknown key {path}: {label} has no {name!r}{accepted(name, known)}"


def none_given(sections: Set[str]) -> str:
    """Return the error message for sections that a configuration needs and does not have, such as ``data``."""
    missing = " and ".join(sorted(sections))
    classes = " and ".join(f"--{name} CLASS" for name in sorted(sections))
    subject = f"the section {missing} is" if len(sections) == 1 else f"the sections {missing} are"
    return f"{subject} missing: give {classes}, or a configuration that has {missing}, as in --config quickstart"


def as_network(path: str) -> str:
    """Return the error message for a section ``model`` that names a network, with the key for the network.

    Args:
        path: Import path of the network's class or function.
    """
    key = "--model.init_args.network"
    name = f" {key}.init_args.model_name NAME" if path == "timm.create_model" else ""
    return (
        f"model: {path!r} is a network and not a LightningModule: give --model ImageClassifier {key} {path}{name}, or "
        "a LightningModule of your own"
    )


def closest(value: str, names: Sequence[str]) -> str:
    """Return ``; did you mean 'NAME'?`` with the accepted name that is most similar to a value.

    Return ``;`` if no name is similar.
    """
    close = difflib.get_close_matches(value, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ";"


def misspelt(name: str, known: Sequence[str] = OF_CLASS) -> str:
    """Return ``did you mean 'NAME'?`` if a name is very similar to a known name. Return an empty text otherwise.

    Args:
        name: The name that may be misspelt.
        known: The known names.
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"did you mean {close[0]!r}?" if close else ""


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in new.items():
        old = into.get(key)
        if isinstance(value, Mapping):
            base = old if isinstance(old, dict) else _as_class(old)
            if "class_path" in value and value["class_path"] != base.get("class_path"):
                base = {}  # The new class replaces another class, whose arguments are dropped.
            into[key] = _merge(base, value)
        elif isinstance(old, dict) and "class_path" in old and isinstance(value, str):
            into[key] = old if old["class_path"] == value else _as_class(value)
        else:
            into[key] = value
    return into


def _as_class(value: Any) -> dict[str, Any]:
    return {"class_path": value} if isinstance(value, str) else {}


def _walk(tree: Any, path: str, owner: str | None) -> Iterator[ConfiguredKey]:
    if isinstance(tree, list):
        for item in tree:
            yield from _walk(item, path, None)
    if not isinstance(tree, Mapping):
        return
    for key, value in tree.items():
        inner = f"{path}.{key}" if path else str(key)
        # A key that is beside class_path by mistake, and not below init_args, also counts as an argument of the class,
        # so that error messages can name the class.
        yield ConfiguredKey(inner, value, owner if key in OF_CLASS else tree.get("class_path", owner))
        below = tree.get("class_path") if key == "init_args" else {**ROOTS, **NESTED}.get(inner)
        yield from _walk(value, inner, below)
