"""A quantised network is small, has the quality of the original, and can be loaded in another process."""

import importlib
import importlib.util
import sys

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.data import DigitsDataModule, SyntheticDataModule
from cnnstrategies.data.without_run import give_trainer
from cnnstrategies.deploy.quantize import accuracy, load_quantized, quantize
from cnnstrategies.networks import SmallCNN
from tests.asking_data import AskingData
from tests.conftest import quiet_trainer
from tests.runner.forked import in_fork


def trained(path):
    """Return a trained network for digits, its data, and the report of its quantisation to a file."""

    def run():
        seed_everything(1, verbose=False)
        model = ImageClassifier(SmallCNN(10), 10, optimizer=lambda params: torch.optim.SGD(params, 0.1, momentum=0.9))
        data = DigitsDataModule(batch_size=32)
        # The number of epochs depends on how the processor rounds, so training stops at an accuracy.
        stop = EarlyStopping("val_acc", mode="max", patience=40, stopping_threshold=0.95)
        quiet_trainer(max_epochs=40, callbacks=[stop]).fit(model, data)
        return model.network, quantize(model, data, path)

    network, report = in_fork(run)
    data = DigitsDataModule(batch_size=32)
    data.setup("fit")
    return network, data, report


@pytest.mark.cluster  # This test takes long.
def test_quantised_weights_are_a_third_and_load_elsewhere(tmp_path):
    path = tmp_path / "new" / "digits.pt2"
    network, data, report = trained(path)
    assert report.before.quality >= 0.95
    assert report.after.quality == pytest.approx(report.before.quality, abs=0.015)
    assert report.after.megabytes < 0.35 * report.before.megabytes
    assert report.batch_size == 32
    assert report.before.milliseconds > 0
    assert report.after.milliseconds > 0

    assert "torchao" not in sys.modules, "another process has quantised the network"
    images = torch.cat([images for images, _ in data.val_dataloader()])[:12]
    quantized = load_quantized(path, batch_size=5)  # Works for any number of images.
    exactly_one_batch = torch.cat([quantized(images[:5]), quantized(images[5:10])])
    padded = quantized(images[:3])
    split_and_padded = quantized(images)
    torch.testing.assert_close(padded, exactly_one_batch[:3])
    torch.testing.assert_close(split_and_padded[:10], exactly_one_batch)
    with torch.no_grad():
        exact = network(images)
    assert (split_and_padded - exact).norm() < 0.1 * exact.norm()
    # The file contains int8 weights only, without a float copy.
    importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")  # Defines the operators of the file.
    stored = torch.export.load(path).state_dict
    assert {value.dtype for value in stored.values() if value.ndim > 1} == {torch.int8}


class WithIndices(SyntheticDataModule):
    """Data module whose batches have a third element."""

    def train_dataloader(self):
        return [(*batch, torch.arange(len(batch[0]))) for batch in super().train_dataloader()]

    def val_dataloader(self):
        return [(*batch, torch.arange(len(batch[0]))) for batch in super().val_dataloader()]


class Shortcut(nn.Module):
    """A network with one ReLU module for two activations, as in ResNet, and a flattened map, as in AlexNet."""

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


@pytest.mark.cluster  # This test takes long.
def test_shared_modules_shortcuts_and_flattened_maps(tmp_path):
    """The batches have one image: without care, export would fix the graph to this batch size."""
    torch.manual_seed(0)
    model = ImageClassifier(Shortcut().eval(), 10)
    data = WithIndices(num_samples=80, num_classes=10, image_size=8, batch_size=1)
    quantize(model, data, tmp_path / "shortcut.pt2", calibration_batches=4)
    images = torch.cat([images for images, *_ in data.val_dataloader()])
    assert len(images) == 8
    with torch.no_grad():
        exact = model.network(images)
    # Rounding to int8 changes the outputs by about a tenth. With a wrong graph they would be unrelated.
    assert (load_quantized(tmp_path / "shortcut.pt2")(images) - exact).norm() < 0.3 * exact.norm()


class DataDependent(nn.Module):
    def forward(self, images):
        return images.flatten(1)[:, :10] * (2 if float(images.sum()) > 0 else 1)


def test_refusals_name_the_value(monkeypatch, tmp_path):
    classifier = ImageClassifier(SmallCNN(10), 10)
    for model, options, message in (
        (LightningModule(), {}, "LightningModule has no forward that maps images to logits"),
        (classifier, {"calibration_batches": 0}, "calibration_batches=0: use at least 1"),
        (ImageClassifier(DataDependent(), 10), {}, r"torch.export cannot export DataDependent.*: \w+"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            quantize(model, AskingData(), tmp_path / "q.pt2", **options)
    data = AskingData()
    trainer = data.trainer = quiet_trainer()
    data.setup("fit")
    correct = [(classifier.network(images).argmax(1) == labels) for images, labels, _ in data.val_dataloader()]
    assert accuracy(classifier.network, data.val_dataloader()) == float(torch.cat(correct).double().mean())
    give_trainer(data)
    assert data.trainer is trainer, "the data module of a run keeps the run's trainer"
    monkeypatch.setitem(sys.modules, "torchao.quantization.pt2e", None)
    with pytest.raises(ConfigurationError, match="pip install torchao"):
        quantize(classifier, DigitsDataModule(), tmp_path / "q.pt2")
    with pytest.raises(ConfigurationError, match="pip install torchao"):
        load_quantized(tmp_path / "q.pt2")
