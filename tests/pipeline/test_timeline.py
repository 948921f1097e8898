"""Timelines as pictures."""

from pathlib import Path

from matplotlib import image

from cnnstrategies.pipeline.timeline import Span, draw_timeline

SPANS = [
    Span(0, "forward", 0, 0, 10.0, 10.002),
    Span(0, "send", 0, 0, 10.002, 10.003),
    Span(1, "forward", 1, 0, 10.003, 10.005),
    Span(1, "backward", 1, 0, 10.005, 10.009),
    Span(0, "backward", 0, 0, 10.010, 10.014),
    Span(0, "reduce", 0, None, 10.013, 10.015),
]


def test_picture_is_a_png_that_grows_with_the_ranks(tmp_path: Path) -> None:
    draw_timeline(SPANS, tmp_path / "two.png", "two ranks")
    more = [Span(rank, "forward", 0, 0, 0.0, 1.0) for rank in range(8)]
    draw_timeline(more, tmp_path / "eight.png", "eight ranks")
    two, eight = image.imread(tmp_path / "two.png"), image.imread(tmp_path / "eight.png")
    assert two.shape[0] < eight.shape[0]
    assert two.shape[1] == eight.shape[1]
    blue = (abs(two[:, :, :3] - [0x4C / 255, 0x8B / 255, 0xF5 / 255]) < 0.02).all(axis=2)
    assert blue.mean() > 0.02
