"""The wheel, built from the source distribution, works in an environment that has nothing else of the repository."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

FEW = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.limit_val_batches=2"]
PARSED = """
import contextlib, io, sys
import cnnstrategies
from cnnstrategies.cli import main

assert cnnstrategies.__file__.startswith(sys.prefix), cnnstrategies.__file__
for line in sys.stdin.read().splitlines():
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
        main([*line.split("\\t"), "--print_config"])
    print("configured" if "class_path" in text.getvalue() else f"{line}: {text.getvalue()}")
"""


def run(*words, **options):
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": ""}, **options
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def built(folder):
    """Build the source distribution, and the wheel from its contents; return both files."""
    tracked = ("cnnstrategies", "pyproject.toml", "README.md", "LICENSE")
    tree = folder / "tree"
    for name in tracked:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        tree.mkdir(exist_ok=True)
        copy(ROOT / name, tree / name)
    for cache in tree.rglob("__pycache__"):
        shutil.rmtree(cache)
    build = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
    run(sys.executable, "-c", build, "build_sdist", str(folder), cwd=tree)
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "source", filter="data")
    (unpacked,) = (folder / "source").iterdir()
    run(sys.executable, "-c", build, "build_wheel", str(folder), cwd=unpacked)
    (wheel,) = folder.glob("*.whl")
    return source, wheel


def documented():
    """Return the arguments of `cnnstrategies fit` in the documentation that need no other files than the package's."""
    configs = {str(path.relative_to(ROOT / "configs").with_suffix("")) for path in (ROOT / "configs").rglob("*.yaml")}
    for page in sorted((ROOT / "docs").glob("*.md")):
        for line in re.findall(r"^cnnstrategies (fit --config .*[^\\])$", page.read_text(), re.MULTILINE):
            words = shlex.split(line, comments=True)
            named = [words[place + 1] for place, word in enumerate(words) if word == "--config"]
            if {*named} <= configs and not any(re.search("help|ckpt_path|my_project", word) for word in words):
                yield [word for word in words if word != "--print_config"]


@pytest.mark.cluster
@pytest.mark.warm
def test_the_wheel_runs_the_documented_commands(tmp_path):
    (tmp_path / "built").mkdir()
    source, wheel = built(tmp_path / "built")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith("cnnstrategies-")}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "cnnstrategies").rglob("*") if path.is_file()}
    assert names == {name for name in there if "__pycache__" not in name}
    for line in ("Operating System :: POSIX :: Linux", "Typing :: Typed", "Project-URL: Repository, "):
        assert line in metadata, metadata

    # The dependencies come from the environment that runs the tests, without its own installation of the package.
    empty = tmp_path / "empty"
    run(sys.executable, "-m", "venv", "--without-pip", str(empty))
    python, site = empty / "bin/python", sysconfig.get_path("purelib", vars={"base": str(empty)})
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel))
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    Path("elsewhere").mkdir()
    command = str(empty / "bin/cnnstrategies")
    assert run(command, "--version", cwd="elsewhere").split() == ["cnnstrategies", version()]
    assert source.name == f"cnnstrategies-{version()}.tar.gz"

    fits = [*documented()]
    assert len(fits) > 10
    lines = "\n".join("\t".join(words) for words in fits)
    answers = run(str(python), "-c", PARSED, input=lines, cwd="elsewhere").splitlines()
    assert [answer for answer in answers if answer != "configured"] == []
    assert len(answers) == len(fits)

    readme = re.findall(r"^cnnstrategies (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    for line in readme[-3:]:
        run(command, *line.split(), *(FEW if line.startswith("fit") else []), cwd="elsewhere")
    assert [*Path("elsewhere/runs/quickstart").glob("*/predictions.csv")]


def version():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.light
def test_the_version_and_the_address_stand_in_one_place():
    assert f"\nversion: {version()}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version()} (" in (ROOT / "CHANGELOG.md").read_text()
    addresses = {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"].values()}
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "cnnstrategies").rglob("*.py")):
        assert not any(address in page.read_text() for address in addresses), page
