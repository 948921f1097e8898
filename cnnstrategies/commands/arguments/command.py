"""The machinery for declaring commands: a dataclass with documented fields gives a command its parser and its help.

Parsing and help need neither torch nor Lightning. A command's own module is imported only when the command runs.
"""

import atexit
import dataclasses
import gc
import importlib
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser

from cnnstrategies.commands.arguments import recipes
from cnnstrategies.commands.arguments.early_checks import check_early
from cnnstrategies.commands.arguments.keys import ROOTS, closest, with_underscores
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.old_names import is_now, renamed
from cnnstrategies.quantities import Duration, Size

Kind = TypeVar("Kind", bound=type[Any])
# Names of LightningCLI's options that contain no dot.
CONFIGURATION_OPTIONS = ("config", "print_config", *ROOTS)
# Maps the type of an option's value to the name that the help shows for the value, as in `--minutes NUMBER`.
VALUE_NAMES = {bool: "", int: "N", float: "NUMBER", Path: "FILE", Duration: "TIME", Size: "BYTES"}
TRUTH = {"true": True, "false": False}  # Maps the text that the user types to the value of a bool option.
# Pattern of a command-line argument that begins with an option: `--name`, `--name=value` or `--name+=value`.
_OPTION = re.compile(r"--([A-Za-z][\w-]*)\+?(?:=(.*))?", re.DOTALL)


class Configuration(Enum):
    """Whether and how a command reads a training configuration."""

    NONE = "none"  # The command reads no configuration. `main` gets the command's own options.
    # `main` gets two arguments: the command's own options, and the command-line arguments of the configuration.
    BESIDE = "beside"
    # `main` gets all command-line arguments. LightningCLI parses both the command's own options and the configuration.
    LIGHTNING = "lightning"


@dataclass(frozen=True)
class Option:
    """Option of a command, declared by a field of the command's dataclass.

    Attributes:
        name: Name of the field.
        kind: Type of the value, or type of each element if the option takes a list.
        nullable: Whether the option accepts ``null``.
        many: Whether the option takes a list. The user writes ``1,2,4`` or ``[1, 2, 4]``, or repeats the option.
        required: Whether the user must give the option.
        default: Value if the user does not give the option.
        text: Description of the option: the field's entry in the dataclass's docstring, in one line.
        metavar: Name of the value in the help, such as ``FILE``; empty for a bool option.
        positional: Whether the user types the value without the option's name.
    """

    name: str
    kind: Any
    nullable: bool
    many: bool
    required: bool
    default: Any
    text: str
    metavar: str
    positional: bool

    @property
    def flag(self) -> str:
        """The option as the user types it, such as ``--minutes``.

        For a positional argument, this is the name of the value, such as ``FOLDER``.
        """
        # The field of the option --try is named `try_`, because `try` is a keyword of Python. The option has no
        # underscore.
        return self.metavar if self.positional else f"--{self.name.removesuffix('_')}"

    @property
    def meaning(self) -> str:
        """The option's description without its full stop, for use inside an error message."""
        return self.text.removesuffix(".")

    @property
    def row(self) -> tuple[str, str]:
        """The two columns of the option's line in the help.

        For example, the first column is ``--minutes NUMBER``. The second column is the option's description.
        """
        has_default = self.default not in (None, False, [], dataclasses.MISSING) and "default" not in self.text
        shown = f"{self.default:g}" if isinstance(self.default, float) else self.default
        text = f"{self.text.removesuffix('.')} (default: {shown})" if has_default else self.text
        return self.flag if self.positional else f"{self.flag} {self.metavar}".rstrip(), text

    def read(self, text: str) -> Any:
        """Convert the text of a command-line argument to the option's type.

        Raises:
            ConfigurationError: The text is not a value of the option's type.
        """
        if self.nullable and text == "null":
            return None
        if not self.many:
            return self._read_one(text)
        items = (item.strip().strip("'\"") for item in text.strip().removeprefix("[").removesuffix("]").split(","))
        return [self._read_one(item) for item in items if item]

    def _read_one(self, text: str) -> Any:
        if get_origin(self.kind) is Literal:
            names = [str(name) for name in get_args(self.kind)]
            if text in names:
                return get_args(self.kind)[names.index(text)]
            raise ConfigurationError(
                f"{self.flag}: {text!r} is not accepted{closest(text, names)} use one of: {', '.join(names)}"
            )
        if self.kind is bool:
            if text in TRUTH:
                return TRUTH[text]
            raise ConfigurationError(f"{self.flag}: {text!r} is not accepted; it must be true or false")
        if self.kind in (int, float):
            try:
                return self.kind(text)
            except ValueError:
                needed = "a whole number" if self.kind is int else "a number"
                raise ConfigurationError(f"{self.flag}: {text!r} is not accepted; it must be {needed}") from None
        return Path(text) if self.kind is Path else text


