"""``cnnstrategies tune``: measure which settings make the training of a configuration fastest on this machine."""

import os
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.status import Status

from cnnstrategies.commands.arguments.options import TuneOptions
from cnnstrategies.commands.arguments.refuse import fail
from cnnstrategies.commands.run.errors import parameters_of
from cnnstrategies.commands.run.lightning_cli import ModelAndData, device_of
from cnnstrategies.commands.tune.learning_rate import find_learning_rate
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.configuration_file import write_commented
from cnnstrategies.planning.tune.contest import Contest, repeats, table
from cnnstrategies.planning.tune.settings import Setting, factorial, joined, nested
from cnnstrategies.planning.tune.trial import AS_IN_TRAINING, ONE_BATCH, TrialError
from cnnstrategies.runtime.processes import temporary_folder
from cnnstrategies.runtime.stop_signals import interruptible

MOST_WORKERS = 4  # Largest number of worker processes of a DataLoader that ``tune`` tries for each rank.
# Name of the phase that tries settings of the DataLoader. The trials of this phase load a new batch in each step. The
# trials of other phases use the same batch in all steps.
LOADING = "loading"


def main(options: TuneOptions, arguments: Sequence[str]) -> None:
    """Measure settings, print the results, and write the fastest settings to a file.

    Args:
        options: The options of the command.
        arguments: Command-line arguments of the configuration.
    """
    cli = ModelAndData("tune", arguments)
    if options.learning_rate:
        find_learning_rate(cli, options.picture)
        return
    device = device_of(cli.config.trainer.accelerator)
    phases = {
        "compute": list(factorial(choices(cli.config, type(cli.model), device, options.allow))),
        "compilation": compilers(cli.config, type(cli.model)),
        LOADING: loading(cli.config, type(cli.datamodule)),
    }
    console = Console()
    with temporary_folder("cnnstrategies_tune_") as folder, console.status("") as status:
        search = Search(["fit", *arguments], Path(folder), cli.config, device, options, status)
        try:
            with interruptible():
                search.run(phases)
        except KeyboardInterrupt:
            status.stop()
            console.print("Interrupted. Results so far:")
        except TrialError as failure:
            raise ConfigurationError(
                f"training with this configuration fails ({failure}): first make sure that `cnnstrategies fit` works "
                "with it"
            ) from failure
    _report(console, search, options)


def choices(config: Any, model: type, device: torch.device, allow: Collection[str]) -> list[list[Setting]]:
    """Return the groups of settings that ``tune`` combines.

    A combination has at most one setting of each group, because the settings of a group exclude each other: bf16 and
    TF32, for example. A setting changes an argument of the module if the module's class has this argument, or else adds
    the callback ComputeSettings.

    Args:
        config: The configuration.
        model: The module's class.
        device: The device that trains.
        allow: Kinds of settings to include although they change the trained weights, such as ``precision``.
    """
    settings, arguments = _arguments(config, model)
    if "channels_last" in arguments:
        channels_last = bool(settings.get("channels_last"))
        name, values = (
            "contiguous" if channels_last else "channels_last",
            {"model.init_args.channels_last": not channels_last},
        )
    else:
        name, values = "channels_last", {"ComputeSettings.channels_last": True}
    groups = [[Setting(name, values, Effect.ROUNDING)]]
    if "precision" in allow and str(config.trainer.precision) in ("32-true", "32", "None"):
        precisions = []
        if device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
            precisions.append(Setting("bf16", {"trainer.precision": "bf16-mixed"}, Effect.LEARNING))
        if device.type == "cuda":
            precisions.append(Setting("TF32", {"ComputeSettings.float32_precision": "high"}, Effect.LEARNING))
        groups.append(precisions)
    if device.type == "cuda" and not config.trainer.benchmark:
        groups.append([Setting("cudnn.benchmark", {"trainer.benchmark": True}, Effect.ROUNDING)])
    return [group for group in groups if group]


def compilers(config: Any, model: type) -> list[Setting]:
    """Return the settings that ``tune`` tries for compiling the module.

    Compilation takes much time, so ``tune`` tries these settings only together with the fastest other settings.

    Args:
        config: The configuration.
        model: The module's class.
    """
    settings, arguments = _arguments(config, model)
    if "compile_backend" in arguments:
        value = None if settings.get("compile_backend") else "inductor"
        return [Setting(value or "not compiled", {"model.init_args.compile_backend": value}, Effect.ROUNDING)]
    return [Setting("inductor", {"ComputeSettings.compile_backend": "inductor"}, Effect.ROUNDING)]


