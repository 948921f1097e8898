"""The tables of names and texts that a run prints, and its line on memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from io import StringIO
from unittest.mock import patch

from cnnstrategies.callbacks import StartPanel, start_panel


def rows(output: str, title: str = "Training") -> dict[str, str]:
    """Return the texts of the table with that title, by row name; the lines of a text are joined by newlines."""
    lines = [line.rstrip() for line in output.splitlines()]
    assert lines.count(title) == 1, f"{lines.count(title)} tables {title!r} in:\n{output}"
    texts: dict[str, str] = {}
    last = ""
    for line in lines[lines.index(title) + 1 :]:
        if not line.startswith("  "):
            break
        name, _, text = line[2:].partition("  ")
        if name:
            texts[last := name] = text.strip()
        else:
            texts[last] += f"\n{text.strip()}"
    return texts


@contextmanager
def compared_peaks(counted: Callable[[], int], *factors: float) -> Iterator[tuple[list[StartPanel], list[str]]]:
    """Simulate a device that counts memory, for panels that compare the peak after two batches with the predicted one.

    The peak is predicted once, also for other callbacks that call `start_panel.predicted_memory`.

    Args:
        counted: Function that returns the real peak in bytes.
        factors: Multiple of the real peak that the device gives to each panel.

    Yields:
        The panels, which are callbacks of the run, and the lines that they print.
    """
    lines: list[str] = []
    multiples = iter(factors)
    with (
        patch.object(start_panel, "STEPS", 2),
        patch.object(start_panel, "predicted_memory", cache(start_panel.predicted_memory)),
        patch.object(start_panel, "counted_peak", lambda device: round(counted() * next(multiples))),
        patch.object(start_panel, "rank_zero_info", lines.append),
        redirect_stdout(StringIO()),
    ):
        yield [StartPanel() for _ in factors], lines


def line_on_memory(predicted: int, real: float) -> str:
    """Return the line of a panel of :func:`compared_peaks`, for a real peak that is larger than the predicted one."""
    more = f"{real / predicted - 1:.0%} more than the predicted {predicted / 1e6:,.0f} MB"
    return f"Peak memory of rank 0 after 2 batches: {round(real) / 1e6:,.0f} MB, {more}"
