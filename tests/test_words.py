"""The check of docstrings, comments, messages and names finds each kind of fault, and no fault in a clean file."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

CHECK = ROOT / "docs/development/check_words.py"
SAMPLE = ROOT / "docs/development/sample_words.py"
CLEAN = '''"""Samples of a rank."""


class Sampler:
    """Draws samples; there is no longer any order."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks  # One for each device.

    def draw(self, *rest: int) -> list[int]:
        """Return the ranks' samples."""
        if not self.ranks:
            raise ValueError(f"ranks={self.ranks}: a sampler needs at least 1 rank")
        return [rank for rank in range(self.ranks)]
'''

pytestmark = pytest.mark.light


def run(script: Path, folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, script, *arguments], cwd=folder, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def package(folder: Path, **files: str) -> Path:
    (folder / "cnnstrategies").mkdir()
    for name, text in files.items():
        (folder / "cnnstrategies" / f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('"""What a rank draws."""\n', '1: docstring begins with "What"'),
        ('x = 1\n\n\ndef f():\n    """Whose."""\n', '5: docstring begins with "Whose"'),
        ('class A:\n    """In whose\n    lines."""\n', '2: docstring begins with "In whose"'),
        ('"""A rank that is\nno member."""\n', '1: "is no" instead of "is not a"'),
        ("x = 1\n# Ranks that are\n# no members.\n", '2: "are no" instead of "are not a"'),
        ('raise ValueError(f"{x} is no number")\n', '1: "is no" instead of "is not a"'),
        ("one = 1\n", '1: name "one"'),
        ("for own in ranks:\n    pass\n", '1: name "own"'),
        ("x = [found for found in ranks]\n", '1: name "found"'),
        ("if (said := x):\n    pass\n", '1: name "said"'),
        ("with x as told:\n    pass\n", '1: name "told"'),
        ("try:\n    pass\nexcept ValueError as given:\n    pass\n", '3: name "given"'),
        ("def f(a, *, who=1):\n    pass\n", '1: name "who"'),
        ("f = lambda those: 1\n", '1: name "those"'),
        ("def f(self):\n    self._came = 1\n", '2: name "came"'),
        ("match x:\n    case [1, *met]:\n        pass\n", '2: name "met"'),
        ("import numpy as they\n", '1: name "they"'),
        ("x = isinstance(trainer.strategy, DDPStrategy)\n", "1: strategy asked without facts_of"),
        ("x = getattr(strategy, 'traffic', None)\n", "1: strategy asked without facts_of"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, text: str, fault: str) -> None:
    code, output = run(CHECK, package(tmp_path, faulty=text, clean=CLEAN), "--exceptions", "none")
    assert code == 1
    assert output.startswith(f"cnnstrategies/faulty.py:{fault}: ")
    assert output.count("\n") == 1


def test_a_class_name_that_is_used_twice_is_found(tmp_path: Path) -> None:
    code, output = run(
        CHECK, package(tmp_path, clean=CLEAN, other="class Sampler:\n    pass\n"), "--exceptions", "none"
    )
    assert code == 1
    assert output.count('class name "Sampler" used 2 times') == 2


def test_a_clean_file_has_no_faults(tmp_path: Path) -> None:
    assert run(CHECK, package(tmp_path, clean=CLEAN), "--exceptions", "none") == (
        0,
        "Words: no faults in 1 files (0 exceptions).\n",
    )


def test_a_configurations_strategy_and_the_interface_itself_may_be_looked_at(tmp_path: Path) -> None:
    folder = package(tmp_path, clean="x = isinstance(config.strategy, str) or getattr(strategy, 'init_args', None)\n")
    (folder / "cnnstrategies/strategies").mkdir()
    (folder / "cnnstrategies/strategies/protocol.py").write_text("x = isinstance(strategy, DDPStrategy)\n")
    assert run(CHECK, folder, "--exceptions", "none")[0] == 0


def test_exceptions_only_shrink(tmp_path: Path) -> None:
    package(tmp_path, clean=CLEAN, faulty="one = 1\n")
    listed = tmp_path / "exceptions.txt"
    listed.write_text("# A list.\ncnnstrategies/clean.py\ncnnstrategies/faulty.py\n")
    code, output = run(CHECK, tmp_path, "--exceptions", "exceptions.txt")
    assert code == 1
    assert "cnnstrategies/clean.py has no faults any more" in output
    assert "faulty.py:" not in output
    code, output = run(CHECK, tmp_path, "--exceptions", "exceptions.txt", "--shrink")
    assert code == 0
    assert listed.read_text() == "# A list.\ncnnstrategies/faulty.py\n"
    assert run(CHECK, tmp_path, "--exceptions", "exceptions.txt")[0] == 0
    listed.write_text("cnnstrategies/\n")
    assert run(CHECK, tmp_path, "--exceptions", "exceptions.txt")[0] == 0
    assert run(CHECK, tmp_path, "cnnstrategies/faulty.py")[0] == 1


def test_a_sample_shows_each_text_with_its_code(tmp_path: Path) -> None:
    folder = package(tmp_path, clean=CLEAN, losses="# Left out.\nx = 1\n")
    _, output = run(SAMPLE, folder, "--docstrings", "3")
    assert "# 3 of 3 docstrings" in output
    assert 'clean.py:11\ndef draw(self, *rest: int) -> list[int]:\n        """Return the ranks\' samples."""' in output
    assert "clean.py:8\n        self.ranks = ranks  # One for each device.\n" in output
    assert "clean.py:13\n            raise ValueError(f" in output
    assert run(SAMPLE, folder, "--docstrings", "3")[1] == output
