"""``cnnstrategies scaling``: find out why training on more devices is not faster.

The command measures short trainings on one device and on more devices.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cnnstrategies.commands.arguments.options import ScalingOptions
from cnnstrategies.commands.run.lightning_cli import ModelAndData, device_of
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.candidates import Effect
from cnnstrategies.planning.configuration_file import write_commented
from cnnstrategies.planning.scaling import report
from cnnstrategies.planning.scaling.figures import Facts
from cnnstrategies.planning.scaling.measuring import Bench
from cnnstrategies.planning.scaling.reason import Reason
from cnnstrategies.planning.scaling.reasons import reasons
from cnnstrategies.planning.tune.contest import Contest, repeats
from cnnstrategies.planning.tune.settings import Setting, joined, nested
from cnnstrategies.planning.tune.trial import AS_IN_TRAINING, TrialError
from cnnstrategies.runtime.processes import temporary_folder

KEYS = ("num_workers", "batch_size", "global_batch_size")  # Arguments of the data module that remedies may change.
TRIED = 3  # Largest number of remedies that `--try` measures.
# Key of the remedy "validate less often". Trials measure training steps only, so they cannot measure this remedy.
BETWEEN_STEPS = "trainer.check_val_every_n_epoch"


def main(options: ScalingOptions, arguments: Sequence[str]) -> None:
    """Measure training steps, print the causes of lost speed, and draw a picture. With ``--try``, measure remedies.

    Args:
        options: The options of the command.
        arguments: Command-line arguments of the configuration.
    """
    config = ModelAndData("scaling", arguments).config
    if int(config.trainer.num_nodes) > 1:
        raise ConfigurationError(
            f"trainer.num_nodes={config.trainer.num_nodes}: scaling measures on this machine only; set "
            "trainer.num_nodes=1, and measure the connections to other machines with `cnnstrategies doctor`"
        )
    device = device_of(config.trainer.accelerator)
    for name in ("picture", "output"):
        if not os.access(folder := getattr(options, name).parent, os.W_OK):
            raise ConfigurationError(
                f"{name}={getattr(options, name)}: files cannot be written to {folder}: create this folder, or choose "
                "another folder"
            )
    counts = options.devices or sorted({1, _devices(config.trainer.devices, device)})
    strategy = _name(config.trainer.strategy)
    console = Console(soft_wrap=True)
    with temporary_folder("cnnstrategies_scaling_") as place, console.status("") as status:
        folder = Path(place)
        calls = {count: ["fit", *arguments, "--config", str(_overlay(folder, count, strategy))] for count in counts}
        data_arguments: Mapping[str, Any] = getattr(config.get("data"), "init_args", None) or {}
        keys = {key: value for key in KEYS if isinstance(value := data_arguments.get(key), int)}
        ends = time.monotonic() + 60 * options.minutes
        bench = Bench(calls, folder, Facts(strategy, keys=keys), device.type == "cpu", ends, status.update)
        try:
            measurement = bench.measure()
        except TrialError as failure:
            raise ConfigurationError(
                f"training with this configuration fails ({failure}): first make sure that `cnnstrategies fit` works "
                "with it"
            ) from failure
        causes = reasons(measurement)
        status.stop()
        console.print(report.table(measurement))
        for count, trouble in bench.trouble.items():
            console.print(f"Not measured on {count} devices: {trouble}", highlight=False, markup=False)
        console.print("\n".join(report.sentences(measurement, causes)), highlight=False, markup=False)
        report.draw(measurement, options.picture)
        console.print(f"Wrote the picture {options.picture}")
        if not options.try_:
            return
        status.start()
        ends = time.monotonic() + 60 * options.minutes

        def contest(left: int) -> Contest:
            now = time.monotonic()
            return Contest(
                calls[measurement.largest.devices],
                Path(tempfile.mkdtemp(dir=place)),
                now + (ends - now) / left,
                together=1,
                deterministic=repeats(config.trainer.strategy),
                progress=status.update,
                module=AS_IN_TRAINING,
            )

        faster = _faster_settings(contest, causes, console)
    if faster:
        write_commented(options.output, nested(joined(faster).values), ["measured by cnnstrategies scaling"])
        console.print(
            f"Wrote {options.output}; use it as in cnnstrategies fit --config YOURS --config {options.output}"
        )
    else:
        console.print("No file was written, because no setting was faster.")


def _faster_settings(contest: Callable[[int], Contest], causes: Sequence[Reason], console: Console) -> list[Setting]:
    """Measure remedies, print the results, and return the settings that were faster.

    Only remedies that are settings and do not change the trained weights are measured.

    Args:
        contest: Function that returns a contest, which measures one setting. The function's argument is the number of
            settings that are not measured yet. The contest may use the remaining time divided by this number.
        causes: The causes of lost speed with their remedies, largest possible gain first.
        console: The console to print to.
    """
    faster_settings = []
    settings = [Setting(cause.cause, cause.values, cause.effect) for cause in causes if cause.values]
    candidates = [setting for setting in settings if setting.effect < Effect.LEARNING]
    tried = [setting for setting in candidates if BETWEEN_STEPS not in setting.values][:TRIED]
    for setting in settings:
        if setting.effect == Effect.LEARNING:
            outcome = "not tried: this changes the trained weights; if you use it, compare the accuracy as well"
        elif setting not in tried:
            outcome = "not tried: " + (
                "this does not make steps faster"
                if BETWEEN_STEPS in setting.values
                else f"only the first {TRIED} settings are tried"
            )
        else:
            outcome, is_faster = _outcome(contest(len(tried) - tried.index(setting)), setting)
            faster_settings += [setting] * is_faster
        shown = ", ".join(f"{key}: {value}" for key, value in setting.values.items())
        console.print(f"`{shown}`: {outcome}", highlight=False, markup=False)
    return faster_settings


def _outcome(contest: Contest, setting: Setting) -> tuple[str, bool]:
    """Measure a setting. Return a description of the result, and whether the setting is faster."""
    try:
        contest.run([setting])
    except TrialError as failure:
        return f"not tried: training fails now even without this setting ({failure})", False
    row = contest.rows[setting.name]
    if (verdict := row.verdict) is None:
        return row.trouble or "not tried: no time was left; give more --minutes", False
    interval = f"[{verdict.low:.2f}, {verdict.high:.2f}]"
    return f"{verdict.speed:.2f} times as fast {interval}: {verdict.outcome}", verdict.outcome == "faster"


def _devices(devices: Any, device: torch.device) -> int:
    """Return the configured number of devices, or 2 if the number is smaller.

    If the configuration does not give a number, use the number of available devices.

    Args:
        devices: The configuration's value of ``trainer.devices``.
        device: The device that trains.
    """
    text = str(len(devices) if isinstance(devices, list) else devices)
    available = torch.accelerator.device_count() if device.type != "cpu" else 1
    return max(2, int(text) if text.isdigit() else available)


def _name(strategy: Any) -> str:
    """Return the name of a configuration's strategy: its registered name, or the name of its class."""
    return strategy if isinstance(strategy, str) else str(strategy.class_path).rpartition(".")[2]


def _overlay(folder: Path, count: int, strategy: str) -> Path:
    """Write a configuration file that sets the number of devices, and return the file's path.

    For one device, the file also sets the strategy ``auto``. For several devices, the file replaces the strategy
    ``auto`` by ``ddp``.

    Args:
        folder: Folder to write to.
        count: Number of devices.
        strategy: Name of the configuration's strategy.
    """
    path = folder / f"devices{count}.yaml"
    trainer: dict[str, Any] = {"devices": count}
    if count == 1:
        trainer["strategy"] = "auto"
    elif strategy == "auto":
        trainer["strategy"] = "ddp"
    write_commented(path, {"trainer": trainer})
    return path
