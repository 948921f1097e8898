"""The callback ActivationCheckpointing under each strategy: checkpoints equal those of one process without it."""

import ctypes
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.callbacks import ActivationCheckpointing
from cnnstrategies.pipeline import tracing
from cnnstrategies.pipeline.leaf_tracer import LeafTracer
from cnnstrategies.strategies import BalancedDDPStrategy, HybridPipelineStrategy, ParameterServerStrategy
from cnnstrategies.strategies.predicted_memory import predicted_memory
from tests.conftest import quiet_trainer
from tests.strategies.digit_runs import assert_same_run, train


class Normalised(nn.Sequential):
    """A network with two kinds of running statistics, and dropout that draws the same numbers on all ranks."""

    def __init__(self) -> None:
        layers = []
        for channels, momentum in ((1, 0.1), (8, None), (8, 0.3)):
            layers += [nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=momentum)]
            layers += [nn.ReLU(inplace=True), nn.Dropout(0.2)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))


class Recomputes(Callback):
    """A callback that counts the forwards of the first convolution.

    Python's numbers in objects of the user would count the first forwards alone.
    """

    def __init__(self) -> None:
        self.forwards = ctypes.c_int()

    def on_fit_start(self, trainer, pl_module) -> None:
        self.handle = pl_module.network[0].register_forward_hook(self.count)

    def count(self, *_) -> None:
        self.forwards.value += torch.is_grad_enabled()

    def on_train_end(self, trainer, pl_module) -> None:
        self.handle.remove()
        assert self.forwards.value == 2 * trainer.global_step, self.forwards


STRATEGIES = {
    "one": ("auto", 1),
    "autocast": ("auto", 1),
    "ddp": ("ddp_fork", 2),
    "balanced": (partial(BalancedDDPStrategy, start_method="fork", shares="equal"), 2),
    "servers": (partial(ParameterServerStrategy, start_method="fork"), 2),
    "async": (partial(ParameterServerStrategy, start_method="fork", mode="async"), 1),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("one", "autocast", "servers") else pytest.param(name, marks=pytest.mark.cluster)
        for name in STRATEGIES
    ],
)
def test_each_strategy_trains_the_same_network_with_recomputation(name):
    strategy, ranks = STRATEGIES[name]
    common = {"network": Normalised, "max_epochs": 1}
    if name == "autocast":
        common |= {"precision": "bf16-mixed", "limit_train_batches": 3}
    make = (lambda: strategy) if isinstance(strategy, str) else strategy
    plain = train("plain", make(), ranks, **common)
    again = train("again", make(), ranks, callbacks=[ActivationCheckpointing(), Recomputes()], **common)
    assert_same_run(again, plain, 1e-12)


def test_the_predicted_peak_needs_no_trace_of_its_own(monkeypatch):
    traced, traces, peaks = tracing._traced_as, [], []  # noqa: SLF001

    def counted(network, training, sealed, tracer):
        traces.extend([network] if tracer is LeafTracer else [])
        return traced(network, training, sealed, tracer)

    monkeypatch.setattr(tracing, "_traced_as", counted)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 10)
    module = ImageClassifier(nn.Sequential(*layers), 10)
    module.example_input_array = torch.zeros(2, 1, 8, 8)
    images = torch.utils.data.TensorDataset(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.long))

    def predict(trainer, _):
        traces.clear()
        peaks.extend(predicted_memory(trainer, 2).peaks)
        assert traces == []

    noted = LambdaCallback(on_train_start=predict)
    trainer = quiet_trainer(callbacks=[ActivationCheckpointing(cuts=["2"]), noted], max_steps=1)
    trainer.fit(module, torch.utils.data.DataLoader(images, 2))
    assert len(peaks) == 1


class Whole(nn.Module):
    """A network that consists of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, images):
        with torch.no_grad():
            images = images.flatten(1)
            return self.linear(images)


def compiled() -> nn.Module:
    network = Normalised()
    network.compile()
    return network


def replaced() -> nn.Module:
    network = Normalised()
    network.forward = lambda images: images.flatten(1)[:, :10]
    return network


@pytest.mark.parametrize(
    ("network", "strategy", "options", "message"),
    [
        (Normalised, partial(HybridPipelineStrategy, stages=1), {}, "strategy hybrid_pipeline recomputes the"),
        (Normalised, None, {"cuts": []}, r"cuts=\[\]: name at least one module"),
        (
            Normalised,
            None,
            {"cuts": ["nothing"]},
            "ActivationCheckpointing: cuts: the network does not run a module or",
        ),
        (
            compiled,
            None,
            {},
            "Normalised is compiled as a whole, and cannot be cut into segments: leave out torch.comp",
        ),
        (replaced, None, {}, "the forward of Normalised was replaced by an assignment, and only the forward of its"),
        (Whole, None, {}, "ActivationCheckpointing: Whole cannot be cut anywhere: name another part of the module"),
    ],
)
def test_what_cannot_be_recomputed_is_refused_by_name(network, strategy, options, message):
    strategies = {} if strategy is None else {"strategy": strategy()}
    images = torch.utils.data.TensorDataset(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.long))

    def run() -> None:
        trainer = quiet_trainer(callbacks=[ActivationCheckpointing(**options)], max_steps=1, **strategies)
        trainer.fit(ImageClassifier(network(), 10), torch.utils.data.DataLoader(images, 2))

    with pytest.raises(ConfigurationError, match=message):
        run()


def test_a_fit_leaves_the_network_as_it_was():
    module = ImageClassifier(Normalised(), 10)
    images = torch.utils.data.TensorDataset(torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.long))
    before = list(module.state_dict()), vars(module.network).keys()
    callback = ActivationCheckpointing(cuts=["3"])
    for broken in (False, True):
        trainer = quiet_trainer(callbacks=[callback, *([Broken()] if broken else [])], max_steps=1)
        try:
            trainer.fit(module, torch.utils.data.DataLoader(images, 2))
        except ValueError:
            assert broken
        assert (list(module.state_dict()), vars(module.network).keys()) == before


class Broken(Callback):
    """A callback that fails in the first batch."""

    def on_train_batch_start(self, trainer, pl_module, *_) -> None:
        assert "forward" in vars(pl_module.network)
        raise ValueError("boom")
