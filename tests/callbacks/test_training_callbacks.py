"""The summary, the curves, samples/s and the step profile work together in one run on two processes."""

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cnnstrategies.callbacks import summary
from cnnstrategies.callbacks.summary import draw_curves, memory_in_words


def test_all_training_callbacks_work_together_in_one_run(run_cli, quick, monkeypatch):
    monkeypatch.setattr(summary, "draw_curves", draw_curves)
    code, output = run_cli(
        "fit",
        *quick,
        "--trainer.max_epochs=2",
        "--trainer.limit_train_batches=8",
        "--trainer.callbacks+=StepProfile",
        "--trainer.callbacks.skip_first=3",
        "--trainer.callbacks.steps=10",
    )
    assert code == 0, output
    log_dir = Path("runs/quickstart/version_0")

    held = re.search(r"peak memory +(\d+) to (\d+) MB of 2 processes", output).groups()
    assert all(50 < int(megabytes) < 20_000 for megabytes in held)

    table = output[output.index("Time of 10 training steps by part") :]
    parts = {
        part: re.search(rf"{part} +│ +([\d.]+) │ +([\d.]+) │ +([\d.]+)", table) for part in ("communication", "step")
    }
    ms = {part: [float(figure) for figure in match.groups()] for part, match in parts.items()}
    assert all(0 < least <= mean + 0.01 <= most + 0.02 for mean, least, most in ms.values())
    assert ms["communication"][0] < ms["step"][0]

    events = EventAccumulator(str(log_dir))
    events.Reload()
    assert len(events.Scalars("samples_per_s")) == 2
    assert all(event.value > 0 for event in events.Scalars("samples_per_s"))
    assert events.Scalars("profile/step_ms")[0].value == pytest.approx(ms["step"][0], abs=0.01)
    assert (log_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert memory_in_words([2_000_000], gpus=True) == "2 MB of the GPU"
