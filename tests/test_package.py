"""Importing the package is light, and registers its strategies with Lightning in whatever order the two come."""

import importlib
import subprocess
import sys
from pathlib import Path

import cnnstrategies


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
