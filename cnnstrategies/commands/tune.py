"""``cnnstrategies tune``: find the settings with which this machine trains a configuration fastest, by measurement."""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from lightning.pytorch.cli import LightningArgumentParser
from rich.console import Console
from typing_extensions import override

from cnnstrategies.commands.model_and_data import ModelAndData, device_of
from cnnstrategies.commands.quiet import quieten
from cnnstrategies.commands.refuse import fail
from cnnstrategies.commands.tune_choices import choices
from cnnstrategies.commands.tune_options import TuneOptions
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.contest import Contest
from cnnstrategies.planning.settings import Setting, factorial
from cnnstrategies.planning.settings_file import write_settings
from cnnstrategies.planning.trial import TrialError
from cnnstrategies.planning.tune_report import draw, table


class TuneCLI(ModelAndData):
    """What ``fit`` parses, and what ``tune`` takes beside it."""

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(TuneOptions, None)


def main(args: Sequence[str]) -> None:
    """Find the fastest settings, print them and write them.

    Args:
        args: The command line from ``tune`` on.

    Raises:
        ConfigurationError: The configuration cannot be run as it is.
    """
    sys.argv = ["cnnstrategies tune", *args[1:]]
    quieten()
    cli = TuneCLI()
    options = TuneOptions(**{name.name: getattr(cli.config, name.name) for name in fields(TuneOptions)})
    device = device_of(cli.config.trainer.accelerator)
    settings = list(factorial(choices(cli.config, type(cli.model), device, options.allow)))
    console = Console()
    with tempfile.TemporaryDirectory(prefix="cnnstrategies_tune_") as folder, console.status("") as status:
        ends = time.monotonic() + 60 * options.minutes

        def progress(text: str) -> None:
            left = max(0.0, ends - time.monotonic())
            status.update(f"{text}; at most {left / 60:.1f} minutes left")

        contest = Contest(
            without_own_options(["fit", *args[1:]]),
            Path(folder),
            ends,
            together=max(1, len(settings)) if device.type == "cpu" else 1,
            deterministic="async" not in str(cli.config.trainer.strategy),
            progress=progress,
        )
        winner: Setting | None = None
        try:
            winner = contest.run(settings)
        except KeyboardInterrupt:
            status.stop()
            console.print("Stopped: what is known so far is")
        except TrialError as failure:
            raise ConfigurationError(
                f"the configuration does not run as it is ({failure}): see it by `cnnstrategies fit` first"
            ) from failure
    _tell(console, contest, winner, options)


def _tell(console: Console, contest: Contest, winner: Setting | None, options: TuneOptions) -> None:
    rows = list(contest.rows.values())
    if not contest.default_times:
        fail("there was no time for a single round: give more --minutes")
    console.print(table(rows, 1 / statistics.median(contest.default_times)))
    if options.plot is not None:
        draw(rows, options.plot)
        print(f"Drew {options.plot}")
    if winner is None:
        print("Nothing is clearly faster: keep the configuration as it is.")
        return
    verdict = contest.rows[winner.name].verdict
    assert verdict is not None, "the winner has run"
    lines = [
        f"{winner.name}: {verdict.speed:.2f} times as fast [{verdict.low:.2f}, {verdict.high:.2f}], measured by "
        "cnnstrategies tune"
    ]
    if winner.effect is Effect.LEARNING:
        lines.append("It changes what is learned: compare the accuracy.")
    write_settings(options.output, winner.values, lines)
    print(f"Wrote {options.output}: cnnstrategies fit --config YOURS --config {options.output}")


def without_own_options(words: Sequence[str]) -> list[str]:
    """A command line without what ``tune`` alone takes.

    Args:
        words: With it, as ``--minutes 5`` or ``--minutes=5``.
    """
    own = {f"--{one.name}" for one in fields(TuneOptions)}
    kept: list[str] = []
    skips = False
    for word in words:
        name = word.partition("=")[0].removesuffix("+")
        if name in own:
            skips = "=" not in word
        elif skips and not word.startswith("--"):
            continue
        else:
            skips = False
            kept.append(word)
    return kept
