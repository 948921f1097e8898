"""Sixteen planted causes of slow training on two ranks: what ``scaling`` names, what it predicts, and what it brings.

Each training has one thing wrong, which is planted by waiting wherever that is possible, so that other programs on the
machine hardly matter. The remedy is the proposed setting or, if the remedy is not a setting, the same training without
what is wrong. Speeds are speeds of whole epochs, with validation and checkpoints. The slow link is a loopback of 100
Mbit/s in a network namespace, which needs root. A step that makes the process wait for the device cannot be planted
without an accelerator.
"""

import argparse
import json
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

from ranks import report

from cnnstrategies.planning.configuration_file import write_commented
from cnnstrategies.planning.scaling.figures import Facts, Measurements
from cnnstrategies.planning.scaling.measuring import Bench
from cnnstrategies.planning.scaling.reasons import reasons
from cnnstrategies.planning.tune.settings import nested

HERE = Path(__file__).parent
SECONDS = 12.0  # Time limit of the measurement of one training, with its start.
LINK = "100mbit"
HEALTHY: dict[str, Any] = {
    "seed_everything": 1,
    "trainer": {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "logger": False, "enable_checkpointing": False},
    "model": {"class_path": "planted_parts.Net"},
    "data": {"class_path": "planted_parts.Data", "init_args": {"batch_size": 16, "num_workers": 0}},
}


@dataclass(frozen=True)
class Plant:
    """A planted cause.

    Attributes:
        word: Words of the cause that ``scaling`` should name first.
        values: Values of the configuration that plant the cause.
        variables: Environment variables that plant the cause.
        also: Words of other causes that are true as well.
        cure: Values of the configuration without the cause; by default the configuration without `values`.
    """

    word: str
    values: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    cure: Mapping[str, Any] = field(default_factory=dict)


NET, DATA = "model.init_args", "data.init_args"
UNEVEN = {f"{NET}.uneven": True}


def callback(name: str) -> dict[str, Any]:
    """Return a configuration with a callback of `planted_parts`."""
    return {"trainer.callbacks": [{"class_path": f"planted_parts.{name}"}]}


SAVING = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "slow", "every_n_train_steps": 16}}
PLANTS = {
    "nothing": Plant("nothing"),
    "a slow loader": Plant("loader is slower", {f"{DATA}.cost": "computes"}),
    "storage that answers late": Plant("waits for storage", {f"{DATA}.cost": "waits"}),
    "storage that answers late on one rank only": Plant(
        "waits for storage", {f"{DATA}.cost": "waits", f"{DATA}.only": 1}
    ),
    "an augmentation that holds the interpreter's lock": Plant(
        "interpreter's lock", {f"{DATA}.cost": "holds the lock"}
    ),
    "one slow rank, and a log with `sync_dist` in each step": Plant(
        "rank 1 is slower", {f"{NET}.slow_rank": 1, f"{NET}.meets": "log"}
    ),
    "a link of 100 Mbit/s": Plant("link is slow", {"trainer.strategy": "ddp"}, {"CNNSTRATEGIES_LINK": LINK}),
    "8 threads for each rank": Plant("threads compete", variables={"OMP_NUM_THREADS": "8"}),
    "a callback that sleeps on rank 0": Plant("Sleeper", callback("Sleeper")),
    "averaged weights by `deepcopy`": Plant("AverageByCopy", callback("AverageByCopy")),
    "a batch of 2 for each device": Plant("batches are small", {f"{DATA}.batch_size": 2, f"{NET}.fixed": 0.04}),
    "validation longer than training": Plant("validation", {f"{DATA}.validation": 16384}),
    "checkpoints on a slow disk": Plant(
        "checkpoints",
        {
            "trainer.enable_checkpointing": True,
            "trainer.callbacks": [SAVING],
            "trainer.plugins": [{"class_path": "planted_parts.SlowDisk"}],
        },
    ),
    "a huge logger at each step": Plant(
        "loggers", {"trainer.logger": [{"class_path": "planted_parts.HugeLogger"}], "trainer.log_every_n_steps": 1}
    ),
    "64 MB of buffers": Plant("buffers", {f"{NET}.buffers": 64}),
    "uneven work and a barrier in each step": Plant("barrier", {**UNEVEN, f"{NET}.meets": "barrier"}, cure=UNEVEN),
    "uneven work and a log with `sync_dist` in each step": Plant(
        "sync_dist", {**UNEVEN, f"{NET}.meets": "log"}, cure=UNEVEN
    ),
}


