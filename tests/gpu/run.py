"""``make test-gpu``: run every check of checks.py and write the results to the page that is the argument.

The checks take about 10 minutes on one GPU. Without a GPU they run as a rehearsal on the CPU, and no page is written.
"""

import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.gpu.checks import ALONE, ON_GPU, TOGETHER

# Time limit of a check in seconds. A rehearsal runs the cases of a check one after the other, on fewer cores.
LIMIT = 400 if ON_GPU else 3600
HEAD = """# On GPUs

`make test-gpu` has written this page: what was tried on {gpus}, and what came of it.

**Please send the page of your GPUs.** Run `make test-gpu` in a checkout. It takes about 10 minutes and writes this
file. Open a pull request with the file, or an issue with its text, whether or not all checks have passed. Runs on two
or more cards are missing altogether.

| check | | result |
| --- | --- | --- |
"""


def run(check: Callable[[], object]) -> tuple[list[tuple[str, str, str]], bool]:
    """Run a check in a process of its own; return its rows of the page, and whether it has failed."""
    start = time.monotonic()
    process = subprocess.run(
        ["timeout", str(LIMIT), sys.executable, "-m", "tests.gpu.checks", check.__name__],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [json.loads(line) for line in process.stdout.splitlines() if line.startswith('["')]
    if process.returncode:
        print(process.stderr[-4000:])
        last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        rows.append(["", f"FAILED: {last}"])
    for description, result in rows:
        print(f"{check.__name__}: {description}: {result}", flush=True)
    print(f"{check.__name__}: {time.monotonic() - start:.0f} s", flush=True)
    return [(check.__name__, description, result) for description, result in rows], bool(process.returncode)


def main() -> None:
    """Run all checks, timed checks one after another, and exit with code 1 if a check has failed."""
    with ThreadPoolExecutor(len(TOGETHER) if ON_GPU else 1) as pool:
        ended = [*pool.map(run, TOGETHER), *map(run, ALONE)]
    rows = [row for rows_of_check, _ in ended for row in rows_of_check]
    if ON_GPU:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        text = HEAD.format(gpus=", ".join(names)) + "".join(f"| {' | '.join(row)} |\n" for row in rows)
        text += f"\ntorch {torch.__version__}, Python {platform.python_version()}, {datetime.date.today():%d %B %Y}.\n"
        Path(sys.argv[1]).write_text(text)
    sys.exit(any(failed for _, failed in ended))


if __name__ == "__main__":
    main()
