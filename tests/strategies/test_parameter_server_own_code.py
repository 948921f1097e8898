"""Tests of modules whose code reads and changes gradients and weights: results equal one device, or are refused."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.callbacks.throughput import SamplesPerSecond
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.checks import watch_gradients
from cnnstrategies.strategies.parameter_server.observer_hooks import gradient_observers, later_readers, weight_observers
from cnnstrategies.verifying import verify
from tests.conftest import quiet_trainer
from tests.strategies.digit_runs import train

SAMPLES, STEPS = 32, 4


class Network(nn.Module):
    """A network that reads weights in every way: by calls of layers, without a call, in hooks, and in a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.utils.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.frozen = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)  # The output projection is never called.
        self.norm = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.stem(x).tanh()).flatten(2).mT
        x = self.norm(self.attention(x, x, x)[0].mean(1))
        return F.linear(F.normalize(x), F.normalize(self.head.weight))  # Like ArcFace.


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Network().double()
        self.teacher = copy.deepcopy(self.net.head).requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.net.head.weight, 0.1)  # Like BYOL and DINO.
        penalty = self.net.attention.in_proj_weight.square().sum()
        return F.cross_entropy(5 * self.net(batch[0]), batch[1]) + 1e-2 * penalty

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.5)


class Hooks(Module):
    """A module with hooks between backward and the optimizer's step, and after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.net.head).requires_grad_(False)

    def on_after_backward(self) -> None:
        for parameter in self.net.stem.parameters():
            parameter.grad *= 0.1

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.net.head.weight.grad = None if self.global_step == 1 else self.net.head.weight.grad
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.global_step)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.average.weight.lerp_(self.net.head.weight, 0.5)


class Following(Module):
    """A module with an average of weights that is also a parameter of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros_like(self.net.head.weight))

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.average.data = 0.9 * self.average.data + 0.1 * self.net.head.weight.data
        return super().training_step(batch, index)


class SecondSteps(Module):
    """A module whose optimizer steps in every second batch only, like GANs."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        if index % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class Norms(Module):
    """A module that reads gradients after the optimizer's step, and keeps them over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Parameter(torch.zeros(3, STEPS, dtype=torch.float64), requires_grad=False)

    def _note(self, row: int, column: int) -> None:
        gradients = [parameter.grad for parameter in self.net.parameters() if parameter.grad is not None]
        with torch.no_grad():
            self.norms[row, column] = sum(float(gradient.sum()) for gradient in gradients)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self._note(0, index)
        return super().training_step(batch, index)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self._note(1, self.trainer.fit_loop.batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self._note(2, index)

    def optimizer_zero_grad(self, epoch: int, index: int, optimizer: torch.optim.Optimizer) -> None:
        if index % 2:
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.5)


class Scaled(Callback):
    def on_after_backward(self, trainer: Trainer, module: LightningModule) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def loader(batch: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, 6, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(images, torch.randint(5, (SAMPLES,), generator=generator)), batch)


def test_gradients_stay_until_the_next_backward() -> None:
    """The sums of gradients are part of the module's state. A single worker's gradients are the whole gradients."""
    verdict = verify(Norms(), loader(8), "parameter_server", devices=1, steps=STEPS)
    assert verdict.equal, verdict


@pytest.mark.parametrize(("kind", "callbacks"), [(Following, ()), (Hooks, (Scaled(),)), (SecondSteps, ())])
def test_a_modules_own_changes_equal_one_device(kind: type[Module], callbacks: tuple[Callback, ...]) -> None:
    """The module changes weights and gradients in hooks, in the step and in the network."""
    verdict = verify(kind(), loader(4), "parameter_server", callbacks=callbacks, steps=STEPS)
    assert verdict.equal, verdict


class Diverged(Module):
    """A module whose weights become NaN, with a hook that might change weights."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch, index) * float("nan")

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def test_weights_that_are_nan_do_not_count_as_changed() -> None:
    module = Diverged()
    quiet_trainer(ParameterServerStrategy(start_method="fork"), 1, max_steps=3).fit(module, loader(4))
    assert module.net.head.weight.isnan().all()


class Clips(Module):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Clamped(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.05, 0.05)


class Sparse(Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.ones(3, 5, dtype=torch.float64))

    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch, index) + F.embedding(torch.tensor([1]), self.words, sparse=True).sum()


class Rewritten(Module):
    def training_step(self, batch: Any, index: int) -> Tensor:
        with torch.no_grad():
            self.net.head.weight.div_(2)
        return super().training_step(batch, index)


class Replaced(Module):
    def training_step(self, batch: Any, index: int) -> Tensor:
        self.net.head.weight.data = self.net.head.weight.data * 1.0
        return super().training_step(batch, index)


class Sudden(Module):
    """A module that uses a weight without its layer, but not in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False).double()

    def training_step(self, batch: Any, index: int) -> Tensor:
        scale = self.scale(torch.ones(1, dtype=torch.float64)) if index < 2 else self.scale.weight
        return super().training_step(batch, index) * scale.sum()


class Unseen(Module):
    """A module whose hook runs after the strategy's hook."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == 0:
            self.net.head.weight.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
        return super().training_step(batch, index)


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


class ReadsState(Module):
    def on_train_batch_end(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.state[self.net.head.weight]["momentum_buffer"].mul_(0.5)


class Rollback(Callback):
    """A callback that loads weights in the middle of training."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        trainer.strategy.load_model_state_dict({"state_dict": module.state_dict()})


