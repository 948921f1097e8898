"""Tests of strategy hybrid_pipeline against one process, with precision, averaging, metrics and users' loaders."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAUROC

from cnnstrategies import ImageClassifier
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import HybridPipelineStrategy
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart, run_ranks


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Samples that note the process that loads them."""

    def __init__(self, size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(size, 1, 6, 6, generator=generator)
        self.targets = torch.randint(3, (size,), generator=generator)
        self.images += self.targets[:, None, None, None] * 0.5

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with Path(f"loaded_by_{os.environ.get('LOCAL_RANK', 'none')}").open("a") as file:
            print(index, file=file)
        return self.images[index], self.targets[index]


class Classifier(ImageClassifier):
    """A classifier whose metrics keep and count all rows, so that repeated or reordered rows show."""

    def __init__(self, network: nn.Module, num_classes: int = 3, **options: Any) -> None:
        super().__init__(network, num_classes, **options)
        self.auroc = MulticlassAUROC(3)
        self.counted = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        targets = batch[1]
        self.auroc.update(self.auroc_rows.pop(), targets)
        self.log("val_auroc", self.auroc)
        self.counted.update(len(targets))
        self.log("val_counted", self.counted)
        self.log("val_mean_target", targets.float().mean(), sync_dist=True)
        self.log("val_rows", float(len(targets)), reduce_fx="sum", sync_dist=True)

    def log_step(self, stage: Any, outputs: Any, targets: Tensor, loss: Tensor) -> None:
        self.auroc_rows = [outputs.detach()]
        super().log_step(stage, outputs, targets, loss)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch[0])


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4) if norm else nn.Identity(),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loaders(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of 46 samples for training, in a fixed order, and of 23 for validation.

    The last batches are smaller, and validation has an odd number of samples.
    """
    return DataLoader(Images(46), batch_size), DataLoader(Images(23, seed=1), batch_size)


def trainer_of(
    replicas: list[int] | None,
    callbacks: Any = (),
    name: str = "run",
    layout: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """Return a Trainer in float64, in which the order of summation does not matter."""
    strategy: Any = "auto"
    if replicas is not None:
        start = "popen" if dist.is_initialized() else "fork"
        strategy = HybridPipelineStrategy(
            replicas=replicas, cuts=["2"], microbatches=4, start_method=start, **(layout or {})
        )
    usual: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 1, "use_distributed_sampler": False}
    devices = 1 if replicas is None else sum(replicas)
    usual |= {"precision": "64-true", "enable_checkpointing": True, "default_root_dir": name}
    return quiet_trainer(strategy, devices, callbacks=list(callbacks), **usual | options)


def assert_same_float32(got: Any, expected: Any) -> None:
    """Assert that values are equal in float32.

    They were computed in float64 and then loaded into a module in float32: the parent's module, or a new module.
    """
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7, check_dtype=False)


class Metrics(Callback):
    """A callback that saves each rank's metrics."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        values["epochs"] = trainer.current_epoch + 1
        torch.save(values, f"{trainer.default_root_dir}_rank{trainer.global_rank}.metrics")


class Rows(BasePredictionWriter):
    """A callback that saves each rank's predictions and their indices."""

    def write_on_batch_end(self, trainer: Trainer, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.indices = [*getattr(self, "indices", []), *indices]

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
        assert [index for batch in batch_indices[0] for index in batch] == self.indices
        path = f"{trainer.default_root_dir}_rank{trainer.global_rank}.rows"
        torch.save((torch.cat([*predictions]), self.indices), path)


def train(replicas: list[int] | None, name: str, batch_size: int = 16) -> dict[str, Any]:
    """Fit with all callbacks that watch metrics, and return the results."""
    seed_everything(1, verbose=False)
    stop = EarlyStopping("val_loss", mode="max", patience=1, verbose=False)
    best = ModelCheckpoint(f"{name}/best", monitor="val_auroc", mode="max", filename="{epoch}")
    clipped = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    watching = [stop, best, EMAWeightAveraging(decay=0.7), Metrics()]
    trainer = trainer_of(replicas, watching, name, max_epochs=6, **clipped)
    model = Classifier(network(norm=True).eval(), optimizer=sgd)
    model.network[1].requires_grad_(False)
    trainer.fit(model, *loaders(batch_size))
    return {
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "epochs": torch.load(f"{name}_rank0.metrics")["epochs"],
        "best": Path(best.best_model_path).name,
        "weights": model.state_dict(),
        "checkpoint": torch.load(best.best_model_path, weights_only=True),
        "loaded": Classifier.load_from_checkpoint(best.best_model_path, network=network(norm=True)).state_dict(),
    }


def watching() -> tuple[dict[str, Any], dict[str, Any], list[dict[str, float]], list[int]]:
    single = train(None, "single")
    for path in Path().glob("loaded_by_*"):
        path.unlink()
    piped = train([1, 1], "piped")
    ranks = [torch.load(f"piped_rank{rank}.metrics") for rank in (0, 1)]
    return single, piped, ranks, [len(Path(f"loaded_by_{rank}").read_text().splitlines()) for rank in (0, 1)]


def test_metrics_and_best_checkpoint_equal_one_process() -> None:
    single, piped, ranks, loaded = run_apart(watching)
    assert loaded[1] == 2 * 2 * 2, "rank 1 loads two samples of each of the two loaders, twice, to compare the data"
    assert loaded[0] > 100, "only the first stage loads batches"
    assert ranks[0] == ranks[1]
    assert piped["metrics"] == pytest.approx(single["metrics"], rel=1e-6)
    assert (piped["epochs"], piped["best"]) == (single["epochs"], single["best"])
    assert single["epochs"] < 6, "early stopping must end the run"
    for key in ("weights", "loaded"):
        assert_same_float32(piped[key], single[key])
    states = [result["checkpoint"]["optimizer_states"][0]["state"] for result in (piped, single)]
    assert_same_float32(*states)
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert_same_float32(piped["checkpoint"][key], single["checkpoint"][key])


LAYOUTS = {"one": (None, 16), "three": ([2, 1], 8)}  # Replicas, and the number of samples in a process's batch.


def validated() -> list[Any]:
    """Return metrics of one process and of three ranks with Lightning's samplers, which repeat samples."""
    results = []
    for replicas, size in LAYOUTS.values():
        trainer = trainer_of(replicas, use_distributed_sampler=True)
        results += trainer.validate(Classifier(network(), optimizer=sgd), loaders(size)[1], verbose=False)
    return results


def test_ordinary_loaders_give_the_metrics_of_one_process() -> None:
    metrics, piped = run_apart(validated)
    assert piped == pytest.approx(metrics, rel=1e-6)
    assert metrics["val_rows"] == metrics["val_counted"] == 23


def predicted() -> list[Any]:
    for name, (replicas, size) in LAYOUTS.items():
        trainer = trainer_of(replicas, [Rows("batch_and_epoch")], name, use_distributed_sampler=True)
        trainer.predict(Classifier(network(), optimizer=sgd), loaders(size)[1])
    return [[torch.load(path) for path in sorted(Path().glob(f"{name}_rank*.rows"))] for name in LAYOUTS]


def test_ordinary_loaders_give_the_rows_of_one_process_in_order() -> None:
    [(rows, indices)], [(piped_rows, piped_indices), *others] = run_apart(predicted)
    assert torch.allclose(piped_rows, rows, rtol=1e-10, atol=1e-12)
    assert indices == piped_indices == list(range(23))
    assert [(len(rows), indices) for rows, indices in others] == [(0, []), (0, [])], "each row occurs once"


class Reductions(Callback):
    """A callback that counts each rank's asynchronous all-reduces, which sum gradients over replicas."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.count, reduce = 0, dist.all_reduce

        def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
            self.count += options.get("async_op", False)
            return reduce(tensor, *args, **options)

        dist.all_reduce = counted

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        Path(f"{trainer.global_rank}.reductions").write_text(str(self.count))


def accumulated() -> list[dict[str, Tensor]]:
    """Return weights of one process and of a pipeline, and each rank's number of all-reduces.

    An epoch's three batches make two steps of the optimizer; the second step has one batch.
    """
    weights = []
    for replicas in (None, [2, 1]):
        model = ImageClassifier(network(), 3, optimizer=sgd)
        options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        options["layout"] = {"schedule": "gpipe", "placement": "replicas", "activation_checkpointing": "always"}
        trainer = trainer_of(replicas, [Reductions()] if replicas else [], **options)
        trainer.fit(model, DataLoader(Images(24), 8))
        weights.append(model.state_dict())
    return [*weights, {str(rank): torch.tensor(int(Path(f"{rank}.reductions").read_text())) for rank in range(3)}]


def test_accumulated_gradients_equal_one_process_and_are_summed_once() -> None:
    single, piped, reductions = run_apart(accumulated)
    assert_same_float32(piped, single)
    assert {rank: int(count) for rank, count in reductions.items()} == {"0": 4, "1": 0, "2": 4}, (
        "rank 1 is the only replica of its stage"
    )


class Overflow(Callback):
    """A callback that makes one gradient of one stage infinite in the third step.

    The notes have one entry for each step: the loss scale, and whether the step changed weights.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.notes: list[tuple[float, bool]] = []
        self.before = [p.detach().clone() for p in pl_module.parameters()]
        hurt = list(pl_module.parameters())[-1]
        hurt.register_hook(lambda g: g * float("inf") if trainer.global_step == 2 else g)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        now = [p.detach().clone() for p in pl_module.parameters()]
        changed = any(not torch.equal(a, b) for a, b in zip(now, self.before, strict=True))
        self.before = now
        self.notes.append((trainer.precision_plugin.scaler.get_scale(), changed))
        torch.save(self.notes, f"{trainer.global_rank}.notes")


def fp16() -> tuple[Any, list[list[tuple[float, bool]]]]:
    # The precision is a plugin because `precision="16-mixed"` becomes bf16 on CPUs.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = ImageClassifier(network(), 3, optimizer=sgd)
    mixed = MixedPrecision("16-mixed", "cpu", scaler)
    # With recomputation, gradients must still reach the weights through their copies in half precision.
    again = {"activation_checkpointing": "always"}
    trainer = trainer_of([1, 1], [Overflow()], layout=again, max_epochs=2, precision=None, plugins=[mixed])
    trainer.fit(model, DataLoader(Images(32), 16))
    single = ImageClassifier(network(), 3, optimizer=sgd)
    # The expected weights: the same steps in float32, without the third batch.
    plain = sgd(single.network.parameters())
    images, targets = Images(32).images, Images(32).targets
    for half in (slice(0, 16), slice(16, 32), slice(16, 32)):
        plain.zero_grad()
        single.loss(single.network(images[half]), targets[half]).backward()
        plain.step()
    return (model.state_dict(), single.state_dict()), [torch.load(f"{rank}.notes") for rank in (0, 1)]


def test_fp16_skips_a_step_on_all_stages_and_lowers_one_scale() -> None:
    (piped, single), (first, last) = run_apart(fp16)
    assert first == last == [(1024.0, True), (1024.0, True), (512.0, False), (512.0, True)]
    for name, value in single.items():
        assert (piped[name] - value).norm() <= 0.02 * value.norm() + 1e-3, name


class Failing(ImageClassifier):
    """A module whose second step fails on all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx:
            raise ZeroDivisionError("in the user's step")
        return super().training_step(batch, batch_idx)


def after_a_failure() -> list[str]:
    """Return the error messages of a fit that fails on all ranks, and of three functions after it."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    model, loader = Failing(network(), 3), DataLoader(Images(20), 8)
    trainer = trainer_of([1, 1], max_epochs=1)
    messages = []
    for function in (
        lambda: trainer.fit(model, loader),
        lambda: trainer.save_checkpoint("failed.ckpt"),
        lambda: trainer.fit(model, loader),
        lambda: trainer_of([1, 1]).validate(model, loader, verbose=False),
    ):
        with pytest.raises((RuntimeError, ConfigurationError, ZeroDivisionError)) as caught:
            function()
        messages.append(str(caught.value))
    return messages


def test_after_a_failed_fit_further_functions_are_refused() -> None:
    for failure, save, again, other in run_ranks(2, after_a_failure):
        assert failure == "in the user's step"
        assert "there is nothing whole to save" in save
        assert "Failing.network are gone: an earlier run" in again
        assert "Failing.network are gone: an earlier run" in other


class Tunable(ImageClassifier):
    def __init__(self) -> None:
        super().__init__(network(), 3)
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def find_rates() -> tuple[float, list[Any]]:
    weights = []
    for name, replicas in (("piped", [1, 1]), ("single", None)):
        seed_everything(1, verbose=False)
        model = Tunable()
        finder = LearningRateFinder(num_training_steps=40)
        trainer_of(replicas, [finder], name, max_epochs=12).fit(model, DataLoader(Images(64), 16))
        weights.append(model.state_dict())
    return model.lr, weights


@pytest.mark.cluster  # This takes long.
def test_the_learning_rate_finder_finds_the_rate_of_one_process() -> None:
    rate, (piped, single) = run_apart(find_rates)
    assert rate != 1e-3
    assert_same_float32(piped, single)
