"""`tune` against an exhaustive grid: is its overlay within 5 % of the grid's best, in at most a fifth of the time?

The grid is all that `tune` can combine for one process: memory format, compilation, precision and the processes that
load, 24 points. Each point is a run of its own, started after the one before, that loads as in training; then all of a
group with the same loading, and the configuration as it is, make a block of half a second in each of 11 rounds. The
groups with 1 and 2 processes that load were measured for ResNet-20 alone, where they are slower: such processes have no
core to themselves here.
"""

import itertools
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml
from bench import HERE, environment, threads
from pieces import Pieces, parser
from ranks import report
from tune_networks import BATCH, NETWORKS, configuration

from cnnstrategies.planning.tune.settings import nested
from cnnstrategies.planning.tune.trial import AS_IN_TRAINING, Trial, TrialError

COMPUTE: list[dict[str, Any]] = [
    {"model.init_args.channels_last": True},
    {"model.init_args.compile_backend": "inductor"},
    {"trainer.precision": "bf16-mixed"},
]
LOADING: dict[str, dict[str, Any]] = {
    "0 workers": {},
    "1 worker": {"data.init_args.num_workers": 1},
    "2 workers": {"data.init_args.num_workers": 2},
}
WHOLE = ("ResNet-20",)  # networks for which all of these are measured
ROUNDS = 11
BLOCK = 0.5
FEW = 3
MINUTES = 4.0


LIMITS = """\
Reached within 5 % for VGG-11 and MobileNetV3-Small. The grid gives each point one process, and names the luckiest of
24: for ResNet-20 `inductor` is 1.02, 1.28 and 1.03 times as fast as the defaults in the three groups, where loading
changes nothing, and `channels_last`, which `tune` names, 1.17, 1.15 and 1.13. For ConvNeXt-atto the defaults
themselves, a second process of them, are at 0.97; what compilation gains, 3 % [2, 5], `tune` sees and calls
undecided.

A fifth of the time is not reached: a quarter for ResNet-20. Of the others' grids a third of the points was measured;
for ResNet-20 all took 2.4 times as long as that third. Tried, and kept: candidates that cannot win leave from the
fourth round on; only what is fastest without it is compiled; runs are forked from a process that has imported
everything; each makes its first steps alone, since four at once on two cores took 124 s for what takes 2 s in turn;
one that was alone in its race is not raced again; fresh rounds are 7; loading is left alone where no core is free
for it. Together 111 s for ResNet-20, and 233 at first, on another processor. What is left, for MobileNetV3-Small: 10
s of imports, 65 s of compilation, 55 s of starts with what is compiled already, and 70 s of rounds, a third of them
in the pairs of new processes without which equals win by luck. The grid spends nothing on being sure.

This processor computes bf16 by float32's units, and slower; on one with amx_bf16, with `tune` as it was before, bf16
and channels_last were chosen for ResNet-20 (1.96 [1.85, 2.07] times Lightning's defaults) and VGG-11 (1.46 [1.43,
1.57]): [what limits it](bf16_limits.md)."""


def points() -> dict[str, dict[str, Any]]:
    """The combinations of the first kind by name."""
    combinations = {}
    for chosen in itertools.product((False, True), repeat=len(COMPUTE)):
        values = {
            key: value for setting, on in zip(COMPUTE, chosen, strict=True) if on for key, value in setting.items()
        }
        combinations[
            ", ".join(str(value) for value in values.values()).replace("True", "channels_last") or "default"
        ] = values
    return combinations


class Runs:
    """Runs that are there at once, and wait to be told to make steps.

    Args:
        network: Which.
        stack: Ends them.
    """

    def __init__(self, network: str, stack: ExitStack) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.stack = stack
        self.base = self.folder / "base.yaml"
        self.base.write_text(yaml.safe_dump(configuration(network)))
        self.trials: dict[str, tuple[Trial, int]] = {}
        os.environ.update(environment())

    def start(self, name: str, values: Mapping[str, Any]) -> None:
        """Start one and make its first steps."""
        overlay = self.folder / f"{len(self.trials)}.yaml"
        overlay.write_text(yaml.safe_dump(dict(values)))
        words = ["fit", "--config", str(self.base), "--config", str(overlay)]
        trial = Trial(self.folder, str(len(self.trials)), words, 200, AS_IN_TRAINING)
        self.stack.callback(trial.close)
        trial.wait_until_ready()
        for _ in range(FEW):
            seconds = trial.steps(FEW)["seconds"] / FEW
        self.trials[name] = trial, max(1, math.ceil(BLOCK / seconds))

    def rounds(self, count: int) -> dict[str, list[float]]:
        """Seconds per step of each, by rounds."""
        seconds: dict[str, list[float]] = {name: [] for name in self.trials}
        for _ in range(count):
            order = list(self.trials)
            random.shuffle(order)
            for name in order:
                trial, steps = self.trials[name]
                seconds[name].append(trial.steps(steps)["seconds"] / steps)
        return seconds


