"""torchvision's networks with the same layers, and classifiers of a thousandth of the parameters."""

from torch import nn
from torchvision import models


def vgg16(weights: None = None) -> nn.Module:
    network = models.VGG(models.vgg.make_layers(models.vgg.cfgs["D"]), init_weights=False)
    network.classifier[0] = nn.Linear(512 * 7 * 7, 8)
    network.classifier[3] = nn.Linear(8, 16)
    network.classifier[6] = nn.Linear(16, 1000)
    return network


def alexnet(weights: None = None) -> nn.Module:
    network = models.alexnet()
    network.classifier[1] = nn.Linear(256 * 6 * 6, 8)
    network.classifier[4] = nn.Linear(8, 16)
    network.classifier[6] = nn.Linear(16, 1000)
    return network
