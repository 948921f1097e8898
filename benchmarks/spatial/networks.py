"""Train published networks on divided images, and compare a step with one process's.

    make .venv-zoo/.installed VENV=.venv-zoo EXTRAS=test,zoo
    .venv-zoo/bin/python benchmarks/spatial/networks.py [--part 1/2] [--only unet]
    .venv-zoo/bin/python benchmarks/spatial/networks.py --page

A call tries the networks that have no result with the present engine, and keeps the results in build/divided. Parts can
run at the same time. `--page` writes networks.json and the page from all results.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks/pipeline")]

from ranks import report  # noqa: E402

from tests.zoo.divided_networks import COLUMNS, NETWORKS, ROWS  # noqa: E402
from tests.zoo.divided_step import CALM_TERM, COUNTS, SAMPLES, SEEDS, compare  # noqa: E402

RESULTS = ROOT / "build/divided"
PACKAGES = ("torch", "timm", "torchvision", "segmentation-models-pytorch", "torchgeo", "torch-uncertainty")
KINDS = {
    "segmentation": "segmentation",
    "classification": "classification without attention",
    "attention": "classification with attention",
}
ROUNDING = ("images", "layers", "order")
TEXT = """
A training step (forward, cross-entropy, backward) of published networks in float64, with {samples} images whose rows
are divided over two and over three ranks, beside the same step on one process. Batch normalisation uses the statistics
of the batch, and dropout is on. The networks are those of [the zoo](../zoo.md) and others of its packages, in
{packages}. Their weights are random, also where a network begins with zeros or ones, which would hide differences.
Images have {rows} x {columns} pixels, unless the table says something else. The ranks take turns in one process, so
messages are copies in memory.

{sums}

- *Parts*: the largest relative difference, on any rank, of the loss, of a parameter's gradient and of a buffer such as
  running statistics. Gradients are relative to the parameter's largest one, and at least to a thousandth of the
  network's largest one: in exact arithmetic, a bias before batch normalisation has the gradient zero. A difference of
  at most 1e-12 is called equal.
- *One process*: the largest difference of the same step on one process from itself, if only rounding is different: with
  other last bits of the images; with other last bits of the outputs and gradients of all layers; or with both, and the
  two images in the other order, without dropout. Each is tried up to {seeds} times, and only if the difference of the
  parts is larger than 1e-12 or the figure before.
- *Calm*: where the difference of the parts is larger than all these, the comparison is made again with batch
  normalisation that adds {term:.0f} to variances, in place of 1e-5, so that divisions by small numbers do not make
  rounding errors large.
- A difference is called *rounding* if it is not larger than a difference of one process from itself, in the network or
  in the calm network. A difference of the calm network of at most 1e-12 counts as well.
- *Whole*: operations that needed all rows on all ranks. Layers with fewer than two rows for each rank are whole as
  well, and are not listed.

{errors}
"""


def engine() -> str:
    """Return the last commit that has changed the engine."""
    command = ["git", "-C", ROOT, "log", "-1", "--format=%h", "--", "cnnstrategies/spatial"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def measure(names: Iterable[str], is_new: bool) -> None:
    """Try networks, and keep the results.

    Args:
        names: Names of the networks.
        is_new: Whether networks that have a result are tried again.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    commit = engine()
    for name in names:
        file = RESULTS / f"{name}.json"
        if not is_new and file.exists() and json.loads(file.read_text())["engine"] == commit:
            continue
        start = time.process_time()
        result = compare(NETWORKS[name])
        gc.collect()
        seconds = round(time.process_time() - start, 1)
        result |= {"engine": commit, "seconds": seconds}
        file.write_text(json.dumps(result))
        print(name, result, flush=True)


