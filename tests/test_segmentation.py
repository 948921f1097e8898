"""`ImageSegmenter` and its data: loss, metrics, pictures of masks, and the same result in a pipeline."""

import csv
import json
import shutil
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier, ImageSegmenter
from cnnstrategies.callbacks.predictions import write_masks
from cnnstrategies.data import SegmentationFolderDataModule, SyntheticDataModule
from cnnstrategies.data.image_folder import images_of_folder
from cnnstrategies.deploy import export, quantize
from cnnstrategies.networks import UNet
from tests.masked_images import write_masked_images


class PlainUNet(nn.Module):
    """A U-Net without batch normalisation, in which a value skips a stage."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, num_classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x).tanh()
        x = self.bottom(F.max_pool2d(skip, 2)).tanh()
        return self.head(torch.cat([skip, self.up(x)], dim=1))


CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  precision: 64-true
  max_epochs: 1
  enable_progress_bar: false
  logger: {class_path: CSVLogger, init_args: {save_dir: runs}}
model:
  class_path: ImageSegmenter
  init_args:
    num_classes: 2
    network: {class_path: tests.test_segmentation.PlainUNet, init_args: {num_classes: 2}}
    optimizer: {class_path: SGD, init_args: {lr: 0.3, momentum: 0.9}}
data:
  class_path: SegmentationFolderDataModule
  init_args: {root: data, num_classes: 2, image_size: 16, global_batch_size: 4, num_workers: 0}
"""
LINES = {
    "one": ["--trainer.strategy=auto", "--trainer.devices=1", "--data.init_args.augment=false"],
    "pipeline": ["--trainer.strategy=hybrid_pipeline_fork", "--data.init_args.augment=false"],
}


@pytest.mark.cluster  # This test takes long.
def test_masks_become_pictures_under_a_pipeline_too(run_cli):
    write_masked_images(Path("data/train"), count=8)
    write_masked_images(Path("data/val"), count=4)
    Path("masks.yaml").write_text(CONFIG)
    states, metrics = {}, {}
    for name, line in LINES.items():
        code, output = run_cli("fit", "--config=masks.yaml", *line, f"--trainer.logger.init_args.name={name}")
        assert code == 0, output
        folder = Path("runs") / name / "version_0"
        states[name] = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        rows = list(csv.DictReader((folder / "metrics.csv").open()))
        metrics[name] = [(float(row["val_loss"]), float(row["val_miou"])) for row in rows if row.get("val_miou")]
    for name in states:
        for key, value in states["one"].items():
            torch.testing.assert_close(states[name][key], value, rtol=1e-9, atol=1e-12)
        assert len(metrics[name]) == 1
        torch.testing.assert_close(torch.tensor(metrics[name]), torch.tensor(metrics["one"]), rtol=1e-5, atol=0.0)
    checkpoint = "runs/one/version_0/checkpoints/best.ckpt"
    code, output = run_cli("predict", "--config=masks.yaml", *LINES["pipeline"], f"--ckpt_path={checkpoint}")
    assert code == 0, output
    (folder,) = Path("runs").glob("**/predictions")
    pictures = sorted(folder.glob("val/images/*.png"))
    assert [picture.name for picture in pictures] == [f"{index}.png" for index in range(4)]
    with Image.open(pictures[0]) as picture:
        assert picture.size == (24, 20)
        assert picture.mode == "P"
        assert set(np.array(picture).flat) <= {0, 1}


def folder(**options):
    data = SegmentationFolderDataModule(Path("data"), 2, image_size=16, num_workers=0, **options)
    data.setup("fit")
    return data


@pytest.mark.light
def test_the_loss_is_the_mean_of_images_over_counted_pixels():
    model = ImageSegmenter(nn.Identity(), num_classes=3, aux_weight=0.3)
    logits, auxiliary = torch.randn(3, 3, 4, 5), torch.randn(3, 3, 4, 5)
    masks = torch.randint(3, (3, 4, 5))
    masks[0, :2], masks[2] = 255, 255
    each = [F.cross_entropy(logits[[i]], masks[[i]], ignore_index=255) for i in range(2)]
    torch.testing.assert_close(model.loss(logits, masks), sum(each) / 3)
    outputs = OrderedDict(out=logits, aux=auxiliary)
    torch.testing.assert_close(model.loss(outputs, masks), sum(each) / 3 + 0.3 * model.loss(auxiliary, masks))
    with pytest.raises(
        ConfigurationError, match=r"returned shape \(3, 3, 4, 5\) instead of logits of shape \(3, 4, 4, 5\)"
    ):
        ImageSegmenter(nn.Identity(), num_classes=4).loss(logits, masks)
    assert UNet(3, widths=(4, 8, 16))(torch.zeros(2, 3, 16, 24)).shape == (2, 3, 16, 24)


