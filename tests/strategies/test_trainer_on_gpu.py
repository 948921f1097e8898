"""Tests of a Trainer on a simulated GPU: all strategies train the CPU's values, and no step waits for the device."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from cnnstrategies import ImageClassifier, cli
from cnnstrategies.callbacks import GracefulStop, Guard, Pictures, SlowLines, graceful_stop, slow_steps, step_blocks
from cnnstrategies.callbacks.picture_counts import counts_for
from cnnstrategies.pipeline.channels import AHEAD
from cnnstrategies.planning import measure
from cnnstrategies.shares.rebalancing import Balance
from cnnstrategies.spatial import gradient_sums
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy, SpatialStrategy
from tests.conftest import quiet_trainer
from tests.runner.device_order import Message, check_order
from tests.runner.ranks import run_apart, run_ranks
from tests.runner.simulated_cuda import simulate
from tests.runner.simulated_gpu import DEVICE

STEPS = 3
PROFILE = partial(measure.profile, repeats=1)  # The profile must run, but its times are irrelevant here.


class Scaled(nn.Module):
    """A layer that scales images of bytes to the range from 0 to 1."""

    def forward(self, images: Tensor) -> Tensor:
        return images.float() / 255


def network(dropout: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(Scaled(), nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout)),
        nn.Linear(6, 4),
    )


class OwnModule(LightningModule):
    """A user's module with its own loss, which uses nothing of the package."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.network = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        loss = F.cross_entropy(self.network(images), targets, label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Spiked(OwnModule):
    """A user's module with a gradient in the second step that is infinite in half precision, in the last row only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        features = self.network[0](images)
        loss = F.cross_entropy(self.network[2](self.network[1](features)), targets)
        if batch_idx == 1:
            loss = loss + 100 * features[:, :, -1].float().sum()
        self.log("train_loss", loss)
        return loss


class WithHead(OwnModule):
    """A user's module with a layer outside of the network, a loss that compares samples, and a log of a norm."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        torch.manual_seed(1)
        self.head = nn.Linear(4, 4)

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        # NCCL has no tags: a receive that begins early would occupy the device.
        assert vars(strategy)["_run"].placed.runner.ahead == (0 if self.device.type == "cuda" else AHEAD)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        outputs = F.normalize(self.head(self.network(images)).float(), dim=1)
        loss = F.cross_entropy(10 * outputs @ outputs.T, targets) + F.mse_loss(self.head.weight, self.head.weight.T)
        assert {images.device, targets.device, outputs.device, loss.device} == {self.device}
        self.log_dict({"train_loss": loss, "norm": outputs.norm()})
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            assert (parameter.device, parameter.grad.device) == (self.device, self.device)
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class BuiltLate(OwnModule):
    """A user's module that builds its network in `configure_model`, so that each rank builds only its stage."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(nn.Identity())
        self.start = net.state_dict()  # Lightning builds on the device, with the device's random numbers.

    def configure_model(self) -> None:
        if isinstance(self.network, nn.Identity):
            self.network = network(0.0)
            self.network.load_state_dict(self.start)
            torch.manual_seed(3)  # On the device, building does not draw from the host's random numbers.


class Waits(Callback):
    """A callback that notes the host's waits in each step, from the start of a batch to the start of the next batch."""

    def __init__(self) -> None:
        self.steps: dict[str, list[Counter[str]]] = {"training": [], "validation": []}
        self.late: Any = None  # The verdicts on gradients that no step has waited for.

    def _begin(self, kind: str) -> None:
        self.steps[kind].append(Counter())
        DEVICE.waits = self.steps[kind][-1]

    def on_train_batch_start(self, *_: Any) -> None:
        self._begin("training")

    def on_validation_batch_start(self, *_: Any) -> None:
        self._begin("validation")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        DEVICE.waits = Counter()
        strategy: Any = trainer.strategy
        run = vars(strategy).get("_run")
        self.late = None if run is None or run.placed.declared is None else run.placed.declared.late
        if self.late is not None:
            assert not self.late.is_settled
            if trainer.world_size == 2:
                strategy.lightning_module_state_dict()
                assert self.late.is_settled, "a checkpoint has right weights"
        _check_stopwatches(trainer)
        validation = self.steps["validation"]
        waits = [self.steps["training"][-2], validation[1] if validation else Counter()]
        torch.save(waits, f"waits{trainer.global_rank}")  # A parameter server's worker is another process.


