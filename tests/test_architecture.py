"""The architecture page is right: the functions that it lists are called in the order in which it lists them."""

import ast
import importlib
import inspect
import pkgutil
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ImageClassifier
from cnnstrategies.paramserver.coordinator.coordinator import Coordinator
from cnnstrategies.paramserver.coordinator.places import PLACE, PlaceEvent, PlaceState
from cnnstrategies.paramserver.server.server import Server
from cnnstrategies.paramserver.server.synchronous import Synchronous
from cnnstrategies.paramserver.worker.worker import WorkerRole
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.parameter_server.step import Stepper
from tests.conftest import ROOT, quiet_trainer
from tests.paramserver.simulation import traces
from tests.paramserver.simulation.run import play

PAGE = (ROOT / "docs/development/architecture.md").read_text()
# The other numbers are those of today. They may fall, and do not rise.
MOST_ATTRIBUTES = {WorkerRole: 14, Server: 14, Synchronous: 12, Coordinator: 14, Stepper: 17}
MOST_FILES_OF_A_GRADIENT = 16  # A person who follows a gradient must be able to hold its path.
GLOSSARY = (ROOT / "docs/development/glossary.md").read_text()


def test_the_page_draws_the_floors_that_the_import_contract_checks() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    (drawing,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    lines = [re.split(r" {3,}", line)[0] for line in drawing.splitlines()]
    assert [line.split() for line in lines if line] == [layer.split(" : ") for layer in layers]


def listed_functions(title: str) -> list[str]:
    """Return the functions that a section of the page lists, in order."""
    (section,) = re.findall(rf"^#+ {title}\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"^\d+\. `([\w.]+)`", section, re.MULTILINE)


@contextmanager
def noting(wanted: list[str]) -> Iterator[list[str]]:
    """Yield a list that gets the calls of the wanted functions in this thread, in order, while the context is open."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            module = str(frame.f_globals.get("__name__", "")).removeprefix("cnnstrategies.")
            name = f"{module}.{frame.f_code.co_qualname}"
            if name in wanted:
                calls.append(name)

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@contextmanager
def crossing() -> Iterator[set[str]]:
    """Yield a set that gets the files of the package whose functions two steps of a parameter server call.

    Nothing is noted before the eleventh time that one of the two workers begins a step, and after the fifteenth time.
    So the files of the start and of the end of a run do not count.
    """
    files: set[str] = set()
    steps = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal steps
        module = str(frame.f_globals.get("__name__", ""))
        if event == "call" and module.startswith("cnnstrategies."):
            steps += frame.f_code.co_qualname == "WorkerRole.begin_step"
            if 11 <= steps < 15:
                files.add(module.removeprefix("cnnstrategies."))

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)


def check(wanted: list[str], calls: list[str]) -> None:
    """Check that each wanted function is called after the wanted function before it."""
    rest = iter(calls)
    for name in wanted:
        assert name in rest, f"{name} is not called after what stands before it, of {list(dict.fromkeys(calls))}"


class Notes(Callback):
    """Record the calls of rank 0 from the second batch on, and write them to a file."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1 and trainer.is_global_zero:
            self.noting = noting(listed_functions("The life of a batch"))
            self.calls = self.noting.__enter__()

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self.noting.__exit__(None, None, None)
            Path("calls").write_text("\n".join(self.calls))


def test_the_life_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
    strategy = HybridPipelineStrategy(replicas=[1, 1], cuts=["2"], microbatches=2, start_method="fork")
    trainer = quiet_trainer(strategy, 2, max_epochs=1, callbacks=Notes())
    data = TensorDataset(torch.randn(16, 3, 2, 2), torch.randint(2, (16,)))
    trainer.fit(ImageClassifier(network, 2, partial(torch.optim.SGD, lr=0.1)), DataLoader(data, 8))
    check(listed_functions("The life of a batch"), Path("calls").read_text().split())


def simulated(text: str) -> Callable[[], Any]:
    (trace,) = traces.read(text)
    return lambda: play(trace)


@pytest.mark.parametrize(
    ("title", "trace"),
    [
        ("The life of a gradient", "a step\n  data: servers 2, workers 2, replication 2\n  pace: 10\n"),
        (
            "The death of a server",
            "it is killed\n  control: workers 2, servers 2, survivable 1, restarts 1\n  pace: 10\n"
            "  0.5 s: kill server 0\n",
        ),
        (
            "The other servers and the workers",
            "it is killed\n  data: servers 2, workers 2, replication 2, restarts 1\n  pace: 10\n"
            "  0.5 s: kill server 0\n",
        ),
    ],
)
def test_the_steps_of_a_parameter_server_happen_in_the_listed_order(title: str, trace: str) -> None:
    run = simulated(trace)
    with noting(listed_functions(title)) as calls:
        outcome = run()
    assert outcome.violation is None
    check(listed_functions(title), calls)


def test_a_gradient_crosses_as_many_files_as_the_page_says() -> None:
    run = simulated("a step\n  data: servers 2, workers 2, replication 2\n  pace: 10\n")
    with crossing() as files:
        outcome = run()
    assert outcome.violation is None
    (stated,) = map(int, re.findall(r"functions of (\d+) files", PAGE))
    assert len(files) == stated <= MOST_FILES_OF_A_GRADIENT, sorted(files)


@pytest.mark.light
@pytest.mark.parametrize("role", MOST_ATTRIBUTES, ids=lambda role: role.__name__)
def test_a_role_has_few_attributes(role: type) -> None:
    tree = ast.parse(inspect.getsource(role))
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    attributes = {node.attr for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self"}
    assert len(attributes) <= MOST_ATTRIBUTES[role], sorted(attributes)


@pytest.mark.light
def test_the_drawings_of_states_are_made_from_the_tables() -> None:
    script = ROOT / "docs/development/draw_states.py"
    assert runpy.run_path(str(script))["page"]() == script.with_name("states.md").read_text(), f"run {script}"


@pytest.mark.light
def test_an_event_without_an_entry_is_an_error_that_names_the_state_and_the_event() -> None:
    with pytest.raises(RuntimeError, match="place of a member: the event goes cannot happen in the state lost, only"):
        PLACE.after(PlaceState.LOST, PlaceEvent.GOES)


@pytest.mark.light
def test_each_word_of_the_glossary_names_an_existing_file() -> None:
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| .+ \| `(.+?)` \|$", GLOSSARY, re.MULTILINE)
    assert rows
    assert len(rows) <= 45, "a reader cannot remember more words"
    missing = [path for _, path in rows if not (ROOT / "cnnstrategies" / path).exists()]
    assert not missing
    words = [word for word, _ in rows]
    assert words == sorted(words, key=str.lower)


@pytest.mark.light
def test_each_path_on_the_page_exists() -> None:
    """Paths begin with a package; other names in code type follow a path and are short for one."""
    packages = {path.stem for path in (ROOT / "cnnstrategies").iterdir()}
    paths = {text for text in re.findall(r"`([a-z_]+\.[\w.]+)`", PAGE) if text.split(".")[0] in packages}
    assert len(paths) > 50
    missing = []
    for path in sorted(paths):
        try:
            pkgutil.resolve_name(f"cnnstrategies.{path}")
        except (ImportError, AttributeError):
            missing.append(path)
    assert not missing


@pytest.mark.light
@pytest.mark.parametrize("package", ["pipeline", "strategies.hybrid_pipeline", "verifying"])
def test_the_head_of_a_package_names_each_file(package: str) -> None:
    module = importlib.import_module(f"cnnstrategies.{package}")
    named = set(re.findall(r"`(\w+)", module.__doc__ or ""))
    (folder,) = map(Path, module.__path__)
    missing = {file.stem for file in folder.glob("*.py")} - {"__init__"} - named
    assert not missing, f"give each file a place in the docstring of {folder / '__init__.py'}"
