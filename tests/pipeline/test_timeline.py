"""Timelines: the picture and the trace file."""

import itertools
import json
from pathlib import Path

import pytest
from matplotlib import image

from cnnstrategies.pipeline.timeline import Span, draw_timeline, write_trace

SPANS = [
    Span(0, "forward", 0, 0, 10.0, 10.002),
    Span(0, "send", 0, 0, 10.002, 10.003),
    Span(1, "forward", 1, 0, 10.003, 10.005),
    Span(1, "backward", 1, 0, 10.005, 10.009),
    Span(0, "backward", 0, 0, 10.010, 10.014),
    Span(0, "reduce", 0, None, 10.013, 10.015),
]


def test_trace_has_every_span_with_microseconds_from_the_start(tmp_path: Path) -> None:
    write_trace(SPANS, tmp_path / "trace.json", {1: "stage 1"})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(SPANS)
    assert spans[0]["name"] == "forward 0"
    assert spans[0]["ts"] == 0
    assert spans[3]["ts"] == pytest.approx(5000)
    assert spans[3]["dur"] == pytest.approx(4000)
    assert spans[3]["pid"] == 1
    assert spans[3]["args"] == {"stage": 1, "microbatch": 0}
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"rank 0", "stage 1"}
    for row in {(event["pid"], event["tid"]) for event in spans}:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == row)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(own)), "viewers drop overlaps"


def test_picture_is_a_png_that_grows_with_the_ranks(tmp_path: Path) -> None:
    draw_timeline(SPANS, tmp_path / "two.png", "two ranks")
    more = [Span(rank, "forward", 0, 0, 0.0, 1.0) for rank in range(8)]
    draw_timeline(more, tmp_path / "eight.png", "eight ranks")
    two, eight = image.imread(tmp_path / "two.png"), image.imread(tmp_path / "eight.png")
    assert two.shape[0] < eight.shape[0]
    assert two.shape[1] == eight.shape[1]
    blue = (abs(two[:, :, :3] - [0x4C / 255, 0x8B / 255, 0xF5 / 255]) < 0.02).all(axis=2)
    assert blue.mean() > 0.02


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 spans"):
        draw_timeline([], tmp_path / "empty.png", "empty")
    with pytest.raises(ValueError, match="unknown kind of span 'sleep': use one of forward, backward"):
        write_trace([Span(0, "sleep", 0, None, 0.0, 1.0)], tmp_path / "trace.json")
