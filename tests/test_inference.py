"""Any LightningModule whose forward maps images to logits can predict, and can be exported, without changes."""

import csv
import pickle
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.data import SyntheticDataModule
from cnnstrategies.deploy import export
from cnnstrategies.deploy.inference import PredictsImages, give_predict_step, network_of
from cnnstrategies.deploy.model_card import _training


class Own(LightningModule):
    """A module with several submodules and with further arithmetic in ``forward``."""

    def __init__(self, probabilities: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(144, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mean", torch.tensor(0.5))
        self.probabilities = probabilities

    def forward(self, images: Tensor) -> Tensor:
        logits = self.head(self.encoder(images - self.mean)) * self.scale
        return logits.softmax(dim=1) if self.probabilities else logits

    def on_before_batch_transfer(self, batch, dataloader_idx):
        """Return a dict in training, whose first item has no tensors, as for data with file names."""
        return (
            dict(zip(("names", "images", "labels"), (["a name"], *batch), strict=True))
            if self.trainer.training
            else batch
        )

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch["images"]), batch["labels"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def data():
    return SyntheticDataModule(num_samples=100, num_classes=3, image_size=8, channels=1, batch_size=6)


def test_an_own_forward_is_exported_under_its_own_names():
    module = Own()
    report = export.export(module, data(), Path("out"), "torch_export")
    assert report.agreement == 1
    assert report.difference < 1e-5
    network = network_of(module, "export")
    assert network.state_dict().keys() == module.state_dict().keys()
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(network(images), module(images))


@pytest.mark.light
def test_probabilities_are_those_of_the_forward():
    images, indices = torch.randn(5, 1, 8, 8), torch.arange(5)
    logits, probabilities = Own(), Own(probabilities=True)
    for module in (logits, probabilities):
        give_predict_step(module)
        module = pickle.loads(pickle.dumps(module))  # A spawned rank gets its module in this way.
        predictions = module.predict_step((images, indices), 0)
        assert torch.equal(predictions["index"], indices)
        torch.testing.assert_close(predictions["probabilities"], logits(images).softmax(dim=1))


@pytest.mark.light
def test_a_modules_own_predict_step_stays():
    module = ImageClassifier(nn.Identity(), 2)
    give_predict_step(module)
    assert "predict_step" not in vars(module)
    assert network_of(module, "export") is module.network


@pytest.mark.light
def test_a_forward_that_does_not_return_logits_is_refused():
    module = Own()
    for returned, description in (
        (torch.zeros(2, 3, 4, 4), r"\(2, 3, 4, 4\)"),
        ([1], "list"),
        (torch.zeros(2, 1), "2, 1"),
    ):
        module.forward = lambda images, returned=returned: returned
        with pytest.raises(ConfigurationError, match=rf"for 2 images the forward of Own returned .*{description}"):
            PredictsImages(module)((torch.zeros(2, 1, 8, 8), torch.arange(2)), 0)
    batch = (torch.zeros(2, 1, 8, 8), torch.arange(2), torch.arange(2))
    with pytest.raises(ConfigurationError, match=r"has 3 parts, but \(images, indices\) is needed: .* in Own"):
        PredictsImages(module)(batch, 0)


@pytest.mark.light
def test_the_card_of_a_run_with_the_default_precision_names_it(tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {strategy: auto, num_nodes: 1, devices: 1, precision: null}")
    rows = _training(tmp_path / "checkpoints/best.ckpt", {})
    assert rows["Strategy"] == "auto, 1 x 1 devices, precision 32-true"


def test_a_users_module_trains_and_predicts_on_the_command_line(run_cli):
    options = ["--model=tests.test_inference.Own", "--data=SyntheticDataModule", "--data.num_samples=60"]
    options += ["--data.image_size=8", "--data.num_classes=3", "--data.channels=1", "--trainer.accelerator=cpu"]
    options += ["--trainer.devices=1", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs"]
    code, output = run_cli("fit", *options, "--trainer.max_epochs=1")
    assert code == 0, output
    code, output = run_cli("predict", *options, "--ckpt_path=last", "--predictions.output=out.csv")
    assert code == 0, output
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 0
    assert all(sum(float(row[f"p({name})"]) for name in "012") == pytest.approx(1, abs=1e-4) for row in rows)
