"""A network with another number of classes than the model is refused: before the start, or in the first step."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from cluster.processes_of import PYTHON, Program, fit
from conftest import PlainCNN
from lightning.pytorch import Trainer
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.data import DigitsDataModule, SyntheticDataModule
from cnnstrategies.models.dry_run import SAMPLES, check_network, outputs_without_data
from cnnstrategies.networks import SmallCNN

# Data whose shape is known from its batches alone, so that only a rank can see the mistake.
MINE = """
from torch import nn
from cnnstrategies.data import DigitsDataModule


class Digits(DigitsDataModule):
    image_shape = None


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 1000))
"""
LINE = "the network gives 1000 logits for an image, but the model has num_classes=10: give model.init_args.network"


# Two of its ranks refuse, and the first one loses its connections to them.
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
        "--data=mine.Digits",
        "--trainer.num_sanity_val_steps=0",
        "--trainer.max_epochs=1",
    )
    program = Program([PYTHON, *fit(*STAGES, *options)], tmp_path / "log")
    assert program.wait() == 2, program.output()
    lines = [line for line in program.output().splitlines() if LINE in line]
    assert len(lines) == 1, program.output()
    assert lines[0].startswith("cnnstrategies: error: ")
    assert "Traceback" not in program.output()
    assert "waiting for" not in program.output(), "what other ranks only lose their connection by"


class Own(ImageClassifier):
    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)


def test_every_kind_of_step_refuses():
    for kind, step in itertools.product((ImageClassifier, Own), ("fit", "validate", "test", "predict")):
        model = kind(PlainCNN(12), 10, compile_backend="eager")
        trainer = Trainer(accelerator="cpu", devices=1, logger=False, num_sanity_val_steps=0, max_epochs=1)
        with pytest.raises(ConfigurationError, match=r"gives 12 logits for an image, .* has num_classes=10"):
            getattr(trainer, step)(model, datamodule=DigitsDataModule())


@pytest.mark.light
def test_logits_that_are_none_are_named():
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
    with pytest.raises(ConfigurationError, match="gives 5 logits"):
        model.loss((torch.zeros(4, 4), torch.zeros(4, 5)), targets)  # An auxiliary classifier.
    assert model.loss((torch.zeros(4, 4), None), targets).isfinite()


@pytest.mark.light
def test_before_the_start_nothing_is_changed_or_drawn():
    class Drawing(SmallCNN):
        """Draws from all generators, and keeps what it has seen."""

        def forward(self, images):
            if random.random() + np.random.random() + float(torch.rand(())) >= 0:
                self.seen = images
            return super().forward(images)

    network = Drawing(12)
    network.block2.eval()  # Frozen, say.
    modes = [module.training for module in network.modules()]
    state = {name: value.clone() for name, value in network.state_dict().items()}
    generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    for training in (True, False):
        with pytest.raises(ConfigurationError, match="gives 12 logits"):
            check_network(ImageClassifier(network, 10), DigitsDataModule(), training)
    assert not hasattr(network, "seen")
    assert modes == [module.training for module in network.modules()]
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert generators[:2] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(generators[2], torch.get_rng_state())


class Reads(PlainCNN):
    def forward(self, images):
        return super().forward(images) if images.sum() < 1e9 else images


class Holds(PlainCNN):
    def __init__(self):
        super().__init__(12)
        self.generator = (number for number in range(3))  # It cannot be copied.


UNCERTAIN = {
    "reads its images": (ImageClassifier(Reads(12), 10), DigitsDataModule()),
    "cannot be copied": (ImageClassifier(Holds(), 10), DigitsDataModule()),
    "lazy": (ImageClassifier(nn.Sequential(nn.Flatten(), nn.LazyLinear(12)), 10), DigitsDataModule()),
    "another shape": (ImageClassifier(PlainCNN(12), 10), SyntheticDataModule(num_classes=10, channels=1)),
    "not logits": (ImageClassifier(nn.Identity(), 10), DigitsDataModule()),
    "a loss of its own": (Own(PlainCNN(12), 10), DigitsDataModule()),
    "no data": (ImageClassifier(PlainCNN(12), 10), None),
}


@pytest.mark.light
@pytest.mark.parametrize("kind", UNCERTAIN)
def test_what_is_not_certain_is_left_to_the_first_step(kind):
    check_network(*UNCERTAIN[kind], training=True)


@pytest.mark.light
def test_auxiliary_classifiers_run_in_training_alone():
    network = torchvision.models.googlenet(weights=None, num_classes=4, init_weights=False)
    training, evaluation = (outputs_without_data(network, (3, 64, 64), mode) for mode in (True, False))
    assert [logits.shape for logits in training] == [(SAMPLES, 4)] * 3
    assert evaluation.shape == (SAMPLES, 4)
