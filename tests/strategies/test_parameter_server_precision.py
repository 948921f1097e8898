"""Tests of the gradient scaler of ``16-mixed`` with parameter servers, against one process, with infinite gradients."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server.joint_scaler import JointScaler
from cnnstrategies.strategies.parameter_server.start import restore_trainer, trainer_state
from cnnstrategies.strategies.parameter_server.step import Unfinished
from cnnstrategies.strategies.protocol import facts_of
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart
from tests.runner.simulated_cuda import simulate
from tests.runner.simulated_gpu import DEVICE

BATCH, BATCHES, CLASSES = 8, 6, 4
MARK = 1000.0  # Value of a pixel that makes the loss of its batch infinite.
SCALE = 1024.0


class Scaling(MixedPrecision):
    """Precision plugin that scales losses as ``16-mixed`` does, and computes in float64, so that results are exact."""

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, enabled=False)


class Program(LightningModule):
    """A classifier in float64 whose loss is infinite if an image of the batch is marked.

    Args:
        optimizer: Function that makes the optimizer.
        marked: Index of the marked image in the third global batch.
    """

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer], marked: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES)]
        self.network = nn.Sequential(*layers).double()
        self._make = optimizer
        self._marked = marked

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(BATCH * BATCHES, 3, 8, 8, generator=generator, dtype=torch.float64)
        images[2 * BATCH + self._marked, 0, 0, 0] = MARK
        data = TensorDataset(images, torch.arange(len(images)) % CLASSES)
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return DataLoader(data, BATCH // world, sampler=DistributedSampler(data, world, rank, shuffle=False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        factor = torch.where((images == MARK).any(), torch.inf, 1.0)
        return F.cross_entropy(self.network(images), targets) * factor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._make(self.parameters())


class Scales(Callback):
    """A callback that writes the loss scale after each batch of each rank to a file, and saves a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        torch.save(self.scales, self.folder / f"scales{trainer.global_rank}")
        torch.save(facts_of(trainer.strategy).differences(BATCH), self.folder / "differences")
        trainer.save_checkpoint(self.folder / "last.ckpt")


class Served(ParameterServerStrategy):
    """Strategy whose forked workers have simulated GPUs, if the test's process has one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(start_method="fork", **options)

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.root_device.type == "cuda":
            DEVICE.name = self.root_device


class Trained(NamedTuple):
    """Result of a training.

    Attributes:
        saved: Contents of the last checkpoint.
        scales: By rank: the loss scale after each batch.
        differences: Differences from a run on one device, as the start panel shows them.
    """

    saved: dict[str, Any]
    scales: list[list[float]]
    differences: list[str]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(fused: bool, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=fused)


def train(
    folder: str,
    strategy: Any = "auto",
    devices: int = 1,
    marked: int = 1,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    kind: str = "cpu",
    resumed: str | None = None,
    **options: Any,
) -> Trained:
    """Train one epoch in a process of its own, or a second epoch if a run is resumed.

    Args:
        folder: Folder for the results.
        strategy: Strategy of the Trainer.
        devices: Number of processes.
        marked: Index of the image in the third global batch that makes the loss infinite.
        optimizer: Function that makes the optimizer.
        kind: Type of the device.
        resumed: Folder of the run that is resumed.
        **options: Further arguments of the Trainer.
    """

    path = Path(folder).resolve()
    start = None if resumed is None else Path(resumed, "last.ckpt").resolve()

    def run() -> None:
        scaler = torch.amp.GradScaler(kind, SCALE, growth_interval=3)
        trainer = quiet_trainer(
            strategy,
            devices,
            accelerator="gpu" if kind == "cuda" else "cpu",
            precision=None,
            plugins=[Scaling("16-mixed", kind, scaler)],
            max_epochs=1 if resumed is None else 2,
            callbacks=[Scales(path)],
            use_distributed_sampler=False,  # Lightning's sampler would shuffle.
            **options,
        )
        trainer.fit(Program(optimizer, marked), ckpt_path=start, weights_only=False)

    def run_on_device() -> None:
        if kind == "cpu":
            run()
        else:
            with simulate(devices=devices):
                run()

    run_apart(run_on_device)
    saved = torch.load(path / "last.ckpt", weights_only=False, map_location="cpu")
    scales = [torch.load(path / f"scales{rank}") for rank in range(devices)]
    return Trained(saved, scales, torch.load(path / "differences"))


def assert_equal(actual: Trained, expected: Trained) -> None:
    """Assert that a run has the weights, the optimizer's state and on all ranks the loss scales of one process."""
    torch.testing.assert_close(actual.saved["state_dict"], expected.saved["state_dict"], rtol=0, atol=1e-12)
    states = (run.saved["optimizer_states"][0]["state"] for run in (actual, expected))
    torch.testing.assert_close(*states, rtol=1e-9, atol=1e-12)
    assert actual.saved["Scaling"] == expected.saved["Scaling"]
    assert actual.scales == expected.scales * len(actual.scales)


