"""``--help``: the commands, and what people change first; all options are a parser's business."""

import contextlib
import io
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import docstring_parser

from cnnstrategies.cluster.options import ClusterOptions, KubernetesOptions, RayOptions
from cnnstrategies.commands.arguments.keys import ROOTS
from cnnstrategies.commands.arguments.options import PlanOptions, TuneOptions, VerifyOptions
from cnnstrategies.commands.arguments.options import doctor_parser as doctor_parser
from cnnstrategies.commands.arguments.options import pack_parser as pack_parser
from cnnstrategies.commands.arguments.options import watch_parser as watch_parser
from cnnstrategies.commands.arguments.table import COMMANDS

Options = Sequence[tuple[str, str]]
LONGEST_LINE = 120
HELP_WORDS = ("-h", "--help")
FULL = "--help_full"
CONFIGURATION = (
    ("--config FILE", "a YAML file, or the name of a recipe (`cnnstrategies configs`); what comes later counts"),
    ("--trainer.strategy NAME", "how the work is divided: auto, ddp, hybrid_pipeline, parameter_server, ..."),
    ("--trainer.strategy.OPTION VALUE", "an option of it, as in --trainer.strategy.stages 2 after hybrid_pipeline"),
    ("--trainer.devices N", "processes or GPUs on each machine"),
    ("--trainer.num_nodes N", "machines"),
    ("--trainer.accelerator NAME", "auto, cpu or gpu"),
    ("--trainer.precision NAME", "32-true, bf16-mixed, 16-mixed or 64-true"),
    ("--model CLASS", "a LightningModule by its import path; ours is ImageClassifier"),
    ("--model.init_args.network CLASS", "the CNN, such as torchvision.models.resnet50"),
    ("--data CLASS", "a LightningDataModule, such as DigitsDataModule or ImageFolderDataModule"),
    ("--data.init_args.global_batch_size N", "images of a step over all devices"),
)
TRAINING = (
    ("--trainer.max_epochs N", "passes over the data"),
    ("--trainer.fast_dev_run true", "one batch of everything, and nothing is written"),
    ("--ckpt_path FILE", "go on from a checkpoint, or from the `last` of this run's name"),
    ("--run_name NAME", "the same command again goes on from the run's last checkpoint"),
    ("--seed_everything N", "where all random numbers begin"),
)
EVALUATION = (("--ckpt_path FILE", "the weights: a checkpoint, or the `best` or `last` of this run's name"),)
PREDICTION = (
    *EVALUATION,
    (
        "--predictions.images FOLDER",
        "images of your own: the five most probable classes of each",
    ),
    ("--predictions.output FILE", "where the CSV goes (default: predictions.csv in the log directory)"),
)
QUANTISATION = (
    ("--ckpt_path FILE", "the trained checkpoint"),
    ("--output FILE", "where the int8 network goes (default: quantized.pt2)"),
    ("--calibration_batches N", "training batches that set the ranges of the activations (default: 16)"),
)
EXPORT = (
    ("--ckpt_path FILE", "the trained checkpoint"),
    ("--format NAME", "torch_export (default) or onnx"),
    ("--output FOLDER", "where the network and export.json go (default: exported)"),
)
JOINING = (
    ("--run RUN", "the run's folder, or its coordinator's address: tcp://HOST:PORT or ipc://PATH"),
    ("--key_file FILE", "the run's keys (default: those that the run's folder names)"),
)
SCALING = (
    ("--devices 1,2,4", "numbers of devices to train on (default: 1, and the configuration's or else 2)"),
    ("--minutes MINUTES", "longest time, and as long again with --try (default: 3)"),
    ("--picture FILE", "samples/s and the parts of a step as PNG (default: scaling.png)"),
    ("--try", "measure what is proposed, and write what has helped"),
    ("--output FILE", "YAML file for that: fit --config X --config FILE takes it (default: scaling.yaml)"),
)
SUBMISSION = (
    ("--to NAME", "slurm, kubernetes or ray (default: slurm)"),
    ("--dry_run", "print the job and submit nothing"),
)
PARSERS = {
    "doctor": doctor_parser,
    "pack": pack_parser,
    "watch": watch_parser,
}  # Of the commands that take no configuration.
EVERYTHING = (
    ("--help_full [SECTION]", f"all options, or those of {', '.join(name for name in ROOTS)}"),
    ("--data.help CLASS", "those of a class; so with --model.help CLASS and --trainer.strategy.help NAME"),
    ("--print_config", "the whole configuration, and nothing else"),
)


def overview() -> str:
    """What ``cnnstrategies --help`` prints."""
    lines = ["cnnstrategies: train any CNN on several devices; how the work is divided is one line of YAML", ""]
    lines += [*_table([(name, command.line) for name, command in COMMANDS.items()]), ""]
    lines += ["The first run, with nothing to download:", "", "  cnnstrategies fit --config quickstart", ""]
    lines += ["`cnnstrategies COMMAND --help` says more about each."]
    return "\n".join(lines)


def of_command(name: str) -> str:
    """What ``cnnstrategies COMMAND --help`` prints."""
    command = COMMANDS[name]
    lines = [f"cnnstrategies {name}: {command.line}", "", f"  cnnstrategies {command.example}", ""]
    if name in PARSERS:
        return PARSERS[name]().format_help().rstrip()
    for title, options in _sections(name):
        lines += [title, *_table(options), ""]
    return "\n".join(lines).rstrip()


def in_full(name: str, section: str) -> str:
    """The help of the command's own parser, or of its options of one key at the root."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        COMMANDS[name].run([name, *(["fit"] if name == "submit" else []), "--help"])
    if not section:
        return printed.getvalue().rstrip()
    kept, keeps = [], False
    for line in printed.getvalue().partition("options:")[2].splitlines():
        if match := re.match(r"  (?:-\w, )?--([\w.]+)", line):
            keeps = match[1] == section or match[1].startswith(f"{section}.")
        keeps = keeps and line.startswith("  ")
        kept += [line] * keeps
    return "\n".join(kept)


def _sections(name: str) -> Iterator[tuple[str, Options]]:
    own: dict[str, Options] = {
        "fit": TRAINING,
        "validate": EVALUATION,
        "test": EVALUATION,
        "predict": PREDICTION,
        "quantize": QUANTISATION,
        "export": EXPORT,
        "join": JOINING,
        "scaling": SCALING,
        "plan": list(_fields(PlanOptions, "")),
        "tune": list(_fields(TuneOptions, "")),
        "verify": list(_fields(VerifyOptions, "")),
        "submit": [
            *SUBMISSION,
            *_fields(ClusterOptions, "cluster."),
            *_fields(KubernetesOptions, "cluster.kubernetes."),
            *_fields(RayOptions, "cluster.ray."),
        ],
    }
    if name in own:
        yield "The configuration", CONFIGURATION
        yield "This command", own[name]
        yield "More", EVERYTHING


def _fields(options: type[Any], prefix: str) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass as its docstring has them."""
    assert options.__doc__ is not None
    for field in docstring_parser.parse(options.__doc__).params:
        yield f"--{prefix}{field.arg_name}", " ".join((field.description or "").split())


def _table(rows: Options) -> list[str]:
    left = max(len(first) for first, _ in rows) + 4
    width = min(shutil.get_terminal_size().columns, LONGEST_LINE)
    lines = []
    for first, second in rows:
        text = textwrap.wrap(second, max(30, width - left)) or [""]
        lines += [f"  {first:{left - 2}}{text[0]}".rstrip(), *(" " * left + line for line in text[1:])]
    return lines
