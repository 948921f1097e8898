"""Importing the package is light, and registers its strategies with Lightning in whatever order the two come."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from conftest import ROOT

import cnnstrategies
from cnnstrategies._after_import import after_import


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
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == "cnnstrategies._after_import"]


def test_the_package_waits_for_lightning():
    program = "import sys, cnnstrategies; assert 'lightning' not in sys.modules; print(sys.meta_path[0]._name)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout == "lightning.pytorch\n", run.stderr
    assert all(getattr(cnnstrategies, name).__name__.endswith(name) for name in cnnstrategies.__all__)


def test_pip_and_uv_install_the_same_versions_from_the_public_index():
    locked = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    versions = {(package["name"], package.get("version")) for package in locked}
    pinned = re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {(re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in pinned}
    assert len(pinned) > 90
    assert pinned <= versions
    files = [file for package in locked for file in (*package.get("wheels", ()), package.get("sdist"))]
    assert {file["url"].split("/")[2] for file in files if file} == {"files.pythonhosted.org"}
    assert {package["source"].get("registry") for package in locked} == {"https://pypi.org/simple", None}