@pytest.mark.parametrize(
    ("kind", "callbacks", "devices", "message"),
    [
        (Clips, (), 2, "Clips.on_before_optimizer_step computes _foreach_norm of the"),
        (Clamped, (), 1, "(maybe by Clamped.on_train_batch_end): the servers hold the parameters"),
        (Sparse, (), 1, "the gradient of words is sparse"),
        (Rewritten, (), 1, "net.head.weight was changed between two steps, or in training_step: the servers"),
        (Replaced, (), 1, "net.head.weight was changed between two steps, or in training_step: the servers"),
        (Sudden, (), 1, "scale.weight was used although the forward of its own module did not run"),
        (Unseen, (), 1, "the gradient of net.head.weight was changed after backward"),
        (ReadsState, (), 1, "the optimizer's state is read during training, but with strategy parameter_server"),
        (Module, (Rollback(),), 1, "weights were loaded in the middle of training"),
    ],
)
def test_changes_that_servers_cannot_follow_are_refused(
    kind: type[Module], callbacks: tuple[Callback, ...], devices: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        verify(kind(), loader(8), "parameter_server", devices=devices, callbacks=callbacks, steps=STEPS)


def test_a_single_worker_may_clip_its_gradient() -> None:
    verdict = verify(Clips(), loader(8), "parameter_server", devices=1, steps=1)
    assert verdict.equal, "a single worker's gradients are the whole gradients"


class StopsAlone(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_rank == 1 and trainer.global_step == 2


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"combine_per_node": True}, marks=pytest.mark.cluster)], ids=["sync", "combined"]
)
def test_a_worker_that_stops_alone_is_named_and_not_waited_for(options: dict[str, Any]) -> None:
    strategy = ParameterServerStrategy(**options, timeout=6, start_method="fork")
    with pytest.raises(
        AssertionError, match="worker 0 in `step 2` for worker 1: one worker has finished an epoch or its training"
    ):
        train("run", strategy, 2, callbacks=[StopsAlone()], max_epochs=1)


class Asks(Callback):
    """A callback that computes with gradients in many ways and keeps the error messages."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        gradients = [parameter.grad for parameter in module.parameters()]
        first, second = gradients
        things: dict[str, Callable[[], object]] = {
            "scaled": lambda: first.mul_(2).div_(3),
            "masked": lambda: first.masked_fill_(torch.ones(1, 2, dtype=torch.bool), 0.0),
            "of a slice": lambda: first.__setitem__((slice(None), 0), 0.0),
            "centralised": lambda: first.sub_(first.mean()),
            "scaled at once": lambda: torch._foreach_mul_(gradients, 0.5),
            "replaced": lambda: setattr(module.net.bias, "grad", 2 * second.detach().clone()),
            "left out": lambda: module.zero_grad(),
            "clamped": lambda: first.clamp_(-1, 1),
            "normalised": lambda: first / first.abs().max(),
            "squared": lambda: first * first,
            "tested": lambda: bool(first.isnan().any()),
            "compared": lambda: first[first > 0],
            "read": lambda: first.sum().item(),
            "a number": lambda: float(first.mean()),
            "clipped": lambda: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
            "logged": lambda: grad_norm(module, 2),
        }
        for name, thing in things.items():
            module.net(torch.ones(1, 2)).sum().backward() if module.net.weight.grad is None else None
            try:
                thing()
            except ConfigurationError as error:
                self.refused[name] = str(error)


def test_a_workers_gradients_may_only_be_changed_linearly() -> None:
    module, asks = LightningModule(), Asks()
    module.net = nn.Linear(2, 1)
    module.net(torch.ones(1, 2)).sum().backward()
    watch = watch_gradients(module, [asks])
    asks.on_after_backward(None, module)
    assert list(asks.refused) == [
        "clamped",
        "normalised",
        "squared",
        "tested",
        "compared",
        "read",
        "a number",
        "clipped",
        "logged",
    ]
    assert asks.refused["clamped"].startswith("Asks.on_after_backward computes clamp_ of the gradient of net.weight, ")
    watch.end()
    asks.refused.clear()
    asks.on_after_backward(None, module)
    assert not asks.refused, "an ended watch refuses nothing"


class Looks(Callback):
    def on_train_batch_end(self, *_: Any) -> None: ...


def test_values_pulled_after_rejoining_do_not_count_as_writes() -> None:
    """In mode ssp each worker leaves at the end of an epoch, and other workers may change the weights meanwhile."""
    mode = ParameterServerStrategy(mode="ssp", staleness=3, start_method="fork")
    verify(Module(), loader(4), mode, callbacks=[Looks()], steps=3 * STEPS)


def test_hooks_of_known_callbacks_are_ignored_and_all_others_are_named() -> None:
    plain, known = Module(), [SamplesPerSecond()]
    assert gradient_observers(plain, known) == weight_observers(plain, known) == []
    assert gradient_observers(Hooks(), [Scaled()]) == [
        "Hooks.on_after_backward", "Hooks.on_before_optimizer_step", "Scaled.on_after_backward",
    ]  # fmt: skip
    assert "Hooks.on_train_batch_end" in weight_observers(Hooks(), [])
    assert gradient_observers(SecondSteps(), []) == ["SecondSteps.optimizer_step"]
    assert later_readers(Norms(), known) == ["Norms.on_before_zero_grad", "Norms.on_train_batch_end"]
    assert later_readers(Hooks(), [Scaled()]) == []
