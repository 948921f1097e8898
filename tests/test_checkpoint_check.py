"""A checkpoint of another network is refused with a line, and one of the same is not."""

from pathlib import Path

import pytest
import torch
from conftest import PlainCNN, in_fork
from lightning.pytorch import Trainer
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.checkpoints.check import check_weights
from cnnstrategies.data import DigitsDataModule


def train():
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, barebones=True, max_steps=1, limit_val_batches=0)
    trainer.fit(ImageClassifier(PlainCNN(), 10), DigitsDataModule())
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """That of a run."""
    path = tmp_path_factory.mktemp("run") / "checkpoints" / "best.ckpt"
    in_fork(lambda: train().save_checkpoint(path))
    (path.parent.parent / "config.yaml").touch()
    return path


@pytest.mark.light
def test_the_same_network_is_accepted_with_its_weights(saved):
    model = ImageClassifier(PlainCNN(), 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_weights(model, saved)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    check_weights(model, "last")
    check_weights(model, "https://host/some.ckpt")


class Wider(PlainCNN):
    def __init__(self):
        super().__init__()
        self[2] = nn.Conv2d(8, 16, 5, stride=2, padding=2)


OTHERS = {
    "shape": (Wider, r"network.2.weight has the shape \(16, 8, 3, 3\) there and \(16, 8, 5, 5\) here"),
    "more": (lambda: nn.Sequential(*PlainCNN(), nn.Linear(10, 10)), "it has no network.6.weight"),
    "fewer": (lambda: nn.Sequential(*list(PlainCNN())[:-1]), "it has network.5.weight, which `model` has not"),
}


@pytest.mark.light
@pytest.mark.parametrize(("network", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_another_network_is_refused_naming_its_configuration(saved, network, message):
    whole = rf"best.ckpt is of another network .*: {message}; take `model` as it is in \S+/run0/config.yaml"
    with pytest.raises(ConfigurationError, match=whole):
        check_weights(ImageClassifier(network(), 10), saved)


@pytest.mark.light
def test_what_only_the_module_knows_is_left_to_it(saved):
    class Renames(ImageClassifier):
        def on_load_checkpoint(self, checkpoint):
            pass

    check_weights(Renames(Wider(), 10), saved)
    lenient = ImageClassifier(Wider(), 10)
    lenient.strict_loading = False
    check_weights(lenient, saved)


@pytest.mark.light
def test_a_file_of_weights_alone_is_no_checkpoint_of_a_run(tmp_path):
    torch.save(PlainCNN().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(
        ConfigurationError, match=r"weights.pt is not a checkpoint of a run but holds 0.bias, 0.weight,"
    ):
        check_weights(ImageClassifier(PlainCNN(), 10), tmp_path / "weights.pt")


def test_weights_alone_are_nothing_to_go_on_from(tmp_path):
    train().save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    model = ImageClassifier(PlainCNN(), 10)
    check_weights(model, tmp_path / "weights.ckpt")
    with pytest.raises(ConfigurationError, match="holds weights alone"):
        check_weights(model, tmp_path / "weights.ckpt", training=True)
