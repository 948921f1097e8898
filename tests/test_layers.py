"""Who may import whom: the arrows of the design point down, and never in a circle."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.light
PACKAGE = ROOT / "cnnstrategies"
# What stands on what: each may import those after it, and not those before it.
LAYERS = (
    ("cli", "__main__"),
    ("commands",),
    ("callbacks", "cluster", "strategies", "classifier", "data"),
    ("planning",),
    ("pipeline", "paramserver"),
)


def modules() -> dict[str, Path]:
    """Those of the package, by name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, everything: set[str]) -> Iterator[str]:
    """The modules that one imports when it is imported itself, ours by their full names."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in everything else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def graph() -> dict[str, set[str]]:
    every = modules()
    return {name: set(imports(name, path, set(every))) for name, path in every.items()}


def test_no_modules_import_each_other_in_a_circle():
    every = modules()
    waiting = {name: {one for one in used if one in every and one != name} for name, used in graph().items()}
    while free := [name for name, used in waiting.items() if not used]:
        for name in free:
            del waiting[name]
        for used in waiting.values():
            used.difference_update(free)
    assert waiting == {}


def test_engines_know_nothing_of_lightning_or_of_what_stands_on_them():
    for name, used in graph().items():
        if name.startswith(("cnnstrategies.pipeline", "cnnstrategies.paramserver", "cnnstrategies.planning")):
            assert not [one for one in used if one.startswith("lightning")], name


def test_what_would_hold_the_default_group_is_imported_before_there_is_one():
    """torch imports it in an optimizer's first step; here Lightning has done so already, so no test run can tell."""
    assert "torch.distributed.nn.functional" in graph()["cnnstrategies.pipeline.transport"]


def test_arrows_point_down():
    level = {part: number for number, layer in enumerate(LAYERS) for part in layer}
    for name, used in graph().items():
        for one in used:
            above, below = (full.removeprefix("cnnstrategies.").split(".")[0] for full in (name, one))
            if one.startswith("cnnstrategies.") and above in level and below in level:
                assert level[above] <= level[below], f"{name} imports {one}"


def test_what_runs_asks_the_planner_in_one_place():
    """A pipeline's stages are chosen once, before it runs; what trains afterwards knows nothing of predictions."""
    running = ("cnnstrategies.strategies", "cnnstrategies.callbacks", "cnnstrategies.data", "cnnstrategies.classifier")
    asking = [
        name
        for name, used in graph().items()
        if name.startswith(running) and any(one.startswith("cnnstrategies.planning") for one in used)
    ]
    assert asking == ["cnnstrategies.strategies.hybrid_pipeline.layout"]


def test_what_benchmarks_and_examples_import_is_there():
    every = modules()
    missing = []
    for path in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cnnstrategies."):
                defined = names(every[node.module]) if node.module in every else set()
                for alias in node.names:
                    if alias.name not in defined and f"{node.module}.{alias.name}" not in every:
                        missing.append(f"{path.relative_to(ROOT)}: {node.module}.{alias.name}")
    assert missing == []


@functools.cache
def names(path: Path) -> set[str]:
    """What a module defines or imports, wherever it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
