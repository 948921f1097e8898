"""Planted causes of slowness on two ranks: what ``scaling`` names first, what it predicts, and what its remedy brings.

Each training has one thing wrong. The remedy is what was proposed, or, where that is not a setting, the same training
without what is wrong. Speeds are of epochs with all that they have. The slow link is a loopback of 100 Mbit/s in a
namespace of its own, the slow rank has half the processor quota of the other (both need root). That a step makes the
host wait cannot be tried without an accelerator.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path += [str(Path(__file__).parents[1] / "pipeline"), str(Path(__file__).parent)]

from quotas import quotas
from ranks import report

from cnnstrategies.planning.scaling.figures import Facts, Measurements
from cnnstrategies.planning.scaling.measuring import Bench
from cnnstrategies.planning.scaling.reasons import reasons
from cnnstrategies.planning.tune.settings import nested, write_commented

HERE = Path(__file__).parent
SECONDS = 22.0  # of a training's measurement, starts included
LINK = "100mbit"
CORES = (0.9, 0.45)
HEALTHY: dict[str, Any] = {
    "seed_everything": 1,
    "trainer": {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "logger": False, "enable_checkpointing": False},
    "model": {"class_path": "planted_parts.Net"},
    "data": {"class_path": "planted_parts.Data", "init_args": {"batch_size": 32, "num_workers": 0}},
}


@dataclass(frozen=True)
class Plant:
    """A planted fault: keys of the configuration and variables, and a word of the cause that should come first."""

    word: str
    values: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


DATA = "data.init_args"
PLANTS = {
    "nothing": Plant("nothing"),
    "a slow loader": Plant("loader is slower", {f"{DATA}.cost": "computes"}),
    "storage that answers late": Plant("waits for storage", {f"{DATA}.cost": "waits"}),
    "an augmentation that holds the interpreter's lock": Plant(
        "interpreter's lock", {f"{DATA}.cost": "holds the lock"}
    ),
    "one rank at half speed": Plant(
        "slower than the others",
        {"trainer.callbacks": [{"class_path": "planted_parts.SlowRank"}]},
        {"CNNSTRATEGIES_SLOW_GROUP": "cnnbench"},
    ),
    "a link of 100 Mbit/s": Plant("link is slow", {"trainer.strategy": "ddp"}, {"CNNSTRATEGIES_LINK": LINK}),
    "8 threads for each rank": Plant("threads compete", variables={"OMP_NUM_THREADS": "8"}),
    "a callback that sleeps": Plant("Sleeper", {"trainer.callbacks": [{"class_path": "planted_parts.Sleeper"}]}),
    "a batch of 2 for each device": Plant("batches are small", {f"{DATA}.batch_size": 2}),
    "validation longer than training": Plant("validation", {f"{DATA}.validation": 16384}),
    "a huge logger at each step": Plant(
        "loggers", {"trainer.logger": [{"class_path": "planted_parts.HugeLogger"}], "trainer.log_every_n_steps": 1}
    ),
}


def measure(*layers: Mapping[str, Any]) -> Measurements:
    """Return the measurements of ``scaling`` with two ranks."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "healthy.yaml").write_text(yaml.safe_dump(HEALTHY))
        words = ["fit", "--config", str(folder / "healthy.yaml")]
        arguments = dict(HEALTHY["data"]["init_args"])
        for number, values in enumerate(layers):
            write_commented(folder / f"{number}.yaml", nested(values))
            words += ["--config", str(folder / f"{number}.yaml")]
            arguments |= {key.rpartition(".")[2]: value for key, value in values.items() if key.startswith(DATA)}
        keys = {name: arguments[name] for name in ("num_workers", "batch_size")}
        return Bench({2: words}, folder, Facts(keys=keys), True, time.monotonic() + SECONDS).measure()


def rate(measurements: Measurements) -> float:
    """Samples/s of epochs with all that they have."""
    run, epoch = measurements.largest, measurements.facts.epoch
    steps = epoch.steps or 1
    return steps * run.samples / (steps * run.step + epoch.validation + epoch.checkpoints)


def one(name: str) -> list[str]:
    """A row of the page."""
    plant = PLANTS[name]
    os.environ |= plant.variables
    measurements = measure(plant.values)
    why = reasons(measurements)
    if name == "nothing":
        share = measurements.largest.rate / min(measurements.limits().values())
        return [
            name,
            "; ".join(reason.cause for reason in why) or "nothing found",
            "",
            f"{share:.2f} of what the parts allow",
        ]
    if not why:
        return [name, "**nothing found**", "", ""]
    first = why[0]
    if plant.word not in first.cause:
        return [name, f"**{first.cause}**", f"{first.gain:.2f}", ""]
    if first.values:
        after = measure(plant.values, first.values)
    else:
        for variable in plant.variables:
            del os.environ[variable]
        after = measure()
    remedy = ", ".join(f"`{key}: {value}`" for key, value in first.values.items()) or "without it"
    return [name, first.cause, f"{first.gain:.2f}", f"{rate(after) / rate(measurements):.2f}, {remedy}"]


def apart(name: str) -> list[str]:
    """The row, from a process with what the plant needs around it."""
    command = [sys.executable, __file__, "--one", name]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    if name == "a link of 100 Mbit/s":
        shape = f"tc qdisc add dev lo root tbf rate {LINK} burst 256kb latency 1s"
        command = ["unshare", "-n", "sh", "-c", f'ip link set lo up mtu 1500 && {shape} && exec "$@"', "sh", *command]
    with quotas(2) as groups:
        for group, cores in zip(groups, CORES, strict=True):
            group.limit(cores)
        ended = subprocess.run(command, cwd=HERE, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    row: list[str] = yaml.safe_load(ended.stdout.rpartition("ROW ")[2])
    return row


def main() -> None:
    """Measure all, or some, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of what is planted; by default all")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print("ROW", yaml.safe_dump(one(options.one), default_flow_style=True, width=10_000))
        return
    rows: list[list[str]] = [["planted", "named first", "gain predicted", "measured, and with which remedy"]]
    for name in options.names or PLANTS:
        rows.append(apart(name))
        print(rows[-1], flush=True)
    report(HERE / "planted.md", "Planted causes of slowness", __doc__ or "", rows)


if __name__ == "__main__":
    main()
