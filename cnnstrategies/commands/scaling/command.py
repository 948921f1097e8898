"""``cnnstrategies scaling``: why more devices are not faster, by short trainings on one and on more."""

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
from cnnstrategies.planning.scaling import report
from cnnstrategies.planning.scaling.figures import Facts
from cnnstrategies.planning.scaling.measuring import Bench
from cnnstrategies.planning.scaling.reasons import Reason, reasons
from cnnstrategies.planning.tune.contest import Contest, repeats
from cnnstrategies.planning.tune.settings import Setting, joined, nested, write_commented
from cnnstrategies.planning.tune.trial import AS_IN_TRAINING, TrialError

KEYS = ("num_workers", "batch_size", "global_batch_size")
TRIED = 3  # remedies
BETWEEN_STEPS = "trainer.check_val_every_n_epoch"  # No step is quicker with it.


def main(options: ScalingOptions, words: Sequence[str]) -> None:
    """Measure, print and draw; with ``--try`` measure remedies as well."""
    config = ModelAndData("scaling", words).config
    if int(config.trainer.num_nodes) > 1:
        raise ConfigurationError(
            f"trainer.num_nodes={config.trainer.num_nodes}: scaling trains on this machine; give 1, and try the link "
            "to others with `cnnstrategies doctor`"
        )
    device = device_of(config.trainer.accelerator)
    for name in ("picture", "output"):
        if not os.access(folder := getattr(options, name).parent, os.W_OK):
            raise ConfigurationError(
                f"{name}={getattr(options, name)}: no file can be written to {folder}: make it, or give another"
            )
    counts = options.devices or sorted({1, _devices(config.trainer.devices, device)})
    strategy = _name(config.trainer.strategy)
    console = Console(soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="cnnstrategies_scaling_") as place, console.status("") as status:
        folder = Path(place)
        of_counts = {count: ["fit", *words, "--config", str(_overlay(folder, count, strategy))] for count in counts}
        arguments: Mapping[str, Any] = getattr(config.get("data"), "init_args", None) or {}
        keys = {key: value for key in KEYS if isinstance(value := arguments.get(key), int)}
        ends = time.monotonic() + 60 * options.minutes
        bench = Bench(of_counts, folder, Facts(strategy, keys=keys), device.type == "cpu", ends, status.update)
        try:
            found = bench.measure()
        except TrialError as failure:
            raise ConfigurationError(
                f"the configuration does not run ({failure}): see it by `cnnstrategies fit` first"
            ) from failure
        why = reasons(found)
        status.stop()
        console.print(report.table(found))
        for count, trouble in bench.trouble.items():
            console.print(f"Not measured on {count}: {trouble}", highlight=False, markup=False)
        console.print("\n".join(report.sentences(found, why)), highlight=False, markup=False)
        report.draw(found, options.picture)
        console.print(f"Drew {options.picture}")
        if not options.try_:
            return
        status.start()
        ends = time.monotonic() + 60 * options.minutes

        def contest(left: int) -> Contest:
            now = time.monotonic()
            return Contest(
                of_counts[found.largest.devices],
                Path(tempfile.mkdtemp(dir=place)),
                now + (ends - now) / left,
                together=1,
                deterministic=repeats(config.trainer.strategy),
                progress=status.update,
                command=AS_IN_TRAINING,
            )

        helped = _tried(contest, why, console)
    if helped:
        write_commented(options.output, nested(joined(helped).values), ["measured by cnnstrategies scaling"])
        console.print(f"Wrote {options.output}: cnnstrategies fit --config YOURS --config {options.output}")
    else:
        console.print("Wrote nothing: no setting has been found faster.")


def _tried(contest: Callable[[int], Contest], why: Sequence[Reason], console: Console) -> list[Setting]:
    """The first remedies that are settings and leave alone what is learned, of which those are left that were faster.

    Args:
        contest: For the first of so many that are left, which share the time.
    """
    helped = []
    settings = [Setting(one.cause, one.values, one.effect) for one in why if one.values]
    tried = [one for one in settings if one.effect < Effect.LEARNING and BETWEEN_STEPS not in one.values][:TRIED]
    for setting in settings:
        if setting.effect == Effect.LEARNING:
            said = "not tried: it changes what is learned, so compare the accuracy, too"
        elif setting not in tried:
            said = "not tried: " + (
                "no step is quicker with it" if BETWEEN_STEPS in setting.values else f"only the first {TRIED} are"
            )
        else:
            said, faster = _outcome(contest(len(tried) - tried.index(setting)), setting)
            helped += [setting] * faster
        shown = ", ".join(f"{key}: {value}" for key, value in setting.values.items())
        console.print(f"`{shown}`: {said}", highlight=False, markup=False)
    return helped


def _outcome(contest: Contest, setting: Setting) -> tuple[str, bool]:
    """What is to be said of a setting, and whether it is faster."""
    try:
        contest.run([setting])
    except TrialError as failure:
        return f"not tried: the configuration without it does not run any more ({failure})", False
    row = contest.rows[setting.name]
    if (one := row.verdict) is None:
        return row.trouble or "not tried: no time left, give more --minutes", False
    return f"{one.speed:.2f} times as fast [{one.low:.2f}, {one.high:.2f}]: {one.outcome}", one.outcome == "faster"


def _devices(given: Any, device: torch.device) -> int:
    """Those of the configuration; all that there are where it leaves them open, and at least 2."""
    text = str(len(given) if isinstance(given, list) else given)
    there = torch.accelerator.device_count() if device.type != "cpu" else 1
    return max(2, int(text) if text.isdigit() else there)


def _name(strategy: Any) -> str:
    """A strategy as the configuration names it, or its class."""
    return strategy if isinstance(strategy, str) else str(strategy.class_path).rpartition(".")[2]


def _overlay(folder: Path, count: int, strategy: str) -> Path:
    """What makes a configuration one for so many devices."""
    path = folder / f"devices{count}.yaml"
    trainer: dict[str, Any] = {"devices": count}
    if count == 1:
        trainer["strategy"] = "auto"
    elif strategy == "auto":
        trainer["strategy"] = "ddp"
    write_commented(path, {"trainer": trainer})
    return path
