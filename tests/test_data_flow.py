"""The page of messages shows what runs send."""

import re
import runpy
from typing import Any

import pytest

from tests.conftest import ROOT

SCRIPT = ROOT / "docs/development/draw_flow.py"
PAGE = SCRIPT.with_name("data-flow.md").read_text()
DRAWN = dict(re.findall(r"^## (\w+)\n.*?^sequenceDiagram\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
SIMULATED = ["parameter_server", "parameter_server_async"]
TRAINED = ["ddp", "hybrid_pipeline", "spatial"]


@pytest.fixture(scope="module")
def drawing() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def check(drawing: dict[str, Any], name: str) -> None:
    """Compare a figure of the page with a new run. Messages that do not wait for each other may change places."""
    _, lines = drawing["FIGURES"][name]
    assert sorted(line.strip() for line in DRAWN[name].splitlines()) == sorted(lines()), f"run {SCRIPT}"


def test_all_figures_are_compared(drawing: dict[str, Any]) -> None:
    assert drawing["FIGURES"].keys() == DRAWN.keys() == {*SIMULATED, *TRAINED}


@pytest.mark.parametrize("name", SIMULATED)
def test_a_figure_shows_a_simulated_step(drawing: dict[str, Any], name: str) -> None:
    check(drawing, name)


@pytest.mark.cluster  # Starts processes three times.
@pytest.mark.parametrize("name", TRAINED)
def test_a_figure_shows_a_step_of_processes(drawing: dict[str, Any], name: str) -> None:
    check(drawing, name)
