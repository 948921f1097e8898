"""Weight decay of norms and biases, and the schedule of learning rates."""

import math

import pytest
import torch
from conftest import PlainCNN
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.networks import SmallCNN
from cnnstrategies.schedules import WarmupCosine


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)


def rates_of(scheduler, steps):
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.light
def test_norms_and_biases_are_not_decayed_if_asked_for():
    network = SmallCNN(10)
    model = ImageClassifier(network, 10, sgd, decay_norms_and_biases=False)
    groups = model.configure_optimizers().param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert len(decay) == len(list(network.parameters()))
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            plain = isinstance(module, nn.BatchNorm2d) or name == "bias"
            assert decay[id(parameter)] == (0.0 if plain else 0.01), (module, name)
    (group,) = ImageClassifier(network, 10, sgd).configure_optimizers().param_groups
    assert group["weight_decay"] == 0.01


def test_warmup_and_cosine_follow_the_formula_for_each_group():
    groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in (0.025, 0.05, 0.1)]
    scheduler = WarmupCosine(torch.optim.SGD(groups), total=20, warmup=4, start=0.1, end=0.001)
    for epoch, rates in enumerate(rates_of(scheduler, 21)):
        for base, rate in zip((0.025, 0.05, 0.1), rates, strict=True):
            ramp = base * (0.1 + 0.9 * epoch / 4)
            cosine = 0.001 + (base - 0.001) * (1 + math.cos(math.pi * (epoch - 4) / 16)) / 2
            assert rate == pytest.approx(ramp if epoch < 4 else cosine)
    again = WarmupCosine(sgd(PlainCNN().parameters()), 5, warmup=0)
    assert [rate for (rate,) in rates_of(again, 2)] == pytest.approx([0.1, 0.1 * (1 + math.cos(math.pi / 5)) / 2])


@pytest.mark.light
def test_a_mistake_is_refused():
    for scheduler, message in (
        (lambda optimizer: WarmupCosine(optimizer, 5, warmup=5), "warmup=5 and total=5"),
        (lambda optimizer: WarmupCosine(optimizer, 5, 1, start=0.0), "start=0.0 is outside"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ImageClassifier(PlainCNN(), 10, sgd, scheduler).configure_optimizers()
