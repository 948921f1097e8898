"""Imports of the package, and when they happen.

`[tool.importlinter]` in pyproject.toml says which modules may import which others.
"""

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import cnnstrategies
from tests.conftest import ROOT


def test_an_action_follows_the_import_of_a_module(monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("later").mkdir()
    Path("later/__init__.py").write_text("from later import inner\n")
    Path("later/inner.py").write_text("done = True\n")
    seen = []
    finder = cnnstrategies.AfterImport("later.inner", lambda: seen.append(sys.modules["later.inner"].done))
    sys.meta_path.insert(0, finder)
    assert seen == []
    importlib.import_module("later")
    assert seen == [True]
    assert finder not in sys.meta_path


def test_the_package_waits_for_lightning():
    program = "import sys, cnnstrategies; assert 'lightning' not in sys.modules; print(sys.meta_path[0].name)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout == "lightning.pytorch\n", run.stderr
    assert all(getattr(cnnstrategies, name).__name__.endswith(name) for name in cnnstrategies.__all__)


FIRST_IMPORTS = """
import importlib, os, sys
import torch
for name in ("data", "pretrained", "callbacks"):
    if (pid := os.fork()) == 0:
        importlib.import_module(f"cnnstrategies.{name}")
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit(f"cnnstrategies.{name} cannot be the first module that is imported")
"""


@pytest.mark.cluster  # Each part imports Lightning.
def test_a_part_of_the_package_can_be_imported_first():
    run = subprocess.run([sys.executable, "-c", FIRST_IMPORTS], capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stderr


def test_other_systems_than_linux_get_one_line_at_the_import(monkeypatch, capsys):
    monkeypatch.delenv(cnnstrategies.PRINTED, raising=False)
    for platform in ("linux", "darwin", "darwin"):  # The third import is that of a process that the second one starts.
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
        importlib.reload(cnnstrategies)
    (line,) = capsys.readouterr().err.splitlines()
    assert "tested on Linux only, and this is darwin: parameter_server" in line
    monkeypatch.delenv(cnnstrategies.PRINTED)


def test_the_transport_imports_the_torch_module_that_would_hold_the_default_group():
    """An optimizer's first step would import the module; in this process Lightning has imported it already."""
    held, ours = "torch.distributed.nn.functional", "cnnstrategies.pipeline.transport"
    for name in (held, ours):
        del sys.modules[name]
    importlib.import_module("torch.distributed")
    assert held not in sys.modules
    importlib.import_module(ours)
    assert held in sys.modules


def imported(program: Path) -> set[tuple[str, str]]:
    """Return pairs of a module of the package and a name that a program imports from the module."""
    return {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(program.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "cnnstrategies"
        for alias in node.names
    }


def is_there(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.util.find_spec(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


@pytest.mark.light
def test_benchmarks_and_examples_import_existing_names():
    programs = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]
    wanted = {(program, *import_) for program in programs for import_ in imported(program)}
    assert len(wanted) > 40
    assert [f"{program}: {module}.{name}" for program, module, name in wanted if not is_there(module, name)] == []
