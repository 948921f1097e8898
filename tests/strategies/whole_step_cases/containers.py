"""Cases of networks that are not one plain Sequential, and of parameters outside the divided network."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.strategies.whole_step_cases.base import CLASSES, Block, Classifier, Dense, StemBodyHead, case, classifier


@case()
class LearnedNormalisation(Classifier):
    """A parameter is applied to the images before the network."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 3, 1, 1))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x * self.gain), y)


class MinibatchBlock(Block):
    """A residual block that adds the standard deviation over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.std(0, keepdim=True)


@case()
class MinibatchDeviation(Classifier):
    block = MinibatchBlock


# The cases from here on are not in the reproductions or the prototypes.


class Routed(nn.Module):
    """A network whose layers are in a ModuleDict and a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"stem": nn.Conv2d(3, 8, 3, 2, 1), "head": nn.Linear(32, CLASSES)})
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.gates = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts["stem"](x)
        for block, gate in zip(self.blocks, self.gates, strict=True):
            x = gate * block(x)
        return self.parts["head"](F.adaptive_avg_pool2d(x, 2).flatten(1))


@case(cuts=("blocks.0", "blocks.1"))
class RoutedLayers(Classifier):
    network = Routed

    def on_after_backward(self) -> None:
        self.log_dict({f"gate_{number}": gate.item() for number, gate in enumerate(self.net.gates)})


class Twice(StemBodyHead):
    """A network that calls the same block twice, in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.shared(self.stem(x)))
        return self.head(self.body(x).mean((2, 3)))


@case(cuts=("stem", "body"))
class SharedBlock(Classifier):
    network = Twice


@case(cuts=("3", "4"))
class TiedWeights(Classifier):
    """Two blocks of the same stage share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].conv.weight = self.net[1].conv.weight

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.net[3].conv.weight is self.net[1].conv.weight


@case()
class NumberedLayers(Classifier):
    """Gives each layer a learning rate and a penalty by its number."""

    def configure_optimizers(self) -> Any:
        groups = []
        for index in range(len(self.net)):
            parameters = list(self.net[index].parameters())
            if parameters:
                groups.append({"params": parameters, "lr": 0.1 * 0.8 ** (len(self.net) - index)})
        return torch.optim.SGD(groups, momentum=0.9)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        for index, layer in enumerate(self.net):
            for parameter in layer.parameters():
                loss = loss + 1e-3 * index * parameter.abs().sum()
        return loss


@case()
class SpectralNorm(Classifier):
    """Each forward in training updates vectors of the power iteration."""

    def network(self) -> nn.Module:
        net = classifier()
        parametrizations.spectral_norm(net[1].conv)
        parametrizations.spectral_norm(net[6])
        return net


@case()
class WeightNorm(Classifier):
    def network(self) -> nn.Module:
        net = classifier()
        for index in (1, 3):
            parametrizations.weight_norm(net[index].conv)
        return net

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("scale", self.net[3].conv.parametrizations.weight.original0.mean())


@case()
class LstmHead(Dense):
    """Reads the network's output as a sequence, with an LSTM outside the network."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        sequence = self.net(x).mean(2).transpose(1, 2)
        outputs, (hidden, _) = self.lstm(sequence)
        return self.head(outputs[:, -1] + outputs.mean(1)) + 0.1 * hidden.sum()


@case()
class UncertaintyWeights(Classifier):
    """Weighs two losses by learned variances."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        losses = torch.stack([F.cross_entropy(scores, y), scores.square().mean()])
        self.log("first_weight", self.log_variances[0].neg().exp())
        return (losses * torch.exp(-self.log_variances) + self.log_variances).sum()


class ManyOutputs(nn.Module):
    """A network with a dict of outputs of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3, 2, 1), Block()
        self.up = nn.ConvTranspose2d(8, 2, 2, 2)
        self.heads = nn.ModuleList([nn.Linear(8, CLASSES), nn.Linear(8, 1)])

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = self.body(self.stem(x))
        pooled = features.mean((2, 3))
        return {"maps": self.up(features), "scores": [head(pooled) for head in self.heads], "pooled": pooled}


@case(cuts=("stem", "body"))
class SeveralOutputs(Classifier):
    network = ManyOutputs

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        outputs = self.net(x)
        classes, value = outputs["scores"]
        loss = F.cross_entropy(classes, y) + F.cross_entropy(outputs["maps"], (x.sum(1) > 0).long())
        return loss + F.smooth_l1_loss(value.squeeze(1), y.to(value)) + 0.01 * outputs["pooled"].norm()


@case(microbatches=1)
class BatchNormalisation(Classifier):
    """Has batch normalisation, whose momentum and whose mode a hook changes."""

    def network(self) -> nn.Module:
        return classifier(middle=nn.BatchNorm2d(8))

    def on_train_epoch_start(self) -> None:
        for module in self.net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.3
                if self.current_epoch == 1:
                    module.eval()


@case()
class ReplacedHead(Classifier):
    """Replaces the last layer in the hook `setup`, which runs in each process."""

    def setup(self, stage: str) -> None:
        self.net[6] = nn.Linear(32, CLASSES)


@case(cuts=("net.1", "net.3"), submodule="model")
class WrappedNetwork(Classifier):
    """Has its network inside a wrapper with a forward of its own, and calls parts of it by other names."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Wrapper(self.net)
        del self.net

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, scale=0.5)

    def on_after_backward(self) -> None:
        self.model.last.weight.grad.mul_(0.5)


class Wrapper(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("mean", torch.full((1, 3, 1, 1), 0.1))

    @property
    def last(self) -> Any:
        return self.net[-1]

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.net((x - self.mean) * scale)


class Skips(nn.Module):
    """A small U-Net: values skip stages."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 8, 3, 2, 1)
        self.bottom, self.up, self.leave = Block(), nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.enter(x))
        low = self.bottom(F.relu(self.down(wide)))
        return self.leave(torch.cat([wide, self.up(low)], 1))


@case(cuts=("down", "bottom"))
class SmallUnet(Classifier):
    network = Skips

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        target = x.argmax(1).masked_fill(x[:, 0] > 0.3, 255)
        return F.cross_entropy(self.net(x), target, ignore_index=255)
