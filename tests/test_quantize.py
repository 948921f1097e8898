"""A quantised network is small, as good as before, and can be loaded in another process."""

import subprocess
import sys

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.data import DigitsDataModule, SyntheticDataModule
from cnnstrategies.networks import SmallCNN
from cnnstrategies.quantize import load_quantized, quantize


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A trained network for digits, its data, the file and the report."""
    seed_everything(1, verbose=False)
    model = ImageClassifier(SmallCNN(10), 10, optimizer=lambda params: torch.optim.SGD(params, 0.1, momentum=0.9))
    data = DigitsDataModule(batch_size=32)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    path = tmp_path_factory.mktemp("quantize") / "new" / "digits.pt2"
    return model.network, data, path, quantize(model, data, path)


def test_accuracy_stays_and_the_weights_are_a_third(digits):
    _, _, path, report = digits
    assert report.before.accuracy > 0.9
    assert report.after.accuracy == pytest.approx(report.before.accuracy, abs=0.015)
    assert report.after.megabytes < 0.35 * report.before.megabytes
    assert report.batch_size == 32
    assert report.before.milliseconds > 0
    assert report.after.milliseconds > 0
    # No float weights beside the int8 ones.
    stored = torch.export.load(path).state_dict
    assert {value.dtype for value in stored.values() if value.ndim > 1} == {torch.int8}


def test_another_process_loads_the_file(digits):
    network, data, path, _ = digits
    images = next(iter(data.val_dataloader()))[0]
    torch.save(images, "images.pt")
    script = (
        "import sys, torch; from cnnstrategies.quantize import load_quantized;"
        "torch.save(load_quantized(sys.argv[1])(torch.load('images.pt')), 'logits.pt')"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=120)
    logits = torch.load("logits.pt")
    with torch.no_grad():
        exact = network(images)
    assert (logits - exact).norm() < 0.1 * exact.norm()


def test_any_number_of_images_gives_the_same_logits(digits):
    _, data, path, _ = digits
    images = torch.cat([images for images, _ in data.val_dataloader()])[:12]
    quantized = load_quantized(path, batch_size=5)
    exactly_one_batch = torch.cat([quantized(images[:5]), quantized(images[5:10])])
    padded = quantized(images[:3])
    split_and_padded = quantized(images)
    torch.testing.assert_close(padded, exactly_one_batch[:3])
    torch.testing.assert_close(split_and_padded[:10], exactly_one_batch)
    assert split_and_padded.shape == (12, 10)


class Shortcut(nn.Module):
    """One ReLU module for both activations, as in torchvision's ResNet, and a flattened map, as in AlexNet."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8 * 16, 10)

    def forward(self, images):
        first = self.relu(self.norm1(self.conv1(images)))
        second = self.relu(self.conv2(first) + first)
        pooled = nn.functional.max_pool2d(second, 2)
        return self.fc(torch.flatten(pooled, 1))


def test_shared_modules_shortcuts_and_flattened_maps(tmp_path):
    """And batches of one image, to which export would fix the graph."""
    torch.manual_seed(0)
    model = ImageClassifier(Shortcut(), 10)
    data = SyntheticDataModule(num_samples=80, num_classes=10, image_size=8, batch_size=1)
    quantize(model, data, tmp_path / "shortcut.pt2", calibration_batches=4)
    images = torch.cat([images for images, _ in data.val_dataloader()])
    assert len(images) == 8
    with torch.no_grad():
        exact = model.network(images)
    assert (load_quantized(tmp_path / "shortcut.pt2")(images) - exact).norm() < 0.1 * exact.norm()


def test_without_torchao_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torchao.quantization.pt2e", None)
    for use in (
        lambda: quantize(ImageClassifier(SmallCNN(10), 10), DigitsDataModule(), tmp_path / "q.pt2"),
        lambda: load_quantized(tmp_path / "q.pt2"),
    ):
        with pytest.raises(ConfigurationError, match=r'pip install "cnnstrategies\[quantize\]"'):
            use()


class DataDependent(nn.Module):
    def forward(self, images):
        return images.flatten(1)[:, :10] * (2 if float(images.sum()) > 0 else 1)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (LightningModule(), {}, "LightningModule has no `network`"),
        (ImageClassifier(SmallCNN(10), 10), {"calibration_batches": 0}, "calibration_batches=0: at least 1"),
        (ImageClassifier(DataDependent(), 10), {}, r"torch.export cannot export DataDependent.*: \w+"),
    ],
    ids=["no network", "no calibration", "not exportable"],
)
def test_refusals_name_the_value(tmp_path, model, options, message):
    with pytest.raises(ConfigurationError, match=message):
        quantize(model, DigitsDataModule(), tmp_path / "q.pt2", **options)
