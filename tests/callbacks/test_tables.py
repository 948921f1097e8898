"""What a table says can be copied from it."""

import pytest
from rich.console import Console

from cnnstrategies.callbacks import tables
from cnnstrategies.callbacks.tables import Whole, print_table, relative

LONG = Whole("/scratch/a user/" + "experiments/" * 8 + "version_0/checkpoints/best.ckpt")
ROWS = [("val_acc", "0.9 at the end, " + "and so on " * 10), ("checkpoint", LONG), ("curves", Whole("[c] d.png"))]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_path_is_whole_whatever_the_width(monkeypatch, capsys, terminal):
    monkeypatch.setattr(tables, "Console", lambda: Console(width=80, force_terminal=terminal, color_system=None))
    print_table("Training summary", ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert sum(LONG in line for line in lines) == 1
    assert sum("[c] d.png" in line for line in lines) == 1
    if terminal:
        assert f"checkpoint: {LONG}" in lines, "under the table"
        assert max(len(line) for line in lines if LONG not in line) <= 80


def test_paths_are_relative_to_where_one_is(tmp_path):
    assert relative(str(tmp_path / "runs/best.ckpt")) == "runs/best.ckpt"
    assert relative("s3://bucket/best.ckpt") == "s3://bucket/best.ckpt"
    assert isinstance(relative("/elsewhere/best.ckpt"), Whole)
