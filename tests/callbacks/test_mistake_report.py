"""What is taken for what, and the worst mistakes, are the same however many processes look for them."""

import csv
import math
from pathlib import Path

import pytest
import torch
from PIL import Image

from cnnstrategies.callbacks import confusion, mistake_report, worst
from cnnstrategies.callbacks.worst import Mistakes

PROCESSES = {
    "one": ["--trainer.strategy=auto", "--trainer.devices=1"],
    "ddp": ["--trainer.strategy=ddp_fork", "--trainer.devices=2"],
    "pipeline": ["--trainer.strategy=HybridPipelineStrategy", "--trainer.strategy.start_method=fork",
                 "--trainer.strategy.stages=2", "--trainer.strategy.replicas=[2,1]", "--trainer.devices=3"],
}  # fmt: skip


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.mark.cluster  # It takes long.
def test_it_is_the_same_for_any_number_of_processes_and_is_drawn(run_cli, quick, monkeypatch):
    shown = []
    hardly = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=1", "--trainer.logger.init_args.name=trained"]
    code, output = run_cli("fit", *quick, *PROCESSES["one"], *hardly)
    assert code == 0, output
    trained = f"--ckpt_path={Path('runs/trained/version_0/checkpoints/last.ckpt').resolve()}"
    draw_confusion, draw_mistakes = confusion.draw_confusion, worst.draw_mistakes
    for name, words in PROCESSES.items():
        if name == "one":
            monkeypatch.setattr(mistake_report, "draw_confusion", draw_confusion)
            monkeypatch.setattr(mistake_report, "draw_mistakes", draw_mistakes)
        else:
            monkeypatch.setattr(mistake_report, "draw_confusion", lambda *_: None)
            monkeypatch.setattr(mistake_report, "draw_mistakes", lambda *_: None)
        code, output = run_cli(
            "validate",
            *quick,
            *words,
            trained,
            "--trainer.precision=64-true",
            f"--trainer.logger.init_args.name={name}",
        )
        assert code == 0, output
        folder = Path(f"runs/{name}/version_0")
        matrix, mistakes = rows(folder / "val_confusion.csv"), rows(folder / "val_mistakes.csv")
        counts = torch.tensor([[int(cell) for cell in row[1:]] for row in matrix[1:]])
        assert matrix[0] == ["true class", *map(str, range(10))]
        assert counts.sum() == 288, "each image once"
        wrong = int(counts.sum() - counts.diagonal().sum())
        assert f"{wrong} of 288 images" in output
        assert len(mistakes) == 1 + worst.MOST < wrong
        losses = [float(row[5]) for row in mistakes[1:]]
        assert losses == sorted(losses, reverse=True)
        assert all(math.exp(-float(row[5])) == pytest.approx(float(row[2]), abs=1e-4) for row in mistakes[1:])
        shown.append((matrix, [row[:2] + row[3:4] for row in mistakes]))
    assert all(one == shown[0] for one in shown)
    for picture in ("val_confusion.png", "val_mistakes.png"):
        with Image.open(Path("runs/one/version_0") / picture) as opened:
            assert min(opened.size) > 300


@pytest.mark.light
def test_pairs_are_counted_without_what_is_ignored():
    targets, predicted = torch.tensor([[0, 0, 1], [2, -1, 1]]), torch.tensor([[0, 1, 1], [0, 2, 1]])
    counts = confusion.count_pairs(predicted, targets, 3)
    assert counts.tolist() == [[1, 1, 0], [0, 2, 0], [1, 0, 0]]
    assert confusion.most_confused(counts, 5) == [(0, 1, 1), (2, 0, 1)]
    assert confusion.intersections_over_unions(counts) == pytest.approx([1 / 3, 2 / 3, 0])


@pytest.mark.light
def test_no_more_than_the_worst_are_kept_in_whatever_order_they_come():
    torch.manual_seed(0)
    logits, targets = torch.randn(90, 4).round(), torch.randint(4, (90,))  # Rounded: some are equal.
    found = []
    for order in (torch.arange(90), torch.randperm(90)):
        kept = Mistakes.none()
        for part in order.split(8):
            kept = kept.and_those(Mistakes.of_batch(part.tolist(), logits[part], targets[part]))
            assert len(kept.indices) <= worst.MOST
        found.append(kept)
    assert torch.equal(found[0].indices, found[1].indices)
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    losses[logits.argmax(dim=1) == targets] = 0
    torch.testing.assert_close(found[0].rows[:, 0], losses.sort(descending=True).values[: worst.MOST])


@pytest.mark.light
def test_of_labels_and_numbers_those_furthest_off_are_kept():
    torch.manual_seed(0)
    values, targets = torch.randn(90, 3).double(), torch.randint(2, (90, 3))
    kept = Mistakes.none()
    for part in torch.randperm(90).split(8):
        kept = kept.and_those(Mistakes.of_values(part.tolist(), values[part], targets[part]))
    off, column = (values - targets).abs().max(dim=1)
    worst_first = off.argsort(descending=True)[: worst.MOST]
    assert torch.equal(kept.indices, worst_first)
    places = (worst_first, column[worst_first])
    expected = torch.stack([off[worst_first], places[1], places[1], targets[places], values[places]], dim=1)
    torch.testing.assert_close(kept.rows, expected.float())