def option(
    default: Any = dataclasses.MISSING,
    metavar: str = "",
    choices: Callable[[], Sequence[str]] | None = None,
    **arguments: Any,
) -> Any:
    """Declare an option: return a field for a command's dataclass.

    Args:
        default: Value if the user does not give the option.
        metavar: Name of the value in the help, such as ``FOLDER``. By default the name depends on the type: ``N`` for
            int, for example.
        choices: Function that returns the accepted values, called when the options are parsed. It may import a
            registry, which the declaration itself cannot import.
        arguments: Other arguments of :func:`dataclasses.field`.
    """
    return field(default=default, metadata={"metavar": metavar, "choices": choices}, **arguments)


def positional(default: Any = dataclasses.MISSING, metavar: str = "", **arguments: Any) -> Any:
    """Declare a positional argument, such as the folder in ``pack FOLDER``: return a field for the dataclass."""
    return field(default=default, metadata={"metavar": metavar, "positional": True}, **arguments)


def options_of(declaration: type[Any]) -> list[Option]:
    """Return the options that the fields of a dataclass declare, in the order of the fields."""
    kinds = get_type_hints(declaration)
    texts = {
        entry.arg_name: _in_one_line(entry.description)
        for entry in docstring_parser.parse(declaration.__doc__ or "").params
    }
    options = []
    for entry in dataclasses.fields(declaration):
        members = [kind for kind in get_args(kinds[entry.name]) if kind is not NoneType]
        nullable = NoneType in get_args(kinds[entry.name])
        kind = (members[0] if len(members) == 1 else str) if nullable else kinds[entry.name]
        many = get_origin(kind) is list
        kind = get_args(kind)[0] if many else kind
        if (choices := entry.metadata.get("choices")) is not None:
            kind = Literal[tuple(choices())]
        default = entry.default
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        options.append(
            Option(
                entry.name,
                kind,
                nullable,
                many,
                default is dataclasses.MISSING,
                default,
                texts.get(entry.name, ""),
                entry.metadata.get("metavar") or _metavar(kind),
                entry.metadata.get("positional", False),
            )
        )
    return options


