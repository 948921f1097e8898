"""Write the page of the zoo: the result of each network and module under each strategy."""

import json
import re
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from tests.zoo.detectors import DETECTORS
from tests.zoo.examples import LIGHTLY, METRIC_LEARNING
from tests.zoo.medical import MONAI
from tests.zoo.modules import TORCHGEO, UNCERTAINTY
from tests.zoo.networks import NETWORKS
from tests.zoo.refusals import REFUSED
from tests.zoo.trial import RESULTS, STRATEGIES
from tests.zoo.vision_models import DETR, MODELS

PACKAGES = (
    *("torch", "lightning", "torchvision", "timm", "torchgeo", "lightly", "torch-uncertainty"),
    *("segmentation-models-pytorch", "pytorch-metric-learning", "monai", "transformers"),
)
TOTAL = sum(map(len, (NETWORKS, DETECTORS, TORCHGEO, UNCERTAINTY, METRIC_LEARNING, LIGHTLY, MONAI, MODELS, [DETR])))
BEFORE = "on an earlier page"
HEAD = """# The zoo

Published networks and modules, each trained for two steps in float64 by [`verify`](../docs/verify.md) under four
strategies, on CPUs: **equal** to one device, **refused** with the line that a user reads, or **said** by the start
panel to differ. Pipelines divide what they choose themselves, and of detectors `model.backbone`, as the option
`submodule` says.
`make test-zoo` makes this page; this one has {count} of the zoo's {total}, in {packages}.
Each row of the first table says on which day and with which commit its column was measured, and for how many entries.
A dash stands for an entry that was not tried with the present form of the strategy.

{sums}

"""
REASONS = """
## Why these are refused

"""


def published(page: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return the results in a page of the zoo, by entry and strategy. The page has the days of all entries together."""
    notes = dict(re.findall(r"^(\d+)\. (.*)$", page, re.MULTILINE))
    results: dict[str, dict[str, dict[str, str]]] = {}
    for name, *cells in re.findall(r"^\| (\w+\..*?)" + r" \| (.*?)" * len(STRATEGIES) + r" \|$", page, re.MULTILINE):
        for strategy, cell in zip(STRATEGIES, cells, strict=True):
            kind, _, note = cell.rstrip(")").partition(" (")
            if kind != "-":
                verdict = f"{kind}: {notes[note]}" if note else kind
                results.setdefault(name, {})[strategy] = {"result": verdict, "measured": BEFORE}
    return results


def days_of(page: str, strategy: str) -> str:
    """Return the days and commits of a strategy's results in a page of the zoo, each with a number of entries."""
    row = re.search(rf"^\| {re.escape(strategy)} \|.*\| (.*) \|$", page, re.MULTILINE)
    return row[1] if row else ""


def page(earlier: str) -> str:
    """Return the page with the results of this machine, and those of an earlier page for all other entries."""
    results = published(earlier)
    for file in RESULTS.glob("*.json"):
        results[file.stem] = results.get(file.stem, {}) | json.loads(file.read_text())
    results = dict(sorted(results.items()))
    lines = ["| strategy | equal | refused | said to differ | measured |", "| --- | --- | --- | --- | --- |"]
    for strategy in STRATEGIES:
        tried = [verdicts[strategy] for verdicts in results.values() if strategy in verdicts]
        count = Counter(verdict["result"].split(":")[0] for verdict in tried)
        measured = Counter(verdict["measured"] for verdict in tried)
        kept, days = measured.pop(BEFORE, 0), days_of(earlier, strategy)
        parts = [f"{time} ({entries})" for time, entries in sorted(measured.items())]
        if kept:
            # If entries of the earlier page were measured again, its days no longer belong to known entries.
            is_complete = sum(map(int, re.findall(r"\((\d+)\)", days))) == kept
            parts.insert(0, days if is_complete else f"{BEFORE} ({kept})")
        times = "; ".join(parts)
        lines.append(f"| {strategy} | {count['equal']} | {count['refused']} | {count['said']} | {times} |")
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    text = HEAD.format(packages=packages, sums="\n".join(lines), count=len(results), total=TOTAL)
    text += f"| {len(results)} networks and modules | " + " | ".join(STRATEGIES) + " |\n"
    text += "| --- |" + " --- |" * len(STRATEGIES) + "\n"
    notes: dict[str, int] = {}
    for name, verdicts in results.items():
        cells = []
        for strategy in STRATEGIES:
            verdict = verdicts.get(strategy, {"result": "-"})
            kind, _, reason = verdict["result"].partition(": ")
            note = notes.setdefault(reason.splitlines()[0], len(notes) + 1) if reason else 0
            cells.append(f"{kind} ({note})" if note else kind)
        text += f"| {name} | " + " | ".join(cells) + " |\n"
    text += "\n" + "".join(f"{number}. {reason}\n" for reason, number in notes.items())
    reasons = (f"- {strategy}, {name}: {why}\n" for strategy, names in REFUSED.items() for name, why in names.items())
    return text + REASONS + "".join(reasons)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text() if path.exists() else ""))
