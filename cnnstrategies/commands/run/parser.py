"""The parser of configurations: LightningCLI's parser with error messages of one line."""

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
    """Function object that builds the model or the data module, and whose copies do not refer to the command line.

    jsonargparse calls such a function an instantiator, and stores the instantiators in every factory that it creates,
    such as a model's optimizer factory. Lightning's instantiator is a method of its command-line object, which refers
    to the trainer, processes and locks. Without this class the model would refer to all these objects. The callback
    WeightAveraging could not copy the model, and each spawned process would get a copy of the command-line object.

    Args:
        build: The instantiator of Lightning's command line.
    """

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
        """Build an object of a class.

        jsonargparse requires that the signature has a parameter with the name ``applied_instantiation_links``.
        """
        return self._build(class_type, *args, applied_instantiation_links=applied_instantiation_links, **kwargs)

    def __reduce__(self) -> tuple[type["Instantiator"], tuple[Callable[..., Any]]]:
        """Return the class and the argument for a copy, which uses `_build` in place of Lightning's instantiator."""
        return type(self), (_build,)


def _build(class_type: type, *args: Any, applied_instantiation_links: dict[str, Any], **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)


def _timedelta(value: Any) -> timedelta:
    """Convert the value of a key to a timedelta.

    jsonargparse itself accepts only ``hours:minutes:seconds``.
    """
    try:
        return as_timedelta(value, "")
    except ConfigurationError as error:
        # The error message must not contain the option and the value, because jsonargparse adds both.
        raise ValueError(f"it {str(error).partition(' ')[2]}") from None


# After this call, a configuration may write the time-outs of Lightning's classes as 90 or 1:30, like this package's.
register_type(timedelta, deserializer=_timedelta)
# This setting lets references (`${...}`) refer to keys of other --config files and to keys of the command line.
set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
remember()
accept_names()


class _ConfigurationDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """YAML writer that quotes texts such as 1e3.

    Without the quotes, OmegaConf and other readers would read a number instead of a text.
    """

    # jsonargparse adds its own classes to SafeDumper's dictionary, so this class uses the same dictionary.
    yaml_representers = yaml.SafeDumper.yaml_representers


_ConfigurationDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"), list("-+0123456789")
)


def _dump(data: Any) -> str:
    text: str = yaml.dump(
        data, Dumper=_ConfigurationDumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return text


set_dumper("yaml", _dump)
# Prefix of the text that jsonargparse writes instead of a value that cannot be written as YAML.
UNWRITABLE = "Unable to serialize instance "


class ArgumentParser(LightningArgumentParser):
    """LightningCLI's parser, changed so that a mistake in a configuration gives one line and the exit code 2."""

    _defaults_of = 0  # Number of options that the parser had when the defaults were cached; 0 if nothing is cached.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With `python -m cnnstrategies`, argparse would use the name of the file as the program's name.
        self.prog = self.prog.replace("__main__.py", "cnnstrategies")

    @override
    def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
        if shows_tracebacks() and ex is not None:
            raise ex
        fail(explain_parse_error(message, sys.argv[1:]))

    @override
    def parse_args(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        # To parse a value of a nested class again, jsonargparse calls this method with a single argument, such as
        # `--key=None`. It writes the value null as None, so None is changed back to null here.
        if args is not None and len(args) == 1 and args[0].startswith("--") and args[0].endswith("=None"):
            args = [f"{args[0].removesuffix('None')}null"]
        return super().parse_args(args, *rest, **kwargs)

    @override
    def get_defaults(self, *args: Any, **kwargs: Any) -> Namespace:
        """Return the default values of all options.

        jsonargparse calls this method repeatedly, so the result is cached until an option is added. Configuration files
        do not change the defaults.
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
        """Save a configuration.

        The configuration is not validated again, because a run was built from it already.
        """
        super().save(*args, **{**kwargs, "skip_validation": True})

    @override
    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().add_instantiator(Instantiator(instantiator), *args, **kwargs)

    @override
    def _check_value_key(self, action: argparse.Action, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Check whether a key accepts a value, but accept every value that contains a reference (`${...}`).

        If a configuration replaces a class by another class, jsonargparse calls this method and drops the arguments
        that the new class does not accept. Without the exception for references, jsonargparse would drop
        ``num_classes: ${...}``, for example. The method is private in jsonargparse, and
        `tests/commands/test_parser.py` tests that jsonargparse has the method.
        """
        try:
            return super()._check_value_key(action, value, *args, **kwargs)
        except Exception:
            if "${" in str(value):
                return value
            raise

    @override
    def _dump_cleanup_actions(self, cfg: Namespace, *args: Any, **kwargs: Any) -> None:
        """Remove the values that cannot be written as YAML, such as devices and members of enumerations.

        jsonargparse calls this method before it writes a configuration as YAML. The removed values are defaults of
        parameters, so the YAML is complete without them. jsonargparse itself fails for such a value, or replaces the
        value by a text that begins with `UNWRITABLE`. jsonargparse also replaces a string that may be the name of a
        function. This method restores the original string.

        The method is private in jsonargparse, and `tests/commands/test_parser.py` tests that jsonargparse has the
        method.
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
    """Return whether a value can be written as YAML.

    The result is also False for a text that begins with `UNWRITABLE`, because jsonargparse writes such a text in place
    of a value that cannot be written.
    """
    if isinstance(value, Namespace | dict | list):
        inner = value if isinstance(value, list) else (value if isinstance(value, dict) else vars(value)).values()
        return all(_is_of_yaml(item) for item in inner)
    return type(value) in yaml.SafeDumper.yaml_representers and not str(value).startswith(UNWRITABLE)