class TwoHeads(nn.Module):
    """A network with a main and an auxiliary output, like torchvision's DeepLab and FCN."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.side = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body(x).relu()
        return OrderedDict(out=self.head(x), aux=self.side(x))


@pytest.mark.cluster  # This test takes long.
def test_pruned_networks_are_exported_and_quantised_as_masked(monkeypatch):
    write_masked_images(Path("data/train"), count=8)
    data = folder(val_split=0.5, batch_size=3)
    torch.manual_seed(0)
    model = ImageSegmenter(TwoHeads(), num_classes=2)
    exported = export.export(model, data, Path("out"), "torch_export")
    assert exported.difference < 1e-5
    assert "4 validation images" in str(exported)
    assert "100.00% of the pixels have the same class" in str(exported)
    described = json.loads(Path("out/export.json").read_text())["preprocessing"]
    assert described["fill_right_and_below_to"] == [16, 16]
    assert (described["resize_longer_side"], described["fill"]) == (16, [124, 116, 104])
    images = torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load("out/model.pt2").module()(images), model.network(images)["out"])
    monkeypatch.setattr(quantize, "has_int8_kernels", lambda: False)  # Compiling the kernels takes long.
    report = quantize.quantize(model, data, Path("small.pt2"), calibration_batches=1)
    metric = model.val_metrics["miou"]
    data.setup("validate")
    for images, masks in data.val_dataloader():
        with torch.no_grad():
            metric.update(model.network(images)["out"], masks)
    assert report.metric == "val_miou"
    assert report.before.quality == pytest.approx(float(metric.compute()))
    assert 0 < report.after.quality < 1


@pytest.mark.light
def test_own_images_are_fitted_whole_and_masks_named():
    write_masked_images(Path("data/train"), count=4)
    data = folder(val_split=0.5)
    Path("mine/a").mkdir(parents=True)
    shutil.copy(Path("data") / data.val_source.name(0), "mine/a/x.png")
    images = images_of_folder(data, Path("mine"))
    data.predict_source = images
    assert torch.equal(images.fetch([0])[0], data.val_source.fetch([0])[0])
    write_masks(Path("masks"), data, [0], torch.ones(1, 16, 16))
    with Image.open("masks/a/x.png") as picture:
        assert picture.size == (24, 20)
    shutil.copy("data/train/images/1.png", "mine/a/x.jpg")
    with pytest.raises(ConfigurationError, match=r"the masks of a/x.jpg and a/x.png would be written to the same file"):
        images_of_folder(data, Path("mine"))


@pytest.mark.light
def test_images_and_masks_are_cropped_together_and_fitted_whole():
    write_masked_images(Path("data/train"), count=7)
    Path("data/train/images/6.png").unlink()
    data = folder(val_split=1 / 3, batch_size=2)
    assert (len(data.train_source), len(data.val_source)) == (4, 2)
    assert data.left_out["masks without an image"] == 1
    images, masks = next(iter(data.train_dataloader()))
    assert images.shape == (2, 3, 16, 16)
    assert masks.shape == (2, 16, 16)
    torch.manual_seed(0)
    for source in (data.train_source, data.val_source):
        for _ in range(5):
            images, masks = source.fetch([0, 1])
            bright = images.float().mean(dim=1) > 140
            counted = masks != 255
            # At the edges of the bright square, resizing mixes bright and dark pixels.
            assert ((bright == (masks == 1)) & counted).sum() > 0.85 * counted.sum()
    image, mask = data.val_source.fetch([0])
    assert (mask[0, 13:] == 255).all(), "24 x 20 pixels fit as 16 x 13"
    assert (image[0, :, 13:].permute(1, 2, 0) == torch.tensor([124, 116, 104])).all()
    restored = data.mask_of_image(0, mask[0])
    assert restored.shape == (20, 24)


def read_all():
    data = folder(val_split=0.2)
    data.train_source.fetch([0, 1, 2, 3])
    data.val_source.fetch([0])


MASK = Path("data/train/masks/3.png")
MISTAKES = (
    (MASK.unlink, r"images/3.png has no mask: put 3.png into .*masks"),
    (lambda: Image.new("L", (9, 9)).save(MASK), r"mask .*3.png has \(9, 9\) pixels, but its image has \(20, 24\)"),
    (
        lambda: Image.new("L", (24, 20), 7).save(MASK),
        r"mask .*3.png has the class 7, but num_classes=2 allows only 0 to 1",
    ),
    (lambda: MASK.write_text("nothing"), r"broken mask .*3.png"),
    (
        lambda: shutil.copy("data/train/images/3.png", "data/train/images/3.jpg"),
        r"images/3.jpg and .*images/3.png would have the same mask: rename one",
    ),
)


@pytest.mark.light
def test_a_mistake_in_the_files_is_named():
    for damage, message in MISTAKES:
        shutil.rmtree("data", ignore_errors=True)
        write_masked_images(Path("data/train"), count=5)
        damage()
        with pytest.raises(ConfigurationError, match=message):
            read_all()


@pytest.mark.light
def test_data_that_does_not_go_with_the_module_is_refused():
    write_masked_images(Path("data/train"), count=4)
    data, network = SegmentationFolderDataModule(Path("data"), 2, image_size=16), nn.Identity()
    ImageSegmenter(network, 2).check_data(data)
    for refused, message in (
        (lambda: folder(class_names=["one"]), "class_names has 1 names, and num_classes=2"),
        (
            lambda: ImageClassifier(network, 2).check_data(data),
            "SegmentationFolderDataModule has masks, which ImageClassifier cannot learn",
        ),
        (
            lambda: ImageSegmenter(network, 2, ignore_index=9).check_data(data),
            "ignore_index=9, but SegmentationFolderDataModule has ignore_index=255",
        ),
        (
            lambda: ImageSegmenter(network, 2).check_data(SyntheticDataModule(num_classes=2)),
            "SyntheticDataModule has no masks",
        ),
    ):
        with pytest.raises(ConfigurationError, match=message):
            refused()
