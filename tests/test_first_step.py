"""A network is refused in the first step if its number of logits differs from the model's number of classes."""

import itertools
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.data import DigitsDataModule
from tests.cluster.processes_of import PYTHON, Program, fit
from tests.conftest import PlainCNN

MINE = """
from torch import nn


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 1000))
"""
LINE = "the network returned 1000 logits for an image, but the model has num_classes=10: set num_classes=10 also in"


# The two ranks of the second stage refuse, and the first rank loses its connections to them.
STAGES = (
    "--trainer.strategy=HybridPipelineStrategy",
    '--trainer.strategy.cuts=["1"]',
    "--trainer.strategy.replicas=[1,2]",
    "--trainer.devices=3",
)


@pytest.mark.warm
def test_the_first_step_refuses_with_one_line_from_all_ranks(tmp_path):
    Path("mine.py").write_text(MINE)
    options = (
        "--model.init_args.network=mine.network",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.max_epochs=1",
    )
    program = Program([PYTHON, *fit(*STAGES, *options)], tmp_path / "log")
    assert program.wait() == 2, program.output()
    lines = [line for line in program.output().splitlines() if LINE in line]
    assert len(lines) == 1, program.output()
    assert lines[0].startswith("cnnstrategies: error: ")
    assert "Traceback" not in program.output()
    assert "waiting for" not in program.output(), "ranks that only lost a connection print nothing"


class Own(ImageClassifier):
    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)


def test_every_kind_of_step_refuses():
    for kind, step in itertools.product((ImageClassifier, Own), ("fit", "validate", "test", "predict")):
        model = kind(PlainCNN(12), 10, compile_backend="eager" if step == "fit" else None)
        trainer = Trainer(accelerator="cpu", devices=1, logger=False, num_sanity_val_steps=0, max_epochs=1)
        with pytest.raises(ConfigurationError, match=r"returned 12 logits for an image, .* has num_classes=10"):
            getattr(trainer, step)(model, datamodule=DigitsDataModule())


@pytest.mark.light
def test_outputs_with_the_wrong_shape_or_class_are_refused():
    model, targets = ImageClassifier(nn.Identity(), 4), torch.arange(4)
    outputs = {
        r"shape \(4, 4, 1, 1\)": torch.zeros(4, 4, 1, 1),
        r"shape \(2, 4\)": torch.zeros(2, 4),
        "returned dict": {"logits": torch.zeros(4, 4)},
        "returned NoneType": (None, torch.zeros(4, 4)),
    }
    for words, output in outputs.items():
        with pytest.raises(ConfigurationError, match=rf"{words}.*needs logits of shape \(4, 4\)"):
            model.loss(output, targets)
    with pytest.raises(ConfigurationError, match="returned 5 logits"):
        model.loss((torch.zeros(4, 4), torch.zeros(4, 5)), targets)  # The second output is an auxiliary classifier's.
    assert model.loss((torch.zeros(4, 4), None), targets).isfinite()
