"""The summary, the curves, samples/s and the step profile work together in one run on two processes."""

import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import picture_drawing, pictures, summary
from cnnstrategies.callbacks.pictures import log_pictures
from cnnstrategies.callbacks.summary import draw_curves, memory_in_words
from cnnstrategies.data import DigitsDataModule

DRAWING = {name: value for name, value in vars(picture_drawing).items() if name.startswith("draw_")}


def check_pictures(folder: Path, output: str, events: EventAccumulator) -> None:
    """Compare the pictures of a run on two processes with the answers of its best checkpoint in this process."""
    files = [*re.search(r"  pictures +((?:\S+\s+)*)", output)[1].split()]
    assert {Path(file).parent for file in files} == {folder}
    names = ["val_calibration.png", "val_classes.csv", "val_confusion_matrix.png", "val_mistakes.csv"]
    assert sorted(Path(file).name for file in files) == [*names, "val_mistakes.png"]
    for file in files:
        assert (Path(file).read_bytes()[:4] == b"\x89PNG") == file.endswith(".png")
    assert set(events.Tags()["images"]) == {f"pictures/{Path(file).stem}" for file in files if file.endswith(".png")}
    assert "pictures/val_classes/text_summary" in events.Tags()["tensors"]

    model = ImageClassifier.load_from_checkpoint(folder.parent / "checkpoints/best.ckpt", weights_only=True)
    data = DigitsDataModule()
    data.setup("validate")
    images, targets = data.val_source.fetch(list(range(len(data.val_source))))
    with torch.no_grad():
        probabilities = model.eval().network(data.eval_transform(images)).double().softmax(1)
    answers = probabilities.argmax(1)
    lines = [line.split(",") for line in (folder / "val_classes.csv").read_text().splitlines()[1:]]
    for label, line in enumerate(lines):
        right = int(((answers == label) & (targets == label)).sum())
        assert line[:3] == [str(label), str(int((targets == label).sum())), str(int((answers == label).sum()))]
        assert float(line[4]) == pytest.approx(right / int((targets == label).sum()), abs=1e-4)
    losses = -probabilities[torch.arange(len(targets)), targets].log()
    expected = {f"image {index}": losses[index] for index in (answers != targets).nonzero()[:, 0].tolist()}
    rows = [line.rsplit(",", 3) for line in (folder / "val_mistakes.csv").read_text().splitlines()[1:]]
    assert len(rows) == min(16, len(expected)) > 3
    for row, loss in zip(rows, sorted(expected.values(), reverse=True), strict=False):
        assert float(row[1]) == pytest.approx(float(loss), rel=1e-3)
        assert expected[row[0].split(",")[0]] == pytest.approx(float(row[1]), rel=1e-3)


def test_all_training_callbacks_work_together_in_one_run(run_cli, quick, monkeypatch):
    monkeypatch.setattr(summary, "draw_curves", draw_curves)
    monkeypatch.setattr(pictures, "log_pictures", log_pictures)
    for name, function in DRAWING.items():
        monkeypatch.setattr(picture_drawing, name, function)
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
    check_pictures(log_dir / "pictures", output, events)
    assert memory_in_words([2_000_000], gpus=True) == "2 MB of the GPU"
