"""The timeline of a run has every task of the recorded steps on every rank, and nothing of the others."""

import json
from pathlib import Path

import pytest

from cnnstrategies.callbacks import PipelineTimeline
from cnnstrategies.errors import ConfigurationError

TIMELINE = ["--trainer.callbacks+=PipelineTimeline", "--trainer.callbacks.skip_first=2", "--trainer.callbacks.steps=2"]


def test_has_every_task_of_the_recorded_steps(run_cli, quick):
    pipeline = [
        "--trainer.strategy=HybridPipelineStrategy",
        "--trainer.strategy.init_args.start_method=fork",
        "--trainer.strategy.init_args.microbatches=3",
        "--trainer.strategy.init_args.cuts=[pool1]",
    ]
    limits = ["--trainer.max_steps=6", "--trainer.limit_val_batches=1"]
    code, output = run_cli("fit", *quick, *pipeline, *limits, *TIMELINE)
    assert code == 0, output
    folder = Path("runs/quickstart/version_0")
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = [e for e in json.loads((folder / "timeline.json").read_text())["traceEvents"] if e["ph"] == "X"]
    for rank in (0, 1):
        tasks = sorted(e["name"] for e in events if e["pid"] == rank and e["cat"] in ("forward", "backward"))
        assert tasks == sorted(2 * [f"{kind} {m}" for kind in ("forward", "backward") for m in range(3)])


def test_another_strategy_is_refused(run_cli, quick):
    code, output = run_cli("fit", *quick, "--trainer.devices=1", "--trainer.strategy=auto", *TIMELINE)
    assert code == 2
    assert "use strategy hybrid_pipeline" in output.splitlines()[-1]


@pytest.mark.parametrize("options", [{"skip_first": -1}, {"steps": 0}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))}="):
        PipelineTimeline(**options)