class Case(NamedTuple):
    """Options of a comparison with one process.

    Attributes:
        servers: Options of the strategy.
        trainer: Other options of the Trainer.
        optimizer: Function that makes the optimizer of the workers.
        reference: Function that makes the optimizer of the single process.
        kind: Type of the workers' devices.
    """

    servers: dict[str, Any]
    trainer: dict[str, Any]
    optimizer: Callable[..., torch.optim.Optimizer] = sgd
    reference: Callable[..., torch.optim.Optimizer] = sgd
    kind: str = "cpu"


CASES = {
    "clipping": Case({"servers_per_node": 2}, {"gradient_clip_val": 0.5}),
    "accumulation, combined": Case({"combine_per_node": True}, {"accumulate_grad_batches": 2}),
    "fused, on a simulated GPU": Case({}, {}, partial(adamw, True), partial(adamw, False), "cuda"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_workers_skip_the_steps_of_one_process(case: Case) -> None:
    """In each epoch, a gradient of one worker is infinite. The second epoch resumes from the first one's checkpoint."""
    served = {"optimizer": case.optimizer, "kind": case.kind, **case.trainer}
    single = train("single", optimizer=case.reference, **case.trainer)
    assert_equal(train("served", Served(**case.servers), 2, **served), single)
    assert min(single.scales[0]) == SCALE / 2, "a step was skipped"
    single = train("single2", resumed="single", optimizer=case.reference, **case.trainer)
    assert_equal(train("served2", Served(**case.servers), 2, resumed="served", **served), single)


def test_workers_with_steps_of_their_own_skip_them_on_their_own() -> None:
    """The scale of rank 0, whose gradients are finite, grows; that of rank 1 falls."""
    modes: list[dict[str, Any]] = [{"mode": "async"}, {"mode": "ssp"}, {"mode": "local", "sync_every": 3}]
    for options in modes:
        run = train("served", Served(**options), 2)
        assert run.scales[0][-1] == 4 * SCALE, options
        assert "each worker has its own loss scale, and skips steps on its own" in run.differences, options
        assert run.scales[1] == [SCALE, SCALE, SCALE / 2, SCALE / 2, SCALE / 2, SCALE], options
        assert all(value.isfinite().all() for value in run.saved["state_dict"].values()), options


def test_a_skipped_step_does_not_reach_the_error_feedback_of_a_compression() -> None:
    run = train("served", Served(compression="onebit"), 2)
    assert not any("loss scale" in line for line in run.differences)
    assert run.scales == train("single").scales * 2
    assert all(value.isfinite().all() for value in run.saved["state_dict"].values())


def test_gradients_of_repeated_samples_neither_skip_a_step_nor_make_the_mean_infinite() -> None:
    """A worker has such samples if the last batch of an epoch has too few for all workers. Their weight is 0."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = sgd([parameter])
    scaler = torch.amp.GradScaler("cpu", SCALE)
    strategy: Any = SimpleNamespace(options=SimpleNamespace(aggregates=True), world_size=2)
    answers: list[bool] = []
    strategy.gather = lambda is_infinite, name: answers.append(is_infinite) or {0: is_infinite, 1: False}  # type: ignore[func-returns-value]
    stepper: Any = SimpleNamespace(unfinished=Unfinished(samples=0, batches=1))
    joint = JointScaler(scaler, strategy, lambda: stepper)
    scaler.scale(parameter.sum() * torch.inf).backward()
    scaler.unscale_(optimizer)
    assert answers == [False]
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 0.0]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE
    joint.end()
    assert not {"unscale_", "step"} & vars(scaler).keys()


def test_a_restarted_worker_continues_with_the_loss_scale_of_the_run() -> None:
    scaler = torch.amp.GradScaler("cpu", SCALE)
    trainer = quiet_trainer("auto", 1, precision=None, plugins=[Scaling("16-mixed", "cpu", scaler)], max_steps=1)
    trainer.fit(Program(sgd, 1))
    state = trainer_state(trainer, trainer.optimizers[0], 0, "")
    scaler.update(2.0)
    restore_trainer(trainer, trainer.optimizers[0], state)
    assert scaler.get_scale() == SCALE
