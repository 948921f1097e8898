"""Which parameters are decayed, how fast each layer learns, and the schedule of both."""

import functools
import math

import pytest
import torch
import torchvision
from conftest import PlainCNN
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.models.network_module import layer_depths
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


@pytest.mark.light
def test_each_layer_learns_at_a_share_of_the_next_ones_rate():
    model = ImageClassifier(PlainCNN(), 10, sgd, layer_lr_decay=0.5, decay_norms_and_biases=False)
    rates = {id(p): group["lr"] for group in model.configure_optimizers().param_groups for p in group["params"]}
    for layer, rate in ((0, 0.025), (2, 0.05), (5, 0.1)):
        for parameter in model.network[layer].parameters():
            assert rates[id(parameter)] == pytest.approx(rate)


@pytest.mark.light
@pytest.mark.parametrize(
    ("name", "layers"),
    [("resnet18", 10), ("vgg11_bn", 11), ("mobilenet_v3_small", 15), ("squeezenet1_1", 10), ("convnext_tiny", 23)],
)
def test_layers_are_the_networks_blocks_and_norms_are_not_layers(name, layers):
    with torch.device("meta"):
        network = torchvision.models.get_model(name, weights=None)
        wrapped = nn.Module()
        wrapped.net = network
    depths = layer_depths(network)
    parameters = list(network.parameters())
    assert depths.keys() == {id(p) for p in parameters}
    assert set(depths.values()) == set(range(layers))
    assert depths[id(parameters[0])] == layers - 1
    assert depths[id(parameters[-1])] == 0
    assert layer_depths(wrapped) == depths


def test_warmup_and_cosine_follow_the_formula_for_each_group():
    schedule = functools.partial(WarmupCosine, total=20, warmup=4, start=0.1, end=0.001)
    model = ImageClassifier(PlainCNN(), 10, sgd, schedule, layer_lr_decay=0.5)
    scheduler = model.configure_optimizers()["lr_scheduler"]["scheduler"]
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
        (lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=9), "layer_lr_decay=0.5 and OneCycleLR"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ImageClassifier(PlainCNN(), 10, sgd, scheduler, layer_lr_decay=0.5).configure_optimizers()
