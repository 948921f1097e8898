"""The outer optimizer of workers that make outer steps each on its own."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override


class DelayedNesterov(Optimizer):
    """SGD on differences that come one by one, with the Nesterov momentum of all that come in a round.

    "Delayed Nesterov", algorithm 3 of Liu et al., "Asynchronous Local-SGD Training for Language Modeling" (2024), with
    c = 0. With momentum at each difference, those of the slow would be added to a velocity that the fast have made of
    the same weights. So each moves the weights by its share alone, and once as many have come as there are workers the
    velocity is renewed with their mean, and moves the weights. Where all of a round began with the same weights that is
    one step of :class:`torch.optim.SGD` with Nesterov momentum on their mean.

    Args:
        params: What is optimized.
        lr: Learning rate.
        momentum: Of the velocity; 0 for none.
        workers: Differences of a round; may change while it trains.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1.0, momentum: float = 0.0, workers: int = 1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "workers": workers})

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One update with the differences that have come.

        Args:
            closure: Not used: differences come from elsewhere.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["momentum"], int(group["workers"]))

    def _update(self, parameter: Tensor, difference: Tensor, lr: float, momentum: float, workers: int) -> None:
        parameter.add_(difference, alpha=-lr / workers)
        if not momentum:
            return
        state = self.state[parameter]
        if "sum" not in state:  # A checkpoint of common outer steps has the velocity alone.
            state["sum"], state["count"] = torch.zeros_like(parameter), 0
        state["sum"].add_(difference)
        state["count"] += 1
        if state["count"] >= workers:
            velocity = state.get("momentum_buffer")
            velocity = torch.zeros_like(parameter) if velocity is None else velocity
            state["momentum_buffer"] = velocity.mul_(momentum).add_(state["sum"], alpha=1 / state["count"])
            parameter.add_(state["momentum_buffer"], alpha=-lr * momentum)
            state["sum"].zero_()
            state["count"] = 0
