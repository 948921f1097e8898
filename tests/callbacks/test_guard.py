"""The guard finds planted faults and names them, is silent otherwise, and does not change what is trained."""

import contextlib
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset

from cnnstrategies import ConfigurationError, cli
from cnnstrategies.callbacks import Guard
from cnnstrategies.callbacks.guarded_run import applied_checks
from cnnstrategies.guarding.findings import Finding
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy, SpatialStrategy
from cnnstrategies.strategies.protocol import facts_of
from tests.conftest import ROOT, quiet_trainer
from tests.runner.ranks import run_apart

sys.path.append(str(ROOT / "benchmarks" / "guard"))

import by_design
from guarded import findings_of

Found = list[tuple[str, int, int, str]]


class Small(LightningModule):
    """Training of a small network with batch normalisation and dropout on random images."""

    def __init__(self) -> None:
        super().__init__()
        seed_everything(1, verbose=False)
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(4 * 36, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.head(self.backbone(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def images(count: int, batch: int = 4, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(count, 1, 8, 8, generator=generator)
    return DataLoader(
        TensorDataset(values, torch.randint(5, (count,), generator=generator)), batch, **{"shuffle": True, **options}
    )


class Report(Callback):
    """Saves the findings of each rank, and the trained weights."""

    def __init__(self, guard: Guard, folder: Path) -> None:
        self.guard, self.folder = guard, folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(self.guard.findings, self.folder / f"findings-{trainer.global_rank}")
        is_wrong = any(not finding.is_note for finding in self.guard.findings)
        for _, text in self.guard.summary_rows():
            assert ("nothing found" in text) == (not is_wrong) or trainer.world_size > 1
            assert not (is_wrong and "nothing found" in text)
        state = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            torch.save(state, self.folder / "weights")


def train(
    folder: Path,
    module: Callable[[], LightningModule] = Small,
    *callbacks: Callback,
    guard: Guard | None = None,
    guarded: bool = True,
    strategy: Any = "auto",
    devices: int = 1,
    steps: int = 50,
    loader: Callable[[], DataLoader[Any]] = lambda: images(80),
    **options: Any,
) -> list[Found]:
    """Train in processes of their own, and return the check, the rank, the step and the tensor of each finding."""
    guard = guard or Guard(every=20, replay_every=15)
    callbacks = (*callbacks, *[guard] * guarded, Report(guard, folder))

    def fit() -> None:
        trainer = quiet_trainer(strategy, devices, callbacks=list(callbacks), max_steps=steps, **options)
        trainer.fit(module(), loader(), images(8, shuffle=False))

    folder.mkdir(exist_ok=True)
    run_apart(fit)
    return [_short(torch.load(folder / f"findings-{rank}", weights_only=False)) for rank in range(devices)]


def _short(findings: list[Finding]) -> Found:
    return [(finding.check, finding.rank, finding.step, finding.tensor) for finding in findings]


STRATEGIES: dict[str, tuple[Callable[[], Any], int]] = {
    "one device": (lambda: "auto", 1),
    "ddp": (lambda: "ddp_fork", 2),
    "servers": (lambda: ParameterServerStrategy(start_method="fork"), 2),
    "replicas of a stage": (
        lambda: HybridPipelineStrategy(
            submodule="backbone", replicas=[2, 1], cuts=["2"], microbatches=2, start_method="fork"
        ),
        3,
    ),
    "spatial": (lambda: SpatialStrategy(parts=2, start_method="fork"), 2),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_guard_is_silent_and_changes_nothing(name: str, tmp_path: Path) -> None:
    make, devices = STRATEGIES[name]
    weights = []
    for guarded in (True, False):
        folder = tmp_path / str(guarded)
        guard, run = Guard(every=10, replay_every=7), {"strategy": make(), "devices": devices}
        assert train(folder, guard=guard, guarded=guarded, steps=16, loader=lambda: images(40), **run) == [[]] * devices
        weights.append(torch.load(folder / "weights"))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


class At(Callback):
    """Calls a function after a step, on one rank or on all."""

    def __init__(self, step: int, function: Callable[[Any], None], rank: int | None = None) -> None:
        self.step, self.function, self.rank = step, function, rank

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step >= self.step and self.rank in (None, trainer.global_rank):
            with facts_of(trainer.strategy).local_code():
                self.function(pl_module)
            self.step = 1 << 30


def flip(value: Tensor) -> None:
    value.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 5)


def momentum(module: Any, name: str) -> Tensor:
    return module.optimizers().optimizer.state[module.get_parameter(name)]["momentum_buffer"]


def set_rate(module: Any) -> None:
    for group in module.optimizers().param_groups:
        group["lr"] = 0.02


def not_in_the_optimizer(module: Any) -> Any:
    return torch.optim.SGD(module.backbone.parameters(), 0.05)


class Evaluates(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 15:
            self.backbone.eval()
        return super().training_step(batch, batch_idx)


class Infinite(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (torch.inf if self.global_step == 25 else 1)


class WrongGradient(Small):
    def on_after_backward(self) -> None:
        if self.global_step == 25:
            self.backbone[0].weight.grad[0] = torch.nan


class Outlier(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1e4 if self.global_step == 250 else 1)


class Incomplete(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.backbone.parameters(), 0.05)


class KeepsGradients(Small):
    """Freezes a layer in the middle of training, but leaves its gradient, so that the momentum moves it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 15:
            self.head[1].requires_grad_(False)

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.zero_grad(set_to_none=False)


class Unused(Small):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class TwoSoftmaxes(Small):
    def __init__(self) -> None:
        super().__init__()
        self.head.append(nn.Softmax(1))


class Scheduled(Small):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class SetsRate(Callback):
    """Sets the learning rate in each step from step 25 on."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > 25:
            set_rate(pl_module)


class Undo(Callback):
    """Undoes each step of one layer."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.before = pl_module.head[1].weight.detach().clone()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.head[1].weight.data.copy_(self.before)


class Repeats(SequentialSampler):
    """Yields the indices of the first batch again and again."""

    def __iter__(self) -> Any:
        return (index % 8 for index in range(len(self.data_source)))


def repeating_loader() -> DataLoader[Any]:
    data = images(80).dataset
    return DataLoader(data, 4, sampler=Repeats(data))


class FixedOrder(RandomSampler):
    """Yields the same random order in each epoch."""

    def __iter__(self) -> Any:
        self.generator = torch.Generator().manual_seed(3)
        return super().__iter__()


def fixed_loader() -> DataLoader[Any]:
    data = images(80).dataset
    return DataLoader(data, 4, sampler=FixedOrder(data))  # type: ignore[arg-type]


def forget_step(module: Any) -> None:
    """Make the convolution give another result in its next forward."""
    layer = module.backbone[0]
    forward = layer.forward

    def faulty(value: Tensor) -> Tensor:
        layer.forward = forward
        result = forward(value)
        flip(result)
        return result

    layer.forward = faulty


CONV, HEAD = "backbone.0.weight", "head.1.weight"
FAULTS: dict[str, tuple[dict[str, Any], tuple[str, int, int, str]]] = {
    "evaluation mode": ({"module": Evaluates}, ("modes", 0, 40, "backbone.1")),
    "loss": ({"module": Infinite}, ("finite", 0, 26, "the loss")),
    "gradient": ({"module": WrongGradient}, ("finite", 0, 26, "the gradient of backbone.0.weight")),
    "not in the optimizer": ({"module": Incomplete}, ("moves", 0, 20, "head.1.weight (and 1 others)")),
    "moved although frozen": (
        {"module": KeepsGradients, "limit_val_batches": 0}, ("moves", 0, 40, f"{HEAD} (and 1 others)"),
    ),
    "without a gradient": ({"module": Unused}, ("moves", 0, 20, "spare.weight (and 1 others)")),
    "two softmaxes": ({"module": TwoSoftmaxes, "steps": 1}, ("losses", 0, 1, "the loss")),
    "undone steps": ({"callbacks": [Undo()]}, ("moves", 0, 20, HEAD)),
    "frozen and written": (
        {"module": Unused, "callbacks": [At(0, lambda module: module.spare.requires_grad_(False)),
                                         At(65, lambda module: flip(module.spare.weight))], "steps": 85},
        ("moves", 0, 80, "spare.weight"),
    ),
    "learning rate": (
        {"module": Scheduled, "callbacks": [SetsRate()], "steps": 70},
        ("rates", 0, 60, "the learning rate of parameter group 0 of schedule 0"),
    ),
    "repeated samples": ({"loader": repeating_loader}, ("batches", 0, 20, "the loader")),
    "same order": ({"loader": fixed_loader}, ("samples", 0, 40, "the loader")),
    "layer": ({"callbacks": [At(14, forget_step)]}, ("replay", 0, 15, "backbone.0")),
    "spike": (
        {"module": Outlier, "steps": 260, "loader": lambda: images(1200)}, ("history", 0, 251, "the loss"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_one_device_is_found(name: str, tmp_path: Path) -> None:
    options, expected = FAULTS[name]
    callbacks = options.get("callbacks", [])
    rest = {key: value for key, value in options.items() if key not in ("callbacks", "module")}
    assert expected in train(tmp_path, options.get("module", Small), *callbacks, **rest)[0]


class Stale(Small):
    """Has a buffer that is updated on rank 0 only, and computes in low precision and more often on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("labels", torch.zeros(3, dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.labels = self.labels + 1 + self.trainer.global_rank  # As a memory of each rank's own samples.
        if self.trainer.global_rank == 0:
            self.mean = self.mean + 1
        else:
            with torch.no_grad():
                self.backbone[1](torch.ones(2, 4, 3, 3))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.trainer.global_rank == 1):
            return super().training_step(batch, batch_idx)


def test_faults_on_one_of_two_ranks_are_found(tmp_path: Path) -> None:
    faults = [
        At(25, lambda module: flip(module.get_parameter(CONV)), 1),
        At(25, set_rate, 1),
        At(39, lambda module: module.eval(), 1),
    ]
    expected = [
        ("batches", 1, 20, "the loader"),
        ("replicas", 1, 20, "mean (and 1 others)"),
        ("forwards", 1, 20, "backbone.0 (and 2 others)"),
        ("forwards", 1, 20, "backbone.1"),
        ("replicas", 1, 40, "learning rate of parameter group 0"),
        ("replicas", 1, 40, "mode of backbone.1 (and 1 others)"),
    ]
    options: dict[str, Any] = {"use_distributed_sampler": False, "loader": lambda: images(80, shuffle=False)}
    strategy = DDPStrategy(start_method="fork", broadcast_buffers=False)
    ranks = train(tmp_path, Stale, *faults, strategy=strategy, devices=2, steps=42, **options)
    assert all(set(expected) <= set(findings) for findings in ranks)
    # The other learning rate changes all weights.
    assert all(("replicas", 1, 40, f"{CONV} (and 5 others)") in findings for findings in ranks)


@pytest.mark.parametrize("name", ["ddp", "replicas of a stage", "spatial"])
def test_a_flipped_bit_on_one_rank_is_found_and_named(name: str, tmp_path: Path) -> None:
    make, devices = STRATEGIES[name]
    flips = At(12, lambda module: flip(module.get_parameter(CONV)), 1)
    ranks = train(tmp_path, Small, flips, guard=Guard(every=10), strategy=make(), devices=devices, steps=20)
    assert ranks == [[("replicas", 1, 20, CONV)]] * devices


class FlipsOutput(Callback):
    """Flips a bit of the convolution's output in one step on rank 1, before other hooks see the output."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        def flipped(layer: nn.Module, arguments: Any, output: Any) -> None:
            if layer is pl_module.backbone[0]:
                handle.remove()
                flip(output)

        if trainer.global_step == 6 and trainer.global_rank == 1:
            handle = register_module_forward_hook(flipped)


def test_a_flipped_bit_of_an_activation_in_a_stage_is_found(tmp_path: Path) -> None:
    make, devices = STRATEGIES["replicas of a stage"]
    guard = Guard(every=10, replay_every=7)
    ranks = train(tmp_path, Small, FlipsOutput(), guard=guard, strategy=make(), devices=devices, steps=10)
    assert ranks == [[], [("replay", 1, 7, "backbone.0")], []]


def test_a_flipped_bit_of_a_moment_under_ddp(tmp_path: Path) -> None:
    flips = At(20, lambda module: flip(momentum(module, HEAD)), 1)
    ranks = train(tmp_path, Small, flips, guard=Guard(every=10), strategy="ddp_fork", devices=2, steps=20)
    assert ranks == [[("replicas", 1, 20, f"optimizer state of {HEAD}")]] * 2


class Damages(TorchCheckpointIO):
    """Changes a byte of each checkpoint's weights after step 30."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if checkpoint["global_step"] > 30:
            changed = {name: value.clone() for name, value in checkpoint["state_dict"].items()}
            flip(changed[HEAD])
            checkpoint = {**checkpoint, "state_dict": changed}
        super().save_checkpoint(checkpoint, path, storage_options)


def test_a_damaged_checkpoint_stops_both_ranks_and_the_verified_one_is_named(tmp_path: Path) -> None:
    guard = Guard("stop", every=10)
    codes = tmp_path / "codes"
    codes.mkdir()

    def fit() -> None:
        saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=8, save_top_k=-1)
        trainer = quiet_trainer(
            "ddp_fork",
            2,
            callbacks=[saver, guard, Code()],
            plugins=[Damages()],
            max_steps=60,
            enable_checkpointing=True,
        )
        with (tmp_path / "output").open("w") as output, contextlib.redirect_stderr(output):
            trainer.fit(Small(), images(80), images(8))

    class Code(Callback):
        def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
            (codes / str(trainer.global_rank)).write_text(f"{exception} {trainer.global_step}")

    with pytest.raises(AssertionError, match="exit code 3"):
        run_apart(fit)
    output = (tmp_path / "output").read_text()
    assert "step=32.ckpt has another value of ['state_dict']['head.1.weight'] than the run had in memory" in output
    assert f"guard: stopped after step 40; the last verified checkpoint is {tmp_path}/saved/step=24.ckpt" in output


class CountsSteps(Callback):
    """Writes the number of each rank's steps, and stays behind on rank 0, which has no finding."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        time.sleep(0.01 * trainer.is_global_zero)
        (self.folder / f"step-{trainer.global_rank}").write_text(str(trainer.global_step))


def test_a_finding_stops_ranks_that_step_on_their_own(tmp_path: Path) -> None:
    """Rank 1 has the finding, and rank 0 ends the run with the exit code."""
    steps = 2000
    strategy = ParameterServerStrategy(mode="async", start_method="fork")
    faults = At(5, lambda module: module.eval(), 1)
    ends = pytest.raises(AssertionError, match="exit code 3")
    with (tmp_path / "output").open("w") as output, contextlib.redirect_stderr(output), ends:
        train(
            tmp_path, Small, CountsSteps(tmp_path), faults, guard=Guard("stop", every=10), strategy=strategy,
            devices=2, steps=steps, loader=lambda: images(8 * steps), limit_val_batches=0,
        )  # fmt: skip
    lines = [line for line in (tmp_path / "output").read_text().splitlines() if line.startswith("guard:")]
    at = int((tmp_path / "step-0").read_text())
    assert lines[0].startswith("guard: rank 1, step 20: backbone.1 (and 1 others) has been in evaluation mode")
    assert lines[1:] == [f"guard: stopped after step {at}; no checkpoint was verified before"]
    assert [int((tmp_path / "step-1").read_text()), at < steps] == [20, True]


@pytest.mark.parametrize(
    "name",
    [
        *("two parts that train against each other", "an average of weights in the module"),
        "an average of weights after each 50 steps",
        *("a learning rate with warm restarts", "layers frozen for two epochs", "a warm-up in the module"),
        *("large penalties in each sixteenth step", "an average of weights (EMAWeightAveraging)"),
        *("an average of weights (StochasticWeightAveraging)", "accumulated gradients, clipped"),
        *("gradients accumulated by hooks", "dropout in validations"),
    ],
)
def test_no_alarm_for_what_is_done_on_purpose(name: str) -> None:
    steps = min(250, by_design.STEPS.get(name, 60))  # From step 200 on, losses are compared with their history.
    assert findings_of(by_design.PROGRAMS[name](), steps, devices=1) == []


COLUMNS: dict[str, tuple[Any, int]] = {
    "`ddp`, `ddp_balanced`": ("ddp", 2),
    "`hybrid_pipeline`": (HybridPipelineStrategy(replicas=[1, 1]), 2),
    "`spatial`": (SpatialStrategy(parts=2), 4),
    "servers, `sync`": (ParameterServerStrategy(), 2),
    "servers, `local`": (ParameterServerStrategy(mode="local"), 2),
    "servers, `async`, `ssp`": (ParameterServerStrategy(mode="async"), 2),
    "FSDP": (FSDPStrategy(), 2),
    "one device": ("auto", 1),
}


def test_the_table_of_the_documentation_has_the_facts_of_the_code() -> None:
    rows = re.findall(r"^\|(.*)\|$", (ROOT / "docs/guard.md").read_text(), re.MULTILINE)
    heading, _, *body = [[cell.strip() for cell in row.split("|")] for row in rows]
    assert heading[1:] == list(COLUMNS)
    table = {
        (row[0].strip("`"), column): cell for row in body for column, cell in zip(heading[1:], row[1:], strict=True)
    }
    for column, (strategy, devices) in COLUMNS.items():
        facts = facts_of(strategy)
        if column in ("`ddp`, `ddp_balanced`", "one device", "`spatial`"):
            facts = facts_of(quiet_trainer(strategy, devices).strategy)
        applied = applied_checks(facts, devices)
        assert {name for name, _ in table} == set(applied)
        assert {name: table[name, column] == "yes" for name in applied} == dict(applied), column


@pytest.mark.usefixtures("_undrawn")
def test_a_resumed_run_and_the_key_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line adds the guard. A resumed run, with a schedule, has no finding, and says nothing."""
    monkeypatch.chdir(tmp_path)
    options = ["--config", "quickstart", "--trainer.limit_train_batches=15", "--guard=true", "--run_name=a"]
    options += ["--trainer.devices=1", "--trainer.strategy=auto"]

    def fit() -> None:
        seen: list[Guard] = []
        monkeypatch.setattr(Guard, "on_train_end", lambda self, *_: seen.append(self))
        for epochs in (1, 2):
            with (tmp_path / "output").open("w") as output, contextlib.redirect_stderr(output):
                cli.main(["fit", *options, f"--trainer.max_epochs={epochs}"])
            assert "guard:" not in (tmp_path / "output").read_text()
            guard = seen.pop()
            assert [guard.findings, seen] == [[], []]
            # The check at the end is left out here, and only the first run has a first step.
            assert guard.summary_rows() == ([("guard", "1 check, nothing found")] if epochs == 1 else [])

    run_apart(fit)


def test_the_arguments_are_checked() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("every=0: use 1 step or more")):
        Guard(every=0)