def loading(config: Any, data: type) -> list[Setting]:
    """Return the settings that change the number of the DataLoader's worker processes.

    Args:
        config: The configuration.
        data: The data module's class.
    """
    arguments = parameters_of(data)
    if "num_workers" not in arguments or not hasattr(config.data, "init_args"):
        return []
    ranks = int(config.trainer.devices) if str(config.trainer.devices).isdigit() else 1
    most = min(MOST_WORKERS, max(1, (os.cpu_count() or 1) // ranks))
    persistent = {"data.init_args.persistent_workers": True} if "persistent_workers" in arguments else {}
    return [
        Setting(f"{count} workers", {"data.init_args.num_workers": count, **(persistent if count else {})}, Effect.NONE)
        for count in dict.fromkeys((0, 1, most // 2, most))
        if count != config.data.init_args.get("num_workers", 0)
    ]


def _arguments(config: Any, model: type) -> tuple[Any, Collection[str]]:
    """Return the module's arguments in the configuration, and the names of all arguments of the module's class."""
    if not hasattr(config.model, "init_args"):
        return {}, ()
    return config.model.init_args, parameters_of(model)


class Search:
    """Search for the fastest settings in several phases.

    Each phase tries one kind of settings, together with the fastest settings of earlier phases.

    Attributes:
        contests: The results of each phase, by the name of the phase.
        chosen: The fastest settings so far, combined; None if no setting is faster than the configuration.
        notes: Lines of output about phases that were left out, with the reason.

    Args:
        arguments: Command-line arguments of a trial: ``fit`` and the arguments of the configuration.
        folder: Temporary folder for files of the trials.
        config: The configuration.
        device: The device that trains.
        options: The options of the command.
        status: Display of the progress.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        config: Any,
        device: torch.device,
        options: TuneOptions,
        status: Status,
    ) -> None:
        self.arguments, self.folder, self.config, self.device = list(arguments), folder, config, device
        self.contests: dict[str, Contest] = {}
        self.chosen: Setting | None = None
        self.notes: list[str] = []
        self._status = status
        self._ends = time.monotonic() + 60 * options.minutes

    def run(self, phases: Mapping[str, Sequence[Setting]]) -> None:
        """Run all phases, as long as there is time.

        Args:
            phases: The settings to try in each phase, by the name of the phase.

        Raises:
            TrialError: The configuration itself fails, without any of the settings.
        """
        winners: list[Setting] = []
        for kind, settings in phases.items():
            if not settings:
                continue
            if kind == LOADING and self.device.type == "cpu" and not self._has_spare_cores():
                self.notes.append(
                    "loading: not tried, because the ranks use all cores and leave none for the DataLoader's workers"
                )
                continue
            if time.monotonic() > self._ends:
                self.notes.append(f"{kind}: not tried, because no time was left; give more --minutes")
                continue
            self.contests[kind] = contest = self._contest(len(settings), kind == LOADING)
            if (winner := contest.run(settings)) is not None:
                winners.append(winner)
                self.chosen = joined(winners)
        if len(winners) > 1:
            assert self.chosen is not None
            combined, self.chosen = self.chosen, None
            self.contests["all together"] = contest = self._contest(1, LOADING in self.contests)
            self.chosen = contest.run([combined])

    def _contest(self, count: int, loads: bool) -> Contest:
        arguments = self.arguments
        if self.chosen is not None:
            base = self.folder / f"base{len(self.contests)}.yaml"
            write_commented(base, nested(self.chosen.values))
            arguments = [*arguments, "--config", str(base)]
        return Contest(
            arguments,
            self.folder,
            self._ends,
            together=max(1, count) if self.device.type == "cpu" else 1,
            deterministic=repeats(self.config.trainer.strategy),
            progress=self._progress,
            module=AS_IN_TRAINING if loads else ONE_BATCH,
        )

    def _has_spare_cores(self) -> bool:
        ranks = str(self.config.trainer.devices)
        threads = os.environ.get("OMP_NUM_THREADS", "")
        # If OMP_NUM_THREADS is not set, Lightning divides all cores among the ranks, so no core is spare.
        known = ranks.isdigit() and threads.isdigit()
        return known and (os.cpu_count() or 1) > int(ranks) * int(threads)

    def _progress(self, text: str) -> None:
        left = max(0.0, self._ends - time.monotonic())
        self._status.update(f"{text}; at most {left / 60:.1f} minutes left")


def _report(console: Console, search: Search, options: TuneOptions) -> None:
    if not any(contest.default_times for contest in search.contests.values()):
        fail("there was not enough time for a single measurement of all settings: give more --minutes")
    for kind, contest in search.contests.items():
        if contest.default_times:
            rate = 1 / statistics.median(contest.default_times)
            console.print(table(list(contest.rows.values()), rate, kind if len(search.contests) > 1 else ""))
    for note in search.notes:
        print(note)
    winner = search.chosen
    if winner is None:
        print("No setting is clearly faster than the configuration: keep the configuration as it is.")
        return
    rows = [contest.rows[winner.name] for contest in search.contests.values() if winner.name in contest.rows]
    verdict = rows[-1].verdict
    assert verdict is not None, "a winner has a verdict"
    lines = [
        f"{winner.name}: {verdict.speed:.2f} times as fast [{verdict.low:.2f}, {verdict.high:.2f}], measured by "
        "cnnstrategies tune"
    ]
    if winner.effect is Effect.LEARNING:
        lines.append("This setting changes the trained weights: compare the accuracy.")
    write_commented(options.output, nested(winner.values), lines)
    print(f"Wrote {options.output}; use it as in cnnstrategies fit --config YOURS --config {options.output}")
