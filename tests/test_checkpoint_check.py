"""A checkpoint of a different network is refused with an error message of one line."""

from pathlib import Path

import pytest
import torch
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.checkpoints.check import check_weights
from cnnstrategies.data import DigitsDataModule
from tests.conftest import PlainCNN, quiet_trainer
from tests.runner.forked import in_fork


def train():
    trainer = quiet_trainer(max_steps=1, limit_val_batches=0)
    trainer.fit(ImageClassifier(PlainCNN(), 10), DigitsDataModule())
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return the path of a run's checkpoint."""
    path = tmp_path_factory.mktemp("run") / "checkpoints" / "best.ckpt"

    def save():
        trainer = train()
        trainer.save_checkpoint(path)
        trainer.save_checkpoint(path.with_name("weights.ckpt"), weights_only=True)

    in_fork(save)
    (path.parent.parent / "config.yaml").touch()
    return path


@pytest.mark.light
def test_the_same_network_is_accepted_with_its_weights(saved):
    model = ImageClassifier(PlainCNN(), 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for path in (saved, saved.with_name("weights.ckpt"), "last", "https://host/some.ckpt"):
        check_weights(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Wider(PlainCNN):
    def __init__(self):
        super().__init__()
        self[2] = nn.Conv2d(8, 16, 5, stride=2, padding=2)


@pytest.mark.light
def test_another_network_is_refused_naming_its_configuration(saved, tmp_path):
    for network, message in (
        (Wider(), r"network.2.weight has the shape \(16, 8, 3, 3\) in the checkpoint and \(16, 8, 5, 5\) in `model`"),
        (nn.Sequential(*PlainCNN(), nn.Linear(10, 10)), "the checkpoint has no network.6.weight"),
        (nn.Sequential(*list(PlainCNN())[:-1]), "the checkpoint has network.5.weight, but `model` does not"),
    ):
        whole = rf"best.ckpt does not fit the network of `model`: {message}; use the `model` of \S+/run0/config.yaml"
        with pytest.raises(ConfigurationError, match=whole):
            check_weights(ImageClassifier(network, 10), saved)
    model = ImageClassifier(PlainCNN(), 10)
    with pytest.raises(ConfigurationError, match="contains only weights"):
        check_weights(model, saved.with_name("weights.ckpt"), training=True)
    torch.save(PlainCNN().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(
        ConfigurationError, match=r"weights.pt is not a checkpoint of a run, because it contains only 0.bias, "
    ):
        check_weights(model, tmp_path / "weights.pt")


@pytest.mark.light
def test_modules_that_convert_or_loosen_loading_are_not_checked(saved):
    class Renames(ImageClassifier):
        def on_load_checkpoint(self, checkpoint):
            pass

    check_weights(Renames(Wider(), 10), saved)
    lenient = ImageClassifier(Wider(), 10)
    lenient.strict_loading = False
    check_weights(lenient, saved)
