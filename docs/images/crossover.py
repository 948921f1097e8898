"""Makes the table and the plot of docs/plan.md anew: what `cnnstrategies plan` says of VGG-16 on four machines.

python docs/images/crossover.py
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLANNING = ROOT / "benchmarks" / "planning"
PAGE = ROOT / "docs" / "plan.md"
WORDS = [
    *("--profile", str(PLANNING / "profiles" / "vgg16.csv"), "--profile_batch", "128", "--batch_per_device", "64"),
    *("--cluster", str(PLANNING / "cluster.yaml"), "--samples_per_epoch", "1281167"),
    *("--plot", str(ROOT / "docs" / "images" / "crossover.png")),
]


def main() -> None:
    """Plan, and put what is printed of the strategies into the page."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "cnnstrategies", "plan", *WORDS, "--write", "strategy.yaml"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
        made = subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    lines = [line.rstrip() for line in made.stdout.splitlines()]
    # Before the hybrid pipeline's stages: from the heading to the last note.
    last = max(index for index, line in enumerate(lines) if line.startswith("- "))
    table = "\n".join(line for line in lines[1 : last + 1])
    page = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(r"```\n strategy .*?```\n", re.DOTALL)
    assert len(pattern.findall(page)) == 1, f"{PAGE} has not one table of strategies"
    PAGE.write_text(pattern.sub(lambda _: f"```\n{table}\n```\n", page), encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
