"""Weight decay of norms and biases, learning rates of the layers, and the schedule of learning rates."""

import math

import pytest
import timm
import torch
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.networks import SmallCNN
from cnnstrategies.schedules import WarmupCosine
from tests.conftest import PlainCNN


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
def test_each_layer_has_a_fraction_of_the_next_layers_rate():
    network = timm.create_model("test_vit", num_classes=10)
    model = ImageClassifier(network, 10, sgd, decay_norms_and_biases=False, layer_lr_decay=0.5)
    model.extra = nn.Parameter(torch.zeros(2, 2))
    groups = model.configure_optimizers().param_groups
    options = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(options) == len(list(model.parameters()))
    assert options[id(model.extra)] == (0.1, 0.01)
    blocks, undecayed = len(network.blocks), {"pos_embed", "cls_token"}
    for name, parameter in network.named_parameters():
        layer, *rest = name.split(".")
        depth = blocks - int(rest[0]) if layer == "blocks" else {"norm": 1, "head": 0}.get(layer, blocks + 1)
        decay = 0.0 if parameter.ndim < 2 or name in undecayed else 0.01
        assert options[id(parameter)] == (pytest.approx(0.1 * 0.5**depth), decay), name
    decayed = ImageClassifier(network, 10, sgd, layer_lr_decay=0.5).configure_optimizers().param_groups
    assert {group["weight_decay"] for group in decayed} == {0.01}


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


@pytest.mark.light
def test_layers_that_would_have_the_same_rate_are_refused(monkeypatch):
    with pytest.raises(ConfigurationError, match=r"layer_lr_decay=1.5 is outside \(0, 1\]"):
        ImageClassifier(PlainCNN(), 10, layer_lr_decay=1.5)
    with pytest.raises(ConfigurationError, match="timm does not know the layers of PlainCNN: use a network of timm"):
        ImageClassifier(PlainCNN(), 10, layer_lr_decay=0.5)
    network = timm.create_model("test_vit", num_classes=10)
    cyclic = lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)  # noqa: E731
    model = ImageClassifier(network, 10, sgd, cyclic, layer_lr_decay=0.5)
    with pytest.raises(ConfigurationError, match=r"=0\.5: OneCycleLR sets the same learning rate for all layers"):
        model.configure_optimizers()
    network.requires_grad_(False).head.requires_grad_(True)
    with pytest.raises(ConfigurationError, match="no effect, because all trained parameters of VisionTransformer are"):
        model.configure_optimizers()
    monkeypatch.setattr("cnnstrategies.models.network_module.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"layer_lr_decay=0\.5 needs timm, .*: pip install timm"):
        ImageClassifier(network, 10, layer_lr_decay=0.5)
