"""``make test-gpu``: every check of checks.py, some 10 minutes on one GPU; writes the page that is its argument.

Without a GPU it is a rehearsal of the checks themselves, and writes nothing.
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
from checks import ALONE, ON_GPU, TOGETHER

LIMIT = 400  # Seconds of a check.
HEAD = """# On GPUs

`make test-gpu` has written this page: what was tried on {gpus}, and what came of it.

| check | | result |
| --- | --- | --- |
"""


def run(check: Callable[[], object]) -> tuple[list[tuple[str, str, str]], bool]:
    """What a check has found, and whether it has failed, in a process of its own."""
    start = time.monotonic()
    process = subprocess.run(
        ["timeout", str(LIMIT), sys.executable, Path(__file__).with_name("checks.py"), check.__name__],
        capture_output=True,
        text=True,
        check=False,
    )
    own = [json.loads(line) for line in process.stdout.splitlines() if line.startswith('["')]
    if process.returncode:
        print(process.stderr[-4000:])
        last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        own.append(["", f"FAILED: {last}"])
    for what, result in own:
        print(f"{check.__name__}: {what}: {result}", flush=True)
    print(f"{check.__name__}: {time.monotonic() - start:.0f} s", flush=True)
    return [(check.__name__, what, result) for what, result in own], bool(process.returncode)


def main() -> None:
    """Run them, those that are timed one after another; end with 1 where one has failed."""
    with ThreadPoolExecutor(len(TOGETHER) if ON_GPU else 1) as pool:
        ended = [*pool.map(run, TOGETHER), *map(run, ALONE)]
    rows = [row for own, _ in ended for row in own]
    if ON_GPU:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        text = HEAD.format(gpus=", ".join(names)) + "".join(f"| {' | '.join(row)} |\n" for row in rows)
        text += f"\ntorch {torch.__version__}, Python {platform.python_version()}, {datetime.date.today():%d %B %Y}.\n"
        Path(sys.argv[1]).write_text(text)
    sys.exit(any(failed for _, failed in ended))


if __name__ == "__main__":
    main()