class CountsForPictures(Pictures):
    """Counts as for pictures, although the run has no logger and therefore does not draw them."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.counts = counts_for(pl_module, None)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.counts is not None and self.counts.update_called:
            assert self._last is not None
            assert self._last.states["confusion"].sum() == self._last.states["bins"][0].sum() > 0


def _check_stopwatches(trainer: Trainer) -> None:
    """Check that the stopwatches for shares measure the device's time: an event of a simulated GPU takes 1 ms."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for stopwatch in (
        watch for callback in callbacks if isinstance(callback, Balance) for watch in callback.watchers()
    ):
        stopwatch.clear()
        stopwatch.begin()
        stopwatch.end()
        measured = stopwatch.take() or stopwatch.take()  # The first query finds an event pending.
        on_device = trainer.strategy.root_device.type == "cuda"
        assert [time.seconds == 1e-3 for time in measured] == [on_device]


class Case(NamedTuple):
    """Options of a training.

    Attributes:
        strategy: Function that makes the strategy.
        options: Options of the package's module.
        module: A user's class, in place of the package's module.
        precision: Precision of the Trainer.
        has_length: Whether the dataset has a length.
        waits: Number of times that the host may wait in a step.
        dropout: Probability of dropout in the network.
        is_graceful: Whether signals stop the run by the callback `GracefulStop`, and not by Lightning's own handler.
        clip: Largest norm of the gradients; None for no clipping.
        steps: Number of steps. The waits are those of the last step but one.
    """

    strategy: Callable[[], Any]
    options: dict[str, Any] | None = None
    module: type[OwnModule] | None = None
    precision: str = "32-true"
    has_length: bool = True
    waits: int = 0
    dropout: float = 0.0
    is_graceful: bool = True
    clip: float | None = None
    steps: int = STEPS


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """A dataset without a length."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._data[index] for index in range(len(self._data)))


class Trained(NamedTuple):
    """Result of a training on one rank.

    Attributes:
        state: State dict of the module.
        metrics: Logged values.
        waits: The host's waits in the last step but one.
        evaluating: The host's waits in the second batch of validation.
        messages: Messages of this rank in their order.
    """

    state: dict[str, Tensor]
    metrics: dict[str, Tensor]
    waits: Counter[str]
    evaluating: Counter[str]
    messages: list[Message]


def fit(case: Case, kind: str, world: int) -> Trained:
    net = network(case.dropout)
    model: Any = case.module(net) if case.module else ImageClassifier(net, 4, **(case.options or {}))
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (8 * case.steps * world, 3, 8, 8), generator=generator, dtype=torch.uint8)
    images = images.float() if case.options else images  # Mixup needs floating-point images.
    data = TensorDataset(images, torch.randint(4, (len(images),), generator=generator))
    os.environ["PL_GLOBAL_SEED"] = (
        "2"  # Steps draw from this seed, because a loader also draws from the host's random numbers.
    )
    scaler = None
    if case.precision == "16-mixed":
        # With the package's module, the gradients of the second step are not finite, but those of the third are.
        growth = 2.0**40 if case.options else 2.0
        scaler = torch.amp.GradScaler(kind, 1024.0, growth_factor=growth, backoff_factor=1 / growth, growth_interval=1)
    graceful_stop.CHECK_SECONDS = (
        1000.0  # Otherwise it would check twice a second, possibly in each of these slow steps.
    )
    slow_steps.FIRST, slow_steps.EVERY, slow_steps.READ_AFTER = 0, 0.0, 1
    slow_steps.STEPS = step_blocks.STEPS = 2  # A block ends in these few steps, and the ranks exchange it.
    measure.profile = PROFILE
    gradient_sums.MESSAGE_BYTES = 1000  # Otherwise these small gradients would be one message.
    trainer = quiet_trainer(
        case.strategy(),
        world,
        accelerator="gpu" if kind == "cuda" else "cpu",
        max_epochs=1,
        limit_train_batches=case.steps,
        callbacks=[
            waits := Waits(),
            CountsForPictures(),
            SlowLines(),
            guard := Guard(),
            *[GracefulStop()] * case.is_graceful,
        ],
        precision=None if scaler else case.precision,
        plugins=[MixedPrecision("16-mixed", kind, scaler)] if scaler else None,
        gradient_clip_val=case.clip,
    )
    loader = DataLoader(data if case.has_length else Endless(data), 8, pin_memory=kind == "cuda")
    validation = DataLoader(Subset(data, range(17 * world)), 8, pin_memory=kind == "cuda")
    DEVICE.messages.clear()
    trainer.fit(model, loader, None if case.waits else validation)
    assert waits.late is None or waits.late.is_settled, "the end of the training reads all verdicts"
    assert not [finding for finding in guard.findings if not finding.is_note]
    metrics = {name: value.cpu() for name, value in trainer.callback_metrics.items()}
    if scaler is not None:
        metrics["scale"] = torch.tensor(scaler.get_scale())
    return Trained(
        {n: v.cpu() for n, v in model.state_dict().items() if v.device.type != "meta"},
        metrics,
        *torch.load(f"waits{trainer.global_rank}", weights_only=False),
        list(DEVICE.messages),
    )


def on_both(cases: list[Case], world: int) -> tuple[list[Trained], list[Trained]]:
    rank = 0
    if world > 1:
        rank = torch.distributed.get_rank()
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    host = [fit(case, "cpu", world) for case in cases]
    with simulate(rank, world):
        return host, [fit(case, "cuda", world) for case in cases]


RECIPE = {"channels_last": True, "mixup_alpha": 0.2, "label_smoothing": 0.1}


def piped(**options: Any) -> HybridPipelineStrategy:
    return HybridPipelineStrategy(**{"replicas": [1, 1], "cuts": ["0"], "microbatches": 4} | options)


def served(mode: Any) -> ParameterServerStrategy:
    return ParameterServerStrategy(servers_per_node=1, start_method="fork", mode=mode)


def divided(**options: Any) -> SpatialStrategy:
    return SpatialStrategy(timeout=60.0, **options)


ALONE = [
    Case(lambda: "auto", RECIPE, precision="bf16-mixed"),
    # The host waits for the last gradient, and checks whether a callback, here `Waits`, has changed a weight.
    Case(partial(served, "sync"), waits=2, dropout=0.2),
    # The loss scaler also reads whether a step must be skipped.
    Case(partial(served, "sync"), RECIPE, precision="16-mixed", waits=3),
    Case(partial(served, "local"), waits=2 * len(list(network(0.0).parameters())), dropout=0.2),
]
TOGETHER = [
    Case(partial(piped, cuts=None), RECIPE, precision="bf16-mixed", clip=0.1),
    Case(piped, module=BuiltLate, waits=1),
    # The second step begins with a comparison of the weights, so the third step is the one that is measured.
    Case(divided, RECIPE, precision="bf16-mixed", clip=0.1, steps=4),
    # The loss scaler reads whether a step must be skipped.
    Case(divided, module=Spiked, precision="16-mixed", waits=1, steps=4),
]
# In half precision, torch's loss scaler reads whether a step must be skipped.
MIXED = [
    Case(
        partial(piped, activation_checkpointing="except_last"), module=OwnModule, precision="16-mixed",
        has_length=False, waits=2,
    ),
    Case(piped, RECIPE, precision="16-mixed", waits=1),
    # Without `GracefulStop`, Lightning creates, sends and reads a flag in each step.
    Case(piped, module=OwnModule, waits=3, is_graceful=False),
    Case(divided, module=OwnModule, waits=3, is_graceful=False, steps=4),
]  # fmt: skip
THREE = [
    Case(partial(piped, replicas=[2, 1], schedule="gpipe", activation_checkpointing="always")),
    Case(partial(piped, replicas=[2, 1], shares="auto")),
]
# The loss scaler reads whether a step must be skipped.
WITH_HEAD = Case(
    partial(piped, replicas=[1, 2], submodule="network"),
    module=WithHead,
    precision="16-mixed",
    has_length=False,
    waits=1,
)


THREE_PARTS = Case(partial(divided, parts=3), module=OwnModule, steps=4, has_length=False)


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, ALONE),
        (2, TOGETHER),
        (3, [WITH_HEAD, THREE_PARTS]),
        *(pytest.param(*more, marks=pytest.mark.cluster) for more in ((2, MIXED), (3, THREE))),
    ],
)
def test_a_gpu_trains_the_values_of_the_cpu_and_no_step_waits(world: int, cases: list[Case]) -> None:
    ranks = [run_apart(on_both, cases, world)] if world == 1 else run_ranks(world, on_both, cases, world)
    for rank, (host, device) in enumerate(ranks):
        for case, expected, actual in zip(cases, host, device, strict=True):
            torch.testing.assert_close(actual.state, expected.state, rtol=0, atol=0)
            assert actual.metrics == expected.metrics, (rank, case)
            assert sum(actual.waits.values()) <= case.waits, (rank, case, actual.waits)
            assert not actual.evaluating, (rank, case, actual.evaluating)
    for number, case in enumerate(cases):
        reports = [device[number] for _, device in ranks]
        assert all(report.metrics == reports[0].metrics for report in reports), (case, "all ranks have the same batch")
        if case.strategy in (divided, THREE_PARTS.strategy):
            check_order([report.messages for report in reports])
            for report in reports:
                torch.testing.assert_close(report.state, reports[0].state, rtol=0, atol=0)
        if case.module is Spiked:
            # The step of the infinite gradient was skipped: the scale was doubled, halved, and doubled twice.
            assert reports[0].metrics["scale"] == 4096


def trainings_that_draw() -> list[Trained]:
    """Train on a simulated GPU with dropout, with stored and with recomputed activations."""
    rank = torch.distributed.get_rank()
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with simulate(rank, 2):
        modes: list[Any] = ["never", "always"]
        return [fit(Case(partial(piped, activation_checkpointing=mode), dropout=0.2), "cuda", 2) for mode in modes]


@pytest.mark.cluster  # This test takes long.
def test_a_second_forward_on_a_gpu_draws_what_the_first_forward_drew() -> None:
    """The CPU's draws differ, because they follow from the states of all generators, and a GPU has one more."""
    for stored, recomputed in run_ranks(2, trainings_that_draw):
        torch.testing.assert_close(recomputed.state, stored.state, rtol=0, atol=0)


def from_the_command_line() -> Counter[str]:
    graceful_stop.CHECK_SECONDS = 1000.0
    options = ["strategy=auto", "accelerator=gpu", "devices=1", "max_epochs=1", "limit_train_batches=4"]
    options += ["log_every_n_steps=100", "callbacks+=tests.strategies.test_trainer_on_gpu.Waits"]
    with simulate(), contextlib.suppress(SystemExit):
        cli.main(["fit", "--config", "quickstart.yaml", *(f"--trainer.{option}" for option in options)])
    waits: Counter[str] = torch.load("waits0", weights_only=False)[0]
    return waits


@pytest.mark.usefixtures("_undrawn")
def test_callbacks_of_the_command_line_do_not_wait_for_the_device() -> None:
    """The exceptions are a check for signals twice a second, logging, and the end of an epoch."""
    waits = run_apart(from_the_command_line)
    assert not waits
