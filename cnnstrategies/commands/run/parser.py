"""The parser of configurations: LightningCLI's parser, with errors of one line."""

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import yaml
from jsonargparse import Namespace, set_dumper, set_parsing_settings
from jsonargparse.typing import register_type
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from cnnstrategies._jsonargparse_private import remember
from cnnstrategies.commands.arguments.refuse import fail, shows_tracebacks
from cnnstrategies.commands.run.errors import explain_parse_error
from cnnstrategies.commands.run.strategy_names import accept_names
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import as_timedelta


class Instantiator:
    """Builder of the model or the data for Lightning's command line; its copies do not refer to the command line.

    jsonargparse stores the builders of model and data in every factory that it makes. An object with a factory, such as
    a model with its optimizer's, therefore refers to the command line, with its trainer, processes and locks. Without
    this class weight averaging could not copy the model, and each spawned process would get a copy of everything.
    """

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
        """Build an object. jsonargparse looks for the name ``applied_instantiation_links`` in this signature."""
        return self._build(class_type, *args, applied_instantiation_links=applied_instantiation_links, **kwargs)

    def __reduce__(self) -> tuple[type["Instantiator"], tuple[Callable[..., Any]]]:
        """Return how to make a copy, which does not refer to the command line."""
        return type(self), (_build,)


def _build(class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)


def _timedelta(value: Any) -> timedelta:
    """Return a timedelta from what a configuration has; jsonargparse knows ``hours:minutes:seconds`` only."""
    try:
        return as_timedelta(value, "")
    except ConfigurationError as error:
        # jsonargparse names option and value itself.
        raise ValueError(f"it {str(error).partition(' ')[2]}") from None


# So that the time-outs of Lightning's own classes are written as those of this package.
register_type(timedelta, deserializer=_timedelta)
# With parser_mode="omegaconf+", references (`${...}`) see overrides, and work across several --config files.
set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
remember()
accept_names()


class _ConfigurationDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """YAML writer that quotes texts such as 1e3, which OmegaConf and other readers would take for numbers."""

    yaml_representers = yaml.SafeDumper.yaml_representers  # jsonargparse adds its namespaces to these.


_ConfigurationDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _dump(data: Any) -> str:
    text: str = yaml.dump(
        data, Dumper=_ConfigurationDumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return text


set_dumper("yaml", _dump)
UNWRITABLE = "Unable to serialize instance "  # jsonargparse begins a text with this if YAML cannot hold a value.


class ArgumentParser(LightningArgumentParser):
    """Parser that reports a mistake in a configuration in one line, and exits with code 2."""

    _defaults_of = 0  # number of options when the defaults were cached

    @override
    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        if shows_tracebacks() and ex is not None:
            raise ex
        fail(explain_parse_error(message, sys.argv[1:]))

    @override
    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        # jsonargparse turns a value for a class within a class back into a word, and writes null as None.
        if args is not None and len(args) == 1 and args[0].startswith("--") and args[0].endswith("=None"):
            args = [f"{args[0].removesuffix('None')}null"]
        return super().parse_args(args, *rest, **kwargs)

    @override
    def get_defaults(self, *args: Any, **kwargs: Any) -> Namespace:
        """Return the defaults of the present options.

        jsonargparse asks for the defaults repeatedly, so they are cached until an option is added; files do not change
        them.
        """
        options = len(self._actions)
        if self._defaults_of != options:
            self._own_defaults, self._defaults_of = super().get_defaults(*args, **kwargs), options
        return self._own_defaults.clone()

    @override
    def set_defaults(self, *args: Any, **kwargs: Any) -> None:
        self._defaults_of = 0
        super().set_defaults(*args, **kwargs)

    @override
    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save a configuration without validating it again: a run was built from the same configuration."""
        super().save(*args, **{**kwargs, "skip_validation": True})

    @override
    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().add_instantiator(Instantiator(instantiator), *args, **kwargs)

    @override
    def _check_value_key(self, action: argparse.Action, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Check a value; a value that contains a reference is checked only after the reference has been resolved.

        When one class replaces another, jsonargparse calls this method to find the arguments that the new class accepts
        as well, and drops the other arguments. A number of classes that is a reference would be dropped. The name is
        private, and `tests/commands/test_parser.py` watches it.
        """
        try:
            return super()._check_value_key(action, value, *args, **kwargs)
        except Exception:
            if "${" in str(value):
                return value
            raise

    @override
    def _dump_cleanup_actions(self, cfg: Namespace, *args: Any, **kwargs: Any) -> None:
        """Leave out values that YAML cannot hold: the class that takes such a value has it as its default.

        jsonargparse resolves references in a configuration that it has written as YAML, and saves a run's configuration
        in the same form. It writes a device, and also a name that could be a function's, as a text that begins with
        ``UNWRITABLE``; a member of an enumeration cannot be written at all. The name is private, and
        `tests/commands/test_parser.py` watches it.
        """
        original = cfg.clone()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=rf"\s*{UNWRITABLE}")
            super()._dump_cleanup_actions(cfg, *args, **kwargs)  # type: ignore[no-untyped-call]
        for key, value in original.items():
            if key not in cfg or _is_of_yaml(cfg[key]):
                continue
            if isinstance(value, str):
                cfg[key] = str.__str__(value)
            else:
                del cfg[key]


def _is_of_yaml(value: Any) -> bool:
    """Whether YAML can hold a value; false for a text by which jsonargparse has replaced a value."""
    if isinstance(value, Namespace | dict | list):
        inner = value if isinstance(value, list) else (value if isinstance(value, dict) else vars(value)).values()
        return all(_is_of_yaml(item) for item in inner)
    return type(value) in yaml.SafeDumper.yaml_representers and not str(value).startswith(UNWRITABLE)