def _in_one_line(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").split())


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return VALUE_NAMES.get(kind, "TEXT")


@dataclass(frozen=True)
class Command:
    """A command of ``cnnstrategies``, or another program of this package.

    Attributes:
        name: Name of the command, as the user types it.
        summary: Description of the command in the list of commands. It begins with a verb.
        example: Command-line arguments of an example call, without the command's name.
        module: Module in ``cnnstrategies.commands`` whose function ``main`` runs the command.
        declaration: Dataclass whose fields are the command's options, and whose docstring describes the command.
        configuration: Whether and how the command reads a training configuration.
        keys: Keys of the configuration that the help lists with the command's own options, as pairs of a key and a
            description.
        sections: Sections of the configuration that only this command reads, as pairs of the section's name and its
            dataclass.
    """

    name: str
    summary: str
    example: str
    module: str
    declaration: type[Any]
    configuration: Configuration = Configuration.NONE
    keys: Sequence[tuple[str, str]] = ()
    sections: Sequence[tuple[str, type[Any]]] = ()

    @property
    def call(self) -> str:
        """Text that the user types to call the command, without arguments, such as ``cnnstrategies fit``."""
        return self.name if self.name.startswith("cnnstrategies") else f"cnnstrategies {self.name}"

    @property
    def options(self) -> list[Option]:
        """The command's own options, without the keys of a configuration."""
        return options_of(self.declaration)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The lines of the help for the command's options, keys and sections, as pairs of a name and a description."""
        rows = [option.row for option in self.options]
        rows += self.keys
        for section, declaration in self.sections:
            rows += [
                (f"--{section}.{option.name} {option.metavar or 'true|false'}", option.text)
                for option in options_of(declaration)
            ]
        return rows

    @property
    def description(self) -> str:
        """The declaration's docstring in one line, without the list of options."""
        parsed = docstring_parser.parse(self.declaration.__doc__ or "")
        return _in_one_line(f"{parsed.short_description or ''} {parsed.long_description or ''}")

    def parse(self, arguments: Sequence[str]) -> tuple[Any, list[str]]:
        """Parse command-line arguments.

        Args:
            arguments: Command-line arguments after the command's name.

        Returns:
            A pair. The first element is an instance of the declaration, with the values of the command's options. The
            second element is the list of all other arguments, which belong to the configuration.

        Raises:
            ConfigurationError: An option is unknown, is missing, or has no value or a wrong value.
        """
        options = self.options
        by_name = {option.flag.removeprefix("--"): option for option in options if not option.positional}
        positionals = deque(option for option in options if option.positional)
        values: dict[str, Any] = {}
        rest: list[str] = []
        waiting = deque(arguments)
        while waiting:
            argument = waiting.popleft()
            match = _OPTION.fullmatch(argument)
            option = by_name.get(match[1].replace("-", "_")) if match else None
            if option is not None:
                assert match is not None
                text = _value(option, match[2], waiting)
                _store(values, option, text)
            elif positionals and not argument.startswith("-") and not rest:
                _store(values, positionals[0], argument)
                if not positionals[0].many:
                    positionals.popleft()
            else:
                rest.append(argument)
        self._check_rest(rest, [option.flag for option in by_name.values()])
        for option in options:
            if option.required and option.name not in values:
                raise ConfigurationError(f"{self.name}: {option.flag} is missing: {option.meaning}")
        return self.declaration(**values), rest

    def _check_rest(self, arguments: Sequence[str], flags: Sequence[str]) -> None:
        """Raise a ConfigurationError for an argument that belongs neither to this command nor to a configuration.

        Args:
            arguments: Command-line arguments without the command's own options.
            flags: The command's own options, for the error message.
        """
        for argument in arguments:
            match = _OPTION.fullmatch(argument)
            if self.configuration is Configuration.NONE:
                if not argument.startswith("-"):
                    raise ConfigurationError(f"{self.name}: cannot use {argument!r}; use one of: {', '.join(flags)}")
                self._refuse(argument.partition("=")[0], flags, flags)
            elif match and match[1].replace("-", "_") not in CONFIGURATION_OPTIONS:
                known = [f"--{name}" for name in CONFIGURATION_OPTIONS]
                self._refuse(f"--{match[1]}", flags, [*flags, *known])

    def _refuse(self, name: str, flags: Sequence[str], known: Sequence[str]) -> None:
        old = name.removeprefix("--").replace("-", "_")
        if (new := renamed(self.declaration, old)) is not None:
            raise ConfigurationError(f"{self.name}: {is_now(f'--{old}', f'--{new}')}")
        keys = ""
        if self.configuration is not Configuration.NONE:
            keys = " and a configuration's keys (--config, --trainer.KEY, ...)"
        guess = closest(name.replace("-", "_").replace("__", "--", 1), known)
        raise ConfigurationError(f"{self.name}: unknown option {name}{guess} use one of: {', '.join(flags)}{keys}")

    def show_all_options(self) -> None:
        """Print the help of LightningCLI's parser, which describes all keys of a configuration."""
        sys.argv = ["cnnstrategies", self.name]
        module = importlib.import_module("cnnstrategies.commands.run.lightning_cli")
        if self.configuration is Configuration.LIGHTNING:
            module.main([self.name, "--help"])
        else:
            module.ModelAndData(self.name, ["--help"])

    def run(self, arguments: Sequence[str]) -> None:
        """Run the command with the command-line arguments after its name."""
        if self.configuration is not Configuration.NONE:
            # A configuration may name classes in the user's modules, so the working directory must be in sys.path.
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            arguments = recipes.with_files(with_underscores(arguments))
            if os.environ.get("LOCAL_RANK", "0") == "0":
                names = [option.name for option in self.options]
                check_early(self.name, arguments, names if self.configuration is Configuration.LIGHTNING else None)
        main_arguments: list[Any] = [[self.name, *arguments]]
        if self.configuration is not Configuration.LIGHTNING:
            main_arguments = list(self.parse(arguments))
            if self.configuration is Configuration.NONE:
                del main_arguments[1:]
        # Garbage collection during the imports would take a sixth of the start-up time and free nothing, because
        # imported objects live until the process ends.
        gc.disable()
        module = self._import_module()
        gc.freeze()
        # Some extension modules, such as triton's, would report frozen objects as leaks when the process ends, so the
        # objects are unfrozen before.
        atexit.register(gc.unfreeze)
        gc.enable()
        module.main(*main_arguments)

    def _import_module(self) -> Any:
        """Import the module that runs the command.

        Raises:
            ConfigurationError: The command is declared, but its module does not exist.
        """
        path = f"cnnstrategies.commands.{self.module}"
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
            parameters = "options" if self.configuration is Configuration.NONE else "options, arguments"
            file = f"{path.replace('.', '/')}.py"
            raise ConfigurationError(
                f"{self.name}: the command's module does not exist: write {file} with a function main({parameters})"
            ) from None


def _value(option: Option, text: str | None, waiting: deque[str]) -> str:
    """Return the value of an option as text.

    Args:
        option: The option.
        text: The text after ``=``; None if the argument has no ``=``.
        waiting: The next command-line arguments. If the first one is the option's value, it is removed.
    """
    if text is not None:
        return text
    if option.kind is bool:
        return waiting.popleft() if waiting and waiting[0] in TRUTH else "true"
    if not waiting or waiting[0].startswith("--"):
        raise ConfigurationError(f"{option.flag} needs a value: {option.meaning}")
    return waiting.popleft()


def _store(values: dict[str, Any], option: Option, text: str) -> None:
    value = option.read(text)
    if option.many and option.name in values:
        value = values[option.name] + value
    values[option.name] = value


def declare(
    registry: dict[str, Command],
    name: str,
    summary: str,
    example: str,
    module: str | None = None,
    configuration: Configuration = Configuration.NONE,
    keys: Sequence[tuple[str, str]] = (),
    sections: Sequence[tuple[str, type[Any]]] = (),
) -> Callable[[Kind], Kind]:
    """Return a decorator that registers a dataclass as the declaration of a command.

    All arguments except `registry` become attributes of the new :class:`Command`.

    Args:
        registry: Dictionary of commands by name, to which the decorator adds the command.
        module: Module that runs the command; by default the module with the command's name.
    """

    def enter(declaration: Kind) -> Kind:
        registry[name] = Command(name, summary, example, module or name, declaration, configuration, keys, sections)
        return declaration

    return enter