def write_page() -> None:
    """Write the results of all networks, and the page."""
    results = {name: json.loads(file.read_text()) for name in NETWORKS if (file := RESULTS / f"{name}.json").exists()}
    lines = [f"{json.dumps(name)}: {json.dumps(result)}" for name, result in sorted(results.items())]
    Path(__file__).with_suffix(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    text = TEXT.format(
        samples=SAMPLES,
        rows=ROWS,
        columns=COLUMNS,
        packages=", ".join(f"{package} {version(package)}" for package in PACKAGES),
        sums="\n".join(_sums(results)),
        seeds=SEEDS,
        term=CALM_TERM,
        errors="\n".join(_errors(results)) or "No network is refused, and no difference is larger than rounding.",
    )
    heading = [
        "network",
        *(f"{count} parts" for count in COUNTS),
        "one process: images",
        "layers",
        "order",
        "calm",
        "whole",
    ]
    rows = [
        _row(name, results[name])
        for kind in KINDS
        for name in sorted(results)
        if NETWORKS[name].kind == kind
    ]  # fmt: skip
    report(Path(__file__).with_suffix(".md"), "Published networks with divided images", text, [heading, *rows])


def _sums(results: Mapping[str, Any]) -> list[str]:
    """Return a table with the numbers of networks by kind and verdict."""
    lines = [
        "| networks | parts | number | equal to 1e-12 | rounding | refused | larger |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, title in KINDS.items():
        for count in map(str, COUNTS):
            verdicts = Counter(
                result["parts"][count]["verdict"] for name, result in results.items() if NETWORKS[name].kind == kind
            )
            numbers = (verdicts[verdict] for verdict in ("equal", "rounding", "refused"))
            others = verdicts["different"] + verdicts["failed"]
            lines.append(
                f"| {title} | {count} | {verdicts.total()} | " + " | ".join(map(str, numbers)) + f" | {others} |"
            )
    engines = Counter(result["engine"] for result in results.values())
    commits = ", ".join(f"{commit} ({number})" for commit, number in engines.most_common())
    return [*lines, "", f"The networks were tried with the engine of these commits: {commits}."]


def _errors(results: Mapping[str, Any]) -> list[str]:
    """Return a line for each message of a refusal or a fault."""
    lines: dict[str, list[str]] = {}
    for name, result in results.items():
        for count, part in result["parts"].items():
            if "error" in part or part["verdict"] == "different":
                error = part.get("error", "larger than the rounding errors that were tried")
                lines.setdefault(error, []).append(f"{name} in {count} parts")
    return [f"- {', '.join(names)}: {error}" for error, names in lines.items()]


def _row(name: str, result: Mapping[str, Any]) -> list[str]:
    """Return a network's row of the table."""
    rows, columns = NETWORKS[name].shape
    title = name if (rows, columns) == (ROWS, COLUMNS) else f"{name}, {rows} x {columns}"
    parts = [result["parts"][str(count)] for count in COUNTS]
    cells = [_figure(part["largest"]) if "largest" in part else part["verdict"] for part in parts]
    labels = {"rounding": " (rounding)", "different": " (larger)"}
    cells = [cell + labels.get(part["verdict"], "") for cell, part in zip(cells, parts, strict=True)]
    noise = [_figure(result["noise"][kind]) for kind in ROUNDING]
    calm = max((part.get("largest", 0.0) for part in (result["calm"] or {"parts": {}})["parts"].values()), default=0.0)
    whole = sorted({operation for part in parts for operation in part.get("gathered", [])})
    return [title, *cells, *noise, _figure(calm), ", ".join(f"`{operation}`" for operation in whole)]


def _seconds(name: str) -> float:
    """Return the processor time of a network's last result, so that long ones come last."""
    file = RESULTS / f"{name}.json"
    return float(json.loads(file.read_text())["seconds"]) if file.exists() else 0.0


def _figure(difference: float) -> str:
    return f"{difference:.1e}" if difference else "-"


def main() -> None:
    """Try networks, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1", help="for example 2/3: every third network from the second on")
    parser.add_argument("--only", default="", help="text that the networks' names contain")
    parser.add_argument("--kind", default="", choices=["", *KINDS])
    parser.add_argument("--again", action="store_true", help="also try networks that have a result")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    options = parser.parse_args()
    if options.page:
        write_page()
        return
    part, parts = map(int, options.part.split("/"))
    names = [name for name in NETWORKS if options.only in name and options.kind in ("", NETWORKS[name].kind)]
    measure(sorted(names[part - 1 :: parts], key=_seconds), options.again)


if __name__ == "__main__":
    main()
