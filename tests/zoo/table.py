"""Write the page of the zoo: the result of each network and module under each strategy."""

import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from examples import LIGHTLY, METRIC_LEARNING
from modules import TORCHGEO, UNCERTAINTY
from networks import NETWORKS
from trial import RESULTS, STRATEGIES

PACKAGES = (
    *("torch", "lightning", "torchvision", "timm", "torchgeo", "lightly", "torch-uncertainty"),
    *("segmentation-models-pytorch", "pytorch-metric-learning"),
)
TOTAL = sum(map(len, (NETWORKS, TORCHGEO, UNCERTAINTY, METRIC_LEARNING, LIGHTLY)))
HEAD = """# The zoo

Published networks and modules, each trained for two steps in float64 by [`verify`](../docs/verify.md) under four
strategies, on CPUs: **equal** to one device, **refused** with the line that a user reads, or **said** by the start
panel to differ.
`make test-zoo` makes this page; this one has {count} of the zoo's {total}, in {packages}.

{sums}

"""


def page() -> str:
    results = {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}
    lines = ["| strategy | equal | refused | said to differ |", "| --- | --- | --- | --- |"]
    for strategy in STRATEGIES:
        count = Counter(verdicts[strategy].split(":")[0] for verdicts in results.values())
        lines.append(f"| {strategy} | {count['equal']} | {count['refused']} | {count['said']} |")
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    text = HEAD.format(packages=packages, sums="\n".join(lines), count=len(results), total=TOTAL)
    text += f"| {len(results)} networks and modules | " + " | ".join(STRATEGIES) + " |\n"
    text += "| --- |" + " --- |" * len(STRATEGIES) + "\n"
    notes: dict[str, int] = {}
    for name, verdicts in results.items():
        cells = []
        for result in verdicts.values():
            kind, _, reason = result.partition(": ")
            note = notes.setdefault(reason.splitlines()[0], len(notes) + 1) if reason else 0
            cells.append(f"{kind} ({note})" if note else kind)
        text += f"| {name} | " + " | ".join(cells) + " |\n"
    return text + "\n" + "".join(f"{number}. {reason}\n" for reason, number in notes.items())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
