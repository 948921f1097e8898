"""Tests of users' hooks under a pipeline: results equal one device, or the hook is refused by name."""

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import grad_norm
from ranks import run_ranks
from test_pipeline_ways_to_write import CLASSES, Module, differ, fit
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm, parameters_to_vector
from torch.optim.swa_utils import AveragedModel

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import HybridPipelineStrategy


class Own(Module):
    cut = "0.2"
    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Dropout(0.0))
        self.net = nn.Sequential(body, nn.Flatten(), nn.Linear(64, CLASSES))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


class EachByItself(Own):
    """A module with common hooks that handle parameters one by one, in loops or by a layer's name or position."""

    def on_train_epoch_start(self) -> None:
        next(self.net.children())[-3].requires_grad_(self.current_epoch > 0)
        self.net[0][-1].p = 0.0

    def on_after_backward(self) -> None:
        if any(not torch.isfinite(p.grad).all() for p in self.parameters() if p.grad is not None):
            self.zero_grad()
        for parameter in self.net[0][0].parameters():
            parameter.grad = None if self.current_epoch else parameter.grad * 0.5
        for layer in self.net.modules():
            if isinstance(layer, nn.Conv2d) and layer.bias.grad is not None:
                layer.bias.grad[layer.bias.grad.abs() < 1e-3] = 0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:  # Adaptive clipping, like NFNets.
                parameter.grad.mul_((0.1 * parameter.detach().norm() / parameter.grad.norm()).clamp(max=1))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")
        clip_grad_value_(self.parameters(), 0.02)

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        optimizer.param_groups[0]["lr"] = 0.5 / (1 + self.global_step)
        optimizer.step(closure=closure)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for layer in (self.net[0], *self.net[1:]):
                for parameter in layer.parameters():
                    parameter.clamp_(-0.3, 0.3)


def test_hooks_of_single_parameters_act_as_on_one_device() -> None:
    assert differ((EachByItself,), [1, 1], 2) == {}


class Asking(Callback):
    """A callback that computes values that need all stages, and keeps the error messages."""

    def __init__(self, module: Own) -> None:
        self.average = AveragedModel(module.net)
        self.copy = copy.deepcopy(module.net)
        self.messages: dict[str, str] = {}

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        parameters = list(module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.ask("clip_grad_norm_", lambda: clip_grad_norm_(parameters, 1.0))
        self.ask("get_total_norm", lambda: get_total_norm(gradients))
        self.ask("grad_norm", lambda: grad_norm(module, 2))
        self.ask("sum", lambda: sum(gradient.square().sum() for gradient in gradients))
        self.ask("in place", lambda: [torch.zeros(()).add_(gradient.sum()) for gradient in gradients])
        self.ask("item", lambda: max(gradient.abs().max().item() for gradient in gradients))
        self.ask("sort", lambda: torch.cat([gradient.flatten() for gradient in gradients]).sort())
        self.ask("truth", lambda: torch.stack([gradient.isnan().any() for gradient in gradients]).any())

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        net = module.net
        pairs = list(zip(self.copy.parameters(), net.parameters(), strict=False))
        self.ask("vector", lambda: parameters_to_vector(net.parameters()))
        self.ask("average", lambda: self.average.update_parameters(net))
        self.ask("by hand", lambda: [old.data.mul_(0.9).add_(new.data) for old, new in pairs])
        self.ask("copy", lambda: copy.deepcopy(module))
        self.ask("state", lambda: net.state_dict())
        self.ask("first", lambda: net[0][0].weight)
        self.ask("last", lambda: net[-1].weight)
        self.ask("call", lambda: net[0](torch.zeros(1, 1, 6, 6)))
        self.ask("whole", lambda: trainer.strategy.lightning_module_state_dict())

    def ask(self, name: str, do: Callable[[], Any]) -> None:
        try:
            with torch.no_grad():
                do()
            self.messages[name] = ""
        except ConfigurationError as error:
            self.messages[name] = str(error)


class Asked(Own):
    def configure_callbacks(self) -> Any:
        self.asking = Asking(self)
        return [self.asking]


def answers() -> dict[str, str]:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    model, *_ = fit(Asked, HybridPipelineStrategy(cuts=[Own.cut], microbatches=2), 2)
    messages: dict[str, str] = model.asking.messages
    return messages


def test_a_hook_that_needs_all_stages_is_refused_by_name() -> None:
    first, last = run_ranks(2, answers)
    for messages in (first, last):
        for name in ("clip_grad_norm_", "get_total_norm", "grad_norm", "sum", "sort"):
            assert messages[name].startswith("Asking.on_before_optimizer_step computes with net."), name
            assert "set Trainer(gradient_clip_val=...) or call self.clip_gradients" in messages[name]
        assert "Asking.on_before_optimizer_step makes numbers of net." in messages["item"]
        assert "Asking.on_train_batch_end computes with net." in messages["vector"]
        for name in ("average", "by hand"):
            assert "and a parameter of another module" in messages[name], name
            assert "use lightning.pytorch.callbacks.EMAWeightAveraging" in messages[name]
        assert "self.net is copied: " in messages["copy"]
        assert "takes the state dict of self.net" in messages["state"]
        assert "self.net.0 is called by itself" in messages["call"]
        assert not any(messages[name] for name in ("in place", "truth", "whole"))
    assert not first["first"]
    assert not last["last"]
    assert "self.net.2.weight is of another stage" in first["last"]
    assert "self.net.0.0.weight is of another stage" in last["first"]
