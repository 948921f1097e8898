"""The texts of ``--help``: the list of commands, and the options of each command from its declaration.

``--help`` shows the options that most users need. ``--help_full`` shows all options, from LightningCLI's parser.
"""

import contextlib
import io
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from cnnstrategies.commands.arguments.command import Command, Configuration
from cnnstrategies.commands.arguments.keys import ROOTS
from cnnstrategies.commands.arguments.options import COMMANDS

Rows = Sequence[tuple[str, str]]
LONGEST_LINE = 120
HELP_OPTIONS = ("-h", "--help")
FULL = "--help_full"
CONFIGURATION = (
    (
        "--config FILE",
        "a YAML file, or the name of a configuration from `cnnstrategies configs`; later files override earlier files",
    ),
    (
        "--trainer.strategy NAME",
        "how the work is divided: auto, ddp, hybrid_pipeline, parameter_server or another name",
    ),
    (
        "--trainer.strategy.OPTION VALUE",
        "an option of the strategy, for example --trainer.strategy.stages 2 for hybrid_pipeline",
    ),
    ("--trainer.devices N", "processes or GPUs on each machine"),
    ("--trainer.num_nodes N", "machines"),
    ("--trainer.accelerator NAME", "auto, cpu or gpu"),
    ("--trainer.precision NAME", "32-true, bf16-mixed, 16-mixed or 64-true"),
    ("--model CLASS", "import path of a LightningModule, or ImageClassifier, which is part of this package"),
    ("--model.init_args.network CLASS", "the CNN, such as torchvision.models.resnet50"),
    ("--data CLASS", "a LightningDataModule, such as DigitsDataModule or ImageFolderDataModule"),
    ("--data.init_args.global_batch_size N", "number of images in a step, over all devices"),
)
EVERYTHING = (
    ("--help_full [SECTION]", f"all options, or the options of one section: {', '.join(name for name in ROOTS)}"),
    ("--data.help CLASS", "options of a class; also --model.help CLASS and --trainer.strategy.help NAME"),
    ("--print_config", "print the whole configuration, and do nothing else"),
)


def overview() -> str:
    """Return the text of ``cnnstrategies --help``."""
    lines = ["cnnstrategies: train any CNN on several devices; one line of YAML says how the work is divided", ""]
    lines += [*_table([(name, command.summary) for name, command in COMMANDS.items()]), ""]
    lines += ["The first run, with nothing to download:", "", "  cnnstrategies fit --config quickstart", ""]
    lines += ["`cnnstrategies COMMAND --help` shows the options of a command."]
    return "\n".join(lines)


def of_command(command: Command) -> str:
    """Return the text of ``cnnstrategies COMMAND --help``."""
    lines = [f"{command.call}: {command.summary}", "", f"  {command.call} {command.example}".rstrip(), ""]
    lines += [*textwrap.wrap(command.description, _width()), ""]
    for title, rows in _sections(command):
        lines += [title, *_table(rows), ""]
    return "\n".join(lines).rstrip()


def in_full(command: Command, section: str) -> str:
    """Return the text of ``cnnstrategies COMMAND --help_full``, which describes all options.

    Args:
        command: The command.
        section: A section of the configuration, such as ``trainer``, to describe only the options of this section;
            empty for all options.
    """
    if command.configuration is Configuration.NONE:
        return of_command(command)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command.show_all_options()
    text = printed.getvalue().rstrip()
    if command.configuration is Configuration.BESIDE:
        text += "\n\nThis command:\n" + "\n".join(_table(command.rows))
    if not section:
        return text
    kept, keeps = [], False
    for line in text.partition("options:")[2].splitlines():
        if match := re.match(r"  (?:-\w, )?--([\w.]+)", line):
            keeps = match[1] == section or match[1].startswith(f"{section}.")
        keeps = keeps and line.startswith("  ")
        kept += [line] * keeps
    return "\n".join(kept)


def _sections(command: Command) -> Iterator[tuple[str, Rows]]:
    takes_configuration = command.configuration is not Configuration.NONE
    if takes_configuration:
        yield "The configuration", CONFIGURATION
    if rows := command.rows:
        yield ("This command" if takes_configuration else "Options"), rows
    if takes_configuration:
        yield "More", EVERYTHING


def _width() -> int:
    return min(shutil.get_terminal_size().columns, LONGEST_LINE)


def _table(rows: Rows) -> list[str]:
    left = max(len(first) for first, _ in rows) + 4
    lines = []
    for first, second in rows:
        text = textwrap.wrap(second.removesuffix("."), max(30, _width() - left)) or [""]
        lines += [f"  {first:{left - 2}}{text[0]}".rstrip(), *(" " * left + line for line in text[1:])]
    return lines
