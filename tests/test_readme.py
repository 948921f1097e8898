"""The README's commands work in a directory that contains only files of the repository."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PREFIX = Path(sys.prefix)
TREE = ("cli.py", "cnnstrategies", "configs", "Makefile", "pyproject.toml", "constraints.txt")
FEW = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.limit_val_batches=2"]


def commands():
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def run(*words):
    ended = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.cluster
@pytest.mark.warm
def test_the_readmes_commands_work():
    for name in TREE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, name)
    lines = commands()
    assert lines[:2] == ["make quickstart", "make test"]

    # make uses the environment that runs the tests, where everything is installed.
    output = run("make", "-o", f"{PREFIX}/.installed", "quickstart", f"VENV={PREFIX}")
    accuracy = re.search(r"val_acc +([\d.]+) at the end", output)
    assert float(accuracy[1]) > 0.98
    assert Path("runs/quickstart/version_0/curves.png").is_file()

    rest = [shlex.split(line) for line in lines[2:] if line != "source .venv/bin/activate"]
    assert len(rest) == 6
    for name, *words in rest:
        few = FEW if "fit" in words else []
        run(sys.executable, str(PREFIX / "bin" / name), *words, *few)
    assert len(Path("runs/quickstart").glob("*/predictions.csv").__next__().read_text().splitlines()) == 360
