"""``make test-gpu``: every check of checks.py, some 20 minutes on one GPU; writes the page that is its argument.

Without a GPU it is a rehearsal of the checks themselves, and writes nothing.
"""

import datetime
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from checks import CHECKS, ON_GPU

LIMIT = 400  # Seconds of a check.
HEAD = """# On GPUs

`make test-gpu` has written this page: what was tried on {gpus}, and what came of it.

| check | | result |
| --- | --- | --- |
"""


def main() -> None:
    """Run them one after another; end with 1 where one has failed."""
    rows: list[tuple[str, str, str]] = []
    failed = False
    for check in CHECKS:
        start = time.monotonic()
        process = subprocess.run(
            ["timeout", str(LIMIT), sys.executable, Path(__file__).with_name("checks.py"), check.__name__],
            capture_output=True,
            text=True,
            check=False,
        )
        own = [json.loads(line) for line in process.stdout.splitlines() if line.startswith('["')]
        if process.returncode:
            failed = True
            print(process.stderr[-4000:])
            last = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
            own.append(["", f"FAILED: {last}"])
        rows += [(check.__name__, what, result) for what, result in own]
        for what, result in own:
            print(f"{check.__name__}: {what}: {result}", flush=True)
        print(f"{check.__name__}: {time.monotonic() - start:.0f} s", flush=True)
    if ON_GPU:
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        text = HEAD.format(gpus=", ".join(names)) + "".join(f"| {' | '.join(row)} |\n" for row in rows)
        text += f"\ntorch {torch.__version__}, Python {platform.python_version()}, {datetime.date.today():%d %B %Y}.\n"
        Path(sys.argv[1]).write_text(text)
    sys.exit(failed)


if __name__ == "__main__":
    main()
