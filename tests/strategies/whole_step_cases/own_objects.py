"""Cases of objects that users keep beside tensors: random generators, iterators, and the state of an optimizer."""

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.strategies.whole_step_cases.base import Classifier, case, labelled_images


@case(epochs=1, samples=28)
class OwnRandomness(Classifier):
    """Draws with generators of its own before the network is called, and takes images from an iterator of its own.

    A trial of the step, which only one rank makes, must not draw from them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.torch_generator = torch.Generator().manual_seed(1)
        self.numpy_generator = np.random.default_rng(2)
        self.old_numpy, self.python = np.random.RandomState(3), random.Random(4)
        self.numbers, self.weights = itertools.count(), iter([0.5, 0.6, 0.7, 0.8])
        images = torch.stack([image for image, _ in labelled_images()])
        self.images = (part for part in images.split(4))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x[torch.randperm(len(x), generator=self.torch_generator)] + 0.1 * self.numpy_generator.normal()
        x = x * (1 + 0.1 * self.old_numpy.rand()) + 0.1 * self.python.random() + 0.01 * next(self.numbers)
        scores = self(torch.cat([x, next(self.images)]))[: len(y)]
        kept = torch.bernoulli(scores.detach().sigmoid(), generator=self.torch_generator)
        return F.cross_entropy(scores * next(self.weights) * (0.5 + kept), y)


@case(epochs=1, samples=28)
class RestoredState(Classifier):
    """Reads the optimizer's state, and goes back to an earlier one."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        if batch_idx == 1:
            self.kept = copy.deepcopy(optimizer.state_dict())
        if batch_idx == 2:
            optimizer.load_state_dict(self.kept)
            optimizer.state[self.net[0].weight]["exp_avg"].mul_(0.5)
        self.history += [float(s["step"]) + float(s["exp_avg"].norm()) for s in optimizer.state.values()]


class RateOfLossOptimizer(torch.optim.Optimizer):
    """Makes smaller steps if the loss is large."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        rate = 1 / (1 + float(loss))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * rate)
        return loss


@case(epochs=1, samples=28)
class RateOfLoss(Classifier):
    """The optimizer reads the value of the loss in its step."""

    def configure_optimizers(self) -> Any:
        return RateOfLossOptimizer(self.parameters(), 0.1)
