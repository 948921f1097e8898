"""The front page's charts, the wide one and that for phones, show what the pages of the benchmarks say."""

import re
import runpy

import pytest
from conftest import ROOT

pytestmark = pytest.mark.light


def test_the_chart_has_the_measured_numbers() -> None:
    measured = list(runpy.run_path(str(ROOT / "docs/images/front.py"))["measured"]())
    assert len(measured) > 5
    for picture in ("results.svg", "results_narrow.svg"):
        shown = re.findall(r">([^<>]+)</text>", (ROOT / "docs/images" / picture).read_text())
        for name, value in measured:
            assert name in shown
            assert f"{value:.3g}" in shown