def measure(*layers: Mapping[str, Any], seconds: float) -> Measurements:
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
        return Bench({2: words}, folder, Facts(keys=keys), True, time.monotonic() + seconds).measure()


def rate(measurements: Measurements) -> float:
    """Samples/s of whole epochs."""
    run, epoch = measurements.largest, measurements.facts.epoch
    steps = epoch.steps or 1
    return steps * run.samples / (steps * run.step + epoch.validation + epoch.checkpoints)


def row(name: str, seconds: float) -> list[str]:
    """Return a row of the page. A cause that is wrong is shown in bold."""
    plant = PLANTS[name]
    os.environ |= plant.variables
    measurements = measure(plant.values, seconds=seconds)
    causes = reasons(measurements)
    named = [
        reason.cause if any(word in reason.cause for word in (plant.word, *plant.also)) else f"**{reason.cause}**"
        for reason in causes
    ]
    if not causes or plant.word not in causes[0].cause:
        fraction = measurements.largest.rate / min(measurements.limits().values())
        healthy = name == "nothing" and not causes
        return [
            name,
            "; ".join(named) or ("nothing found" if healthy else "**nothing found**"),
            "",
            "",
            f"{fraction:.2f} of what the parts allow" if healthy else "",
        ]
    first = causes[0]
    for variable in plant.variables:
        if not first.values:
            del os.environ[variable]
    after = measure(*((plant.values, first.values) if first.values else (plant.cure,)), seconds=seconds)
    remedy = ", ".join(f"`{key}: {json.dumps(value)}`" for key, value in first.values.items()) or "without it"
    return [
        name,
        named[0],
        "; ".join(named[1:]),
        f"{first.gain:.2f}",
        f"{rate(after) / rate(measurements):.2f}, {remedy}",
    ]


def apart(name: str, seconds: float) -> list[str]:
    """Return the row from a process with the environment that the plant needs."""
    command = [sys.executable, str(HERE / "planted.py"), "--row", name, "--seconds", str(seconds)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    if name == "a link of 100 Mbit/s":
        shape = f"tc qdisc add dev lo root tbf rate {LINK} burst 256kb latency 1s"
        command = ["unshare", "-n", "sh", "-c", f'ip link set lo up mtu 1500 && {shape} && exec "$@"', "sh", *command]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "slow").mkdir()
        ended = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    cells: list[str] = json.loads(ended.stdout.rpartition("ROW ")[2])
    return cells


def main() -> None:
    """Measure all planted causes, or some, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", help="planted causes whose names contain one of these words; by default all"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement (default: %(default)s)")
    parser.add_argument(
        "--rows", type=Path, help="file that keeps each measured row; rows that it already has are not measured again"
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        print("ROW", json.dumps(row(options.row, options.seconds)))
        return
    kept: dict[str, list[str]] = {}
    if options.rows is not None and options.rows.exists():
        kept = {cells[0]: cells for cells in map(json.loads, options.rows.read_text().splitlines())}
    wanted = [name for name in PLANTS if not options.names or any(word in name for word in options.names)]
    for name in wanted:
        if name not in kept:
            began = time.monotonic()
            kept[name] = apart(name, options.seconds)
            print(f"{time.monotonic() - began:.0f} s:", kept[name], flush=True)
            if options.rows is not None:
                with options.rows.open("a") as file:
                    file.write(json.dumps(kept[name]) + "\n")
    heading = ["planted", "named first", "named as well", "gain predicted", "measured, and with which remedy"]
    if not options.names:
        report(HERE / "planted.md", "Planted causes of slowness", __doc__ or "", [heading, *map(kept.get, wanted)])


if __name__ == "__main__":
    main()
