"""Cases of layers and hooks that keep values in a forward, and of buffers that forwards update."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.strategies.whole_step_cases.base import Block, Classifier, StemBodyHead, case


class KeepingBlock(Block):
    """A residual block that keeps a value for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.term: Any = None

    def value(self, y: Tensor) -> Tensor:
        return y.square().mean()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        self.term = self.value(y)
        return x + y


class SumBlock(KeepingBlock):
    def value(self, y: Tensor) -> Tensor:
        return 1e-3 * y.square().sum()


class WeightBlock(KeepingBlock):
    def value(self, y: Tensor) -> Tensor:
        return self.conv.weight.square().sum()


class RowsBlock(KeepingBlock):
    def value(self, y: Tensor) -> Tensor:
        return y.square().mean((1, 2, 3))


class DeviationBlock(KeepingBlock):
    def value(self, y: Tensor) -> Tensor:
        return y.std()


class Kept(Classifier):
    """Adds what its blocks have kept to the loss."""

    block = KeepingBlock

    def terms(self) -> list[Tensor]:
        return [module.term for module in self.net.modules() if isinstance(module, KeepingBlock)]

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y) + 0.1 * sum(term.mean() for term in self.terms())


@case()
class KlTerm(Kept):
    pass


@case()
class LossTimesKl(Kept):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        return loss * (1 + self.terms()[0])


@case()
class KeptSums(Kept):
    block = SumBlock


@case()
class KeptWeights(Kept):
    block = WeightBlock


@case()
class KeptRows(Kept):
    block = RowsBlock


@case()
class KeptDeviations(Kept):
    """A deviation over a batch is not a mean of the deviations of its parts."""

    block = DeviationBlock


@case()
class KeptDistance(Kept):
    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y) + sum((term - 0.01).abs() for term in self.terms())


class CallsBlock(Block):
    """A block whose output depends on how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


@case()
class CountedCalls(Classifier):
    block = CallsBlock


class MeanAfter(nn.Module):
    """A layer that subtracts a running mean, which it updates afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean.view(1, -1, 1, 1)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
            self.seen += len(x)
        return y


class NewMean(MeanAfter):
    """The same, with a new tensor for the buffer in each call."""

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean.view(1, -1, 1, 1)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
        return y


@case()
class MeanUpdatedAfter(Classifier):
    middle = MeanAfter


@case()
class BufferReplaced(Classifier):
    middle = NewMean


@case()
class ReadActivations(Classifier):
    """A hook reads the mean activation as a number, and logs it."""

    def __init__(self) -> None:
        super().__init__()
        self.activations: dict[str, float] = {}
        self.net[1].register_forward_hook(self.read)

    def read(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.activations["block"] = output.detach().abs().mean().item()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("activation", self.activations["block"])


@case()
class CountedGradients(Classifier):
    """Tensor hooks record the norms of gradients, and the step reads how many hooks have run."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[str, float] = {}
        self.count = 0
        for name, parameter in self.net.named_parameters():
            parameter.register_hook(self.recorder(name))

    def recorder(self, name: str) -> Any:
        def record(gradient: Tensor) -> None:
            self.norms[name] = gradient.norm().item()
            self.count += 1

        return record

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.history += [float(self.count), *(self.norms[name] for name in sorted(self.norms))]


@case()
class HookOfNetwork(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.register_forward_hook(lambda module, inputs, output: output * 2)
        self.net.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))


@case()
class HookInEpoch(Classifier):
    """Adds a hook to a block in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[3].register_forward_hook(lambda module, inputs, output: output * 1.5)


@case()
class NestedPenalties(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []
        self.net[1].conv.register_forward_hook(lambda module, inputs, output: self.norms.append(output.abs().mean()))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.norms.clear()
        return F.cross_entropy(self.net(x), y) + sum(self.norms)


@case()
class ViewOfWeights(Classifier):
    """Keeps a view of a weight, made before training, and logs its mean."""

    def on_fit_start(self) -> None:
        self.view = self.net[0].weight.data.view(-1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("mean_weight", self.view.mean())


@case()
class DrawnWeights(Classifier):
    """Draws all weights anew before training, by the layers' class."""

    def on_fit_start(self) -> None:
        self.net.apply(self.draw)
        self.history += [parameter.std().item() for parameter in self.net.parameters() if parameter.dim() > 1]

    def draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.orthogonal_(module.weight)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.uniform_(module.bias)


@case()
class CopiedAverage(Classifier):
    """Averages the weights in a copy that is made when training starts, and trains with it at the end."""

    def on_fit_start(self) -> None:
        self.average = [copy.deepcopy(self.net)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, parameter in zip(self.average[0].parameters(), self.net.parameters(), strict=True):
            average.data.mul_(0.9).add_(parameter.data, alpha=0.1)

    def on_train_end(self) -> None:
        self.net.load_state_dict(self.average[0].state_dict())


@case()
class HalvedAtEnd(Classifier):
    def on_train_end(self) -> None:
        for parameter in self.net.parameters():
            parameter.data = parameter.data * 0.5


class FeatureNet(StemBodyHead):
    """A network that keeps its features for the step."""

    def __init__(self) -> None:
        super().__init__()
        self.features: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.features = self.body(self.stem(x)).mean((2, 3))
        return self.head(self.features)


@case(cuts=("stem", "body"))
class KeptFeatures(Classifier):
    """The network's own forward stores its features, and the step decorrelates them over the batch."""

    network = FeatureNet

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().step_loss(x, y)
        return loss + 0.1 * torch.cov(self.net.features.T).square().sum()


class MapsNet(FeatureNet):
    """A network whose own forward builds a list of feature maps."""

    def forward(self, x: Tensor) -> Tensor:
        self.maps = []
        self.maps.append(self.stem(x))
        self.maps.append(self.body(self.maps[-1]))
        self.sizes = {"maps": self.maps[-1].shape, "norm": self.maps[0].square().mean()}
        return self.head(self.maps[-1].mean((2, 3)))


@case(cuts=("stem", "body"))
class KeptMaps(Classifier):
    network = MapsNet

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        self.history += [*map(float, self.net.sizes["maps"]), float(self.net.sizes["norm"])]
        return loss + 0.1 * sum(F.mse_loss(maps, maps.flip(-1)) for maps in self.net.maps)
