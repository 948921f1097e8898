"""Predictions of all ranks are gathered completely, and are written as a whole or not at all."""

import csv
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.callbacks import PredictionWriter, predictions
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.data.image_folder import images_of_folder
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_ranks


class Strategy:
    root_device = torch.device("cpu")
    world_size = 3

    def all_gather(self, values):
        gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, values)
        return torch.stack(gathered)


def gathered(counts):
    run = SimpleNamespace(strategy=Strategy(), world_size=3)
    first = sum(counts[: dist.get_rank()])
    indices = torch.arange(first, first + counts[dist.get_rank()])
    return [predictions.gather_rows(run, rows) for rows in (indices, indices[:, None] * torch.ones(1, 2))]


def test_ranks_with_different_numbers_of_rows_give_all_rows():
    for counts in ([9, 0, 5], [0, 0, 0]):
        for indices, rows in run_ranks(3, gathered, counts):
            assert sorted(indices.tolist()) == list(range(sum(counts)))
            assert torch.equal(rows, indices[:, None].expand(-1, 2).float())


def test_a_full_disk_leaves_the_old_predictions_or_none():
    """The test limits the size of files: beyond the limit the system refuses writes, as on a full disk."""
    trainer, writer = SimpleNamespace(world_size=1, is_global_zero=True), PredictionWriter(output=Path("rows.csv"))

    def write(rows):
        outputs = {"index": torch.arange(rows), "probabilities": torch.full((rows, 2), 0.5)}
        writer.on_predict_batch_end(trainer, None, outputs, None, 0)
        writer.on_predict_epoch_end(trainer, None)

    write(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with pytest.raises(ConfigurationError, match=r"^cannot write rows.csv: File too large; free some space, or set"):
        write(200)
    assert [len(path.read_text().splitlines()) for path in Path().iterdir()] == [1 + 2]


def test_the_users_images_are_preprocessed_like_validation_images():
    """Folders may be nested, and images may have any size and colour.

    Files of validation images have the same predictions as the validation images.
    """
    torch.manual_seed(0)
    model = ImageClassifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10)
    data = DigitsDataModule(batch_size=4)
    data.setup("validate")
    for index, name in enumerate(("b.png", "a/c.png", "a/.hidden.png", "a/d.PNG", "large.png")):
        file = Path("mine", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(data.val_source.images[index, 0].numpy())
        (picture.convert("RGB").resize((40, 24)) if name == "large.png" else picture).save(file)
    writer = PredictionWriter(Path("found.csv"), images=Path("mine"))
    quiet_trainer(callbacks=[writer]).predict(model, data)
    with open("found.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["sample", "class", "probability", *(f"p({name})" for name in range(10))]
    assert [row[0] for row in rows] == ["a/c.png", "a/d.PNG", "b.png", "large.png"]
    with torch.no_grad():
        expected = model.network(data.eval_transform(data.val_source.images[[1, 3, 0]])).softmax(dim=1)
    for row, probabilities in zip(rows, expected, strict=False):
        assert row[1] == str(int(probabilities.argmax()))
        assert list(map(float, row[2:])) == pytest.approx([max(values := probabilities.tolist()), *values], abs=1e-6)


@pytest.mark.light
def test_labels_in_place_of_indices_are_refused():
    trainer, writer = SimpleNamespace(world_size=1, is_global_zero=True), PredictionWriter(output=Path("rows.csv"))
    outputs = {"index": torch.tensor([0, 1, 1, 0, 1]), "probabilities": torch.full((5, 2), 0.5)}
    writer.on_predict_batch_end(trainer, None, outputs, None, 0)
    message = r"^3 predicted samples have the index 1: let predict_dataloader yield \(images, indices\)"
    with pytest.raises(ConfigurationError, match=message):
        writer.on_predict_epoch_end(trainer, None)
    masks = {"index": outputs["index"], "masks": torch.zeros(5, 4, 4)}
    with pytest.raises(ConfigurationError, match=message):
        writer.on_predict_batch_end(trainer, None, masks, None, 0)
    assert [*Path().iterdir()] == []


def test_invalid_predict_steps_and_image_folders_are_refused():
    with pytest.raises(ConfigurationError, match=r"predict_step returned Tensor: .* 'index'"):
        PredictionWriter().on_predict_batch_end(None, None, torch.zeros(2), None, 0)
    Path("empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"images=empty: no images found; .* \.jpg, .*\.webp"):
        images_of_folder(DigitsDataModule(), Path("empty"))
    with pytest.raises(ConfigurationError, match="images=empty: LightningDataModule does not define the preprocessing"):
        images_of_folder(LightningDataModule(), Path("empty"))
