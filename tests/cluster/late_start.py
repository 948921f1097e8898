"""Command line whose rank 0 waits for a file before it starts: ``python -m tests.cluster.late_start FILE fit ...``.

Each rank first creates an empty file, whose name contains the id of torchrun's launch and the rank.
"""

import os
import sys
import time
from pathlib import Path

from cnnstrategies import cli

if __name__ == "__main__":
    Path(f"started-{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['RANK']}").touch()
    file = Path(sys.argv.pop(1))
    while os.environ["RANK"] == "0" and not file.exists():
        time.sleep(0.1)
    cli.main()
