"""Importing the package is light, and registers its strategies with Lightning in whatever order the two come."""

import importlib
import subprocess
import sys
from pathlib import Path

import cnnstrategies
from cnnstrategies.runtime.import_hooks import after_import


def test_an_action_follows_the_import_of_a_module(monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("later").mkdir()
    Path("later/__init__.py").write_text("from later import inner\n")
    Path("later/inner.py").write_text("done = True\n")
    seen = []
    after_import("later.inner", lambda: seen.append(sys.modules["later.inner"].done))
    assert seen == []
    importlib.import_module("later")
    assert seen == [True]
    after_import("later.inner", lambda: seen.append("at once"))
    assert seen == [True, "at once"]
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == "cnnstrategies.runtime.import_hooks"]


def test_the_package_waits_for_lightning():
    program = "import sys, cnnstrategies; assert 'lightning' not in sys.modules; print(sys.meta_path[0].name)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout == "lightning.pytorch\n", run.stderr
    assert all(getattr(cnnstrategies, name).__name__.endswith(name) for name in cnnstrategies.__all__)
