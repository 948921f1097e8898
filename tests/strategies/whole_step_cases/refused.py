"""Cases that the documentation lists as refused: a run in several stages ends with an error that names the reason."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.strategies.whole_step_cases.base import CLASSES, Block, Classifier, case, classifier


class Cut(nn.Module):
    """A network whose own forward calls its parts, so that a cut passes through this code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), Block()
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.second(self.first(x)))


@case(cuts=("first", "second"), error="branches on the value of a tensor .* move this code into a submodule")
class BranchOnValues(Classifier):
    class Network(Cut):
        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            return self.head(self.second(x if x.mean() > 0 else -x))

    network = Network


@case(cuts=("first", "second"), error="takes the argument 'x' by keyword only")
class KeywordOnly(Classifier):
    class Network(Cut):
        def forward(self, *, x: Tensor) -> Any:
            return super().forward(x)

    network = Network

    def forward(self, x: Tensor) -> Any:
        return self.net(x=x)


@case(cuts=("first", "second"), error="the network has returned .* for an earlier batch of the same shapes")
class ShapeByValues(Classifier):
    """Returns the indices of the positive scores beside the scores."""

    class Network(Cut):
        def forward(self, x: Tensor) -> Any:
            scores = super().forward(x)
            return scores, torch.nonzero(scores > 0)

    network = Network

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores, _ = self(x)
        return F.cross_entropy(scores, y)


@case(error="0.1 is a SyncBatchNorm layer")
class SynchronisedStatistics(Classifier):
    def network(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SyncBatchNorm(8)), *classifier()[1:])


@case(error="sync_batchnorm=True", trainer={"sync_batchnorm": True})
class SynchronisedByTrainer(Classifier):
    pass


class Kept:
    """An object of a user's class."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class KeepingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.kept = Kept(x.mean())
        return x


@case(error="stores an object of the class Kept")
class StoredObject(Classifier):
    block = KeepingBlock


@case(error="forwards in several stages change box.product")
class SharedProduct(Classifier):
    """Blocks of two stages multiply one value."""

    def network(self) -> nn.Module:
        box = self.box = {"product": torch.ones(())}

        class Multiplying(Block):
            def forward(self, x: Tensor) -> Tensor:
                x = super().forward(x)
                box["product"] = box["product"] * (1 + x.detach().mean())
                return x

        return classifier(Multiplying)


class PenaltyOfGradients(Classifier):
    """Adds a penalty of the gradient with respect to a weight."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().step_loss(x, y)
        (gradient,) = torch.autograd.grad(loss, self.net[0].weight, create_graph=True)
        return loss + gradient.square().sum()


@case(error="create_graph=True.*draws random numbers")
class PenaltyWithDropout(PenaltyOfGradients):
    def network(self) -> nn.Module:
        return classifier(middle=nn.Dropout(0.5))


@case(error=r"access to the storage needs the values of tensor\((0|6).weight")
class StorageOfWeights(Classifier):
    def on_train_batch_end(self, *_: Any) -> None:
        self.history += [float(layer.weight.data_ptr() != 0) for layer in (self.net[0], self.net[6])]


@case(error="allreduce of .* in a group of . processes")
class SummedInHook(Classifier):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad)


@case(epochs=1, then=("validate",), error="sends stored values: this rank has a hook that .* all ranks must register")
class StoredOnOneRank(Classifier):
    """Registers a hook that stores a value, on one rank and before the last batch of a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.global_rank == 0:
            self.net[0].register_forward_hook(lambda module, args, output: self.kept.update(level=output.abs().mean()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])


@case(error="a hook that was registered after the first step, and not on all ranks, a stage needs the whole batch")
class MixingOnOneRank(Classifier):
    """Centres the activations of the batch by a hook on one rank, from the second step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 1 and self.trainer.global_rank == 0:
            self.net[0].register_forward_hook(lambda module, args, output: output - output.mean(0, keepdim=True))
