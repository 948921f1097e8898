"""PipeDream's published profiles: choices as theirs, but one that is explained, and speed-ups near the measured."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.light

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planning"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    """The benchmark."""
    spec = importlib.util.spec_from_file_location("published", FOLDER / "published.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", [0, 3, 4])  # A network each; all are in the page.
def test_choices_are_right_and_speed_ups_within_30_percent(published: ModuleType, number: int) -> None:
    anchor = published.ANCHORS[number]
    result = published.predict(anchor, FOLDER / "profiles")
    assert result.replicas == (anchor.ours or anchor.replicas)
    if anchor.gain is not None:
        assert result.asynchronous == pytest.approx(anchor.gain, rel=published.TOLERANCE)