def grid(name: str) -> dict[str, Any]:
    """All points with the same loading: their speed over the configuration as it is, and the seconds that took."""
    network, _, loading = name.split("/")
    start = time.monotonic()
    with ExitStack() as stack:
        runs = Runs(network, stack)
        runs.start("base", {})
        failed = []
        for point, values in points().items():
            try:
                runs.start(point, nested({**values, **LOADING[loading]}))
            except TrialError as failure:
                failed.append(f"{point}: {failure}")
        times = runs.rounds(ROUNDS)
    base = times.pop("base")
    gains = {point: [math.log(b / t) for b, t in zip(base, each, strict=True)] for point, each in times.items()}
    speeds = {point: math.exp(statistics.median(each)) for point, each in gains.items()}
    return {"seconds": time.monotonic() - start, "speeds": speeds, "failed": failed}


def tune(name: str) -> dict[str, Any]:
    """Return the settings that `tune` writes, and the seconds that it took."""
    network = name.split("/")[0]
    with tempfile.TemporaryDirectory() as folder:
        base, output = Path(folder) / "base.yaml", Path(folder) / "tuned.yaml"
        base.write_text(yaml.safe_dump(configuration(network)))
        words = ["-m", "cnnstrategies", "tune", "--config", str(base), "--allow=[precision]", f"--minutes={MINUTES}"]
        start = time.monotonic()
        made = subprocess.run(
            [sys.executable, *words, f"--output={output}"],
            # With nothing compiled before, as when a network is new; the grid has left all that it compiled.
            env={**environment(), "COLUMNS": "120", "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "compiled")},
            capture_output=True,
            text=True,
            check=True,
        )
        seconds = time.monotonic() - start
        print(made.stdout)
        return {
            "seconds": seconds,
            "overlay": yaml.safe_load(output.read_text()) if output.exists() else {},
            "verdict": output.read_text().partition("\n")[0].removeprefix("# ") if output.exists() else "",
        }


def groups(network: str) -> list[str]:
    """The parts of the grid that are measured."""
    return list(LOADING) if network in WHOLE else list(LOADING)[:1]


def speeds(pieces: Pieces, network: str) -> dict[tuple[str, str], float]:
    """The grid's, by point and loading, over the configuration as it is."""
    return {
        (point, loading): speed
        for loading in groups(network)
        for point, speed in pieces.known[f"{network}/grid/{loading}"]["speeds"].items()
    }


def main() -> None:
    """Measure what is missing, and write the page of the networks that are complete."""
    pieces = Pieces(parser(__doc__).parse_args())
    pieces.measure([f"{network}/grid/{loading}" for network in NETWORKS for loading in groups(network)], grid)
    pieces.measure([f"{network}/tune" for network in NETWORKS], tune)
    heads = (
        "network",
        "grid's best",
        "tune's",
        "by the grid, tune's over the best",
        "by tune, over Lightning's defaults",
    )
    rows: list[Sequence[str]] = [(*heads, "seconds, grid", "seconds, tune")]
    for network in NETWORKS:
        needed = [f"{network}/tune", *(f"{network}/grid/{loading}" for loading in groups(network))]
        if not all(name in pieces.known for name in needed):
            continue
        speeds_of_points, tuned = speeds(pieces, network), pieces.known[f"{network}/tune"]
        best = max(speeds_of_points, key=lambda key: speeds_of_points[key])
        named = next(name for name, values in points().items() if nested(values) == tuned["overlay"])
        spent = sum(pieces.known[name]["seconds"] for name in needed[1:])
        rows.append(
            (
                network,
                ", ".join(best),
                named,
                f"{speeds_of_points[named, next(iter(LOADING))] / speeds_of_points[best]:.2f}",
                tuned["verdict"].partition(": ")[2].partition(", measured")[0] or "nothing is faster",
                f"{spent:.0f} for {len(speeds_of_points)} points",
                f"{tuned['seconds']:.0f} ({tuned['seconds'] / spent:.2f})",
            )
        )
    if len(rows) > 1:
        report(HERE / "tune_grid.md", "Tune against an exhaustive grid", text(), rows, threads())


def text() -> str:
    """Return the page's text above its table."""
    flags = Path("/proc/cpuinfo").read_text()
    units = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in flags]
    has = f"has bf16 units ({', '.join(units)})" if units else "has no bf16 units"
    return (
        f"{__doc__}\nBatches of {BATCH} synthetic images, SGD with momentum, one process, `--allow '[precision]'`. "
        "Targets: an overlay at least 0.95 times as fast as the grid's best, in a fifth of its time, and with bf16 at "
        "least 2 times Lightning's defaults for ResNet-20 and VGG-11. Hardly anything ran beside it. `tune`'s "
        f"intervals are of 95 %. The processor {has}.\n\n{LIMITS}"
    )


if __name__ == "__main__":
    main()
