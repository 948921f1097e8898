"""Programs that train, validate, test and predict with divided images, for comparisons with one process."""

import csv
import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from cnnstrategies import ImageClassifier, ImageSegmenter
from cnnstrategies.callbacks import (
    ActivationCheckpointing,
    GracefulStop,
    Pictures,
    StepProfile,
    graceful_stop,
    start_panel,
)
from cnnstrategies.callbacks.picture_counts import counts_for
from cnnstrategies.planning.held_bytes import HeldBytes
from cnnstrategies.planning.memory import PeakMemory
from cnnstrategies.spatial import RowsTensor
from cnnstrategies.strategies import SpatialStrategy
from tests.conftest import ROOT, quiet_trainer
from tests.runner import panels
from tests.spatial.spatial_networks import ResNet, UNet

CLASSES = 5
SAMPLES, HEIGHT, WIDTH = 11, 41, 33


class OwnModule(LightningModule):
    """A module as a user writes it, for labels of images or of pixels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.noise = nn.Dropout(0.2)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.area = MulticlassAUROC(CLASSES)
        self.pixels = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        assert images.shape[2:] == (HEIGHT, WIDTH)
        scores = self.network(self.noise(images))
        loss = F.cross_entropy(scores, targets)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("spread", scores.std(), sync_dist=True)
        self.log("pixels", self.pixels(images[:, 0, :, 0].square().sum()), on_epoch=True, metric_attribute="pixels")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.network(batch[0])
        self.accuracy(scores, batch[1])
        self.area.update(scores, batch[1])  # A call would also compute the area of each batch, which takes long.
        self.log("accuracy", self.accuracy)
        self.log("area", self.area)
        self.log("val_loss", F.cross_entropy(scores, batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"scores": self.network(batch[0]), "targets": batch[1]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class MaskPictures(Pictures):
    """Counts as for pictures, and keeps the integers instead of drawing them."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.counts = counts_for(pl_module, (3, HEIGHT, WIDTH))
        self.kept: dict[str, Tensor] = {}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._last is not None
        self.kept = {name: self._last.states[name] for name in ("confusion", "masks")}
        assert all(state.any() for state in self.kept.values())


class Scaling(OwnModule):
    """A module that scales images by a random number of Python, which loaders do not draw."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0] * (0.5 + random.random()), batch[1]], batch_idx)


def images_with(maps: bool) -> TensorDataset:
    """Return images with the class of each image, or of each pixel."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, HEIGHT, WIDTH, generator=generator)
    size = (SAMPLES, HEIGHT, WIDTH) if maps else (SAMPLES,)
    return TensorDataset(images, torch.randint(CLASSES, size, generator=generator))


def images_of_classes() -> TensorDataset:
    return images_with(False)


class Noisy(Dataset[Any]):
    """Images with noise that the process that loads them draws, and the classes of the images."""

    def __init__(self) -> None:
        self.images = images_of_classes()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        image, target = self.images[index]
        return image + 0.5 * torch.randn_like(image) + random.random(), target


def images_with_maps() -> TensorDataset:
    return images_with(True)


def volumes() -> Any:
    """Return the recipe for volumes in the documentation, as a module of Python."""
    sys.path.insert(0, str(ROOT / "docs/examples"))
    try:
        return importlib.import_module("volumes")
    finally:
        sys.path.pop(0)


def volume_segmenter() -> LightningModule:
    """Return the recipe's module for small volumes, with dropout before it."""
    module = volumes().VolumeSegmenter(widths=(2, 4, 8))
    module.network = nn.Sequential(nn.Dropout3d(0.2), nn.Dropout(0.1), module.network)
    return module


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        module: Function that makes the module.
        data: Function that makes the data set.
        trainer: Options of the trainer.
        then: Methods of the trainer that follow ``fit``.
        seed: Seed of the run and of the loader's worker, as Lightning's `seed_everything` stores it; None for no seed
            and no worker.
    """

    module: Callable[[], LightningModule]
    data: Callable[[], Dataset[Any]] = images_of_classes
    trainer: dict[str, Any] = field(default_factory=dict)
    then: tuple[str, ...] = ()
    seed: str | None = None


SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
PROGRAMS = {
    "own classifier": Program(lambda: Scaling(ResNet(classes=CLASSES)), then=("test", "predict")),
    "own segmenter": Program(
        lambda: Scaling(UNet("transposed", classes=CLASSES)), images_with_maps,
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}, ("predict",),
    ),
    "classifier": Program(
        lambda: ImageClassifier(
            nn.Sequential(nn.Dropout(0.1), ResNet(classes=CLASSES), nn.Dropout(0.1)), CLASSES, SGD, mixup_alpha=0.4
        ),
        Noisy,
        trainer={"callbacks": [ActivationCheckpointing()]}, then=("validate",), seed="3",
    ),
    "segmenter": Program(
        lambda: ImageSegmenter(UNet("bilinear", classes=CLASSES), CLASSES, SGD, channels_last=True),
        images_with_maps, {"callbacks": [WeightAveraging(), MaskPictures()]},
    ),
    "volumes": Program(volume_segmenter, lambda: volumes().Balls(0, 4, 17)),
}  # fmt: skip


def train(name: str, strategy: Any, devices: int) -> dict[str, Tensor]:
    """Run a program, and return weights, buffers, the optimizer's state, logged values and predictions, by name.

    Only the first rank has the values that the logger has written.
    """
    program = PROGRAMS[name]
    torch.manual_seed(2)
    random.seed(2)
    module, logger = program.module(), CSVLogger("logs", name)
    trainer = quiet_trainer(strategy, devices, max_epochs=1, log_every_n_steps=1, logger=logger, **program.trainer)
    if isinstance(strategy, SpatialStrategy) and int(os.environ["LOCAL_RANK"]) % strategy.parts:
        torch.rand(7), random.random()  # The ranks of a group continue with the random numbers of its first rank.
    data, seeds = program.data(), {}
    if program.seed is not None:
        seeds = {"PL_GLOBAL_SEED": program.seed, "PL_SEED_WORKERS": "1"}
    with patch.dict(os.environ, seeds):
        trainer.fit(module, DataLoader(data, 4, shuffle=True, num_workers=len(seeds) // 2), DataLoader(data, 4))
    result = {f"state {name}": value.detach().clone() for name, value in module.state_dict().items()}
    for index, state in trainer.optimizers[0].state_dict()["state"].items():
        result |= {f"{name} {index}": value.clone() for name, value in state.items() if value is not None}
    result |= {f"logged {name}": torch.as_tensor(value) for name, value in trainer.callback_metrics.items()}
    if trainer.is_global_zero:
        with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
            for row, values in enumerate(csv.DictReader(file)):
                result |= {f"written {key} {row}": torch.tensor(float(value)) for key, value in values.items() if value}
    for callback in program.trainer.get("callbacks", ()):
        result |= {f"counted {name}": state for name, state in getattr(callback, "kept", {}).items()}
    for name in program.then:
        returned = getattr(trainer, name)(
            module, DataLoader(data, 4), **({} if name == "predict" else {"verbose": False})
        )
        if name == "predict":
            for key in returned[0]:
                result[f"predicted {key}"] = torch.cat([batch[key] for batch in returned])
        result |= {f"{name} {key}": torch.as_tensor(value) for key, value in trainer.callback_metrics.items()}
    return result


def train_all(make: Callable[[], Any], devices: int, names: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
    """Run programs one after another on this rank."""
    torch.set_default_dtype(torch.float64)
    use_strategy(devices)
    return {name: train(name, make(), devices) for name in names}


def train_with_hook(make: Callable[[], Any], devices: int, *hooked: int) -> str:
    """Train with a hook on some ranks that changes gradients, and return the lines of standard error."""
    use_strategy(devices)
    torch.manual_seed(2)
    module = OwnModule(nn.Conv2d(3, CLASSES, 3, padding=1))
    if dist.get_rank() in hooked:
        module.network.bias.register_hook(lambda gradient: 2 * gradient)
    trainer = quiet_trainer(make(), devices, max_epochs=1, limit_train_batches=3)
    with redirect_stderr(StringIO()) as errors:
        trainer.fit(module, DataLoader(images_with(True), 2))
    return errors.getvalue()


class Slow(OwnModule):
    """A module whose steps begin with a sleep on some ranks.

    Args:
        ranks: The ranks that sleep.
    """

    SECONDS = 0.2

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(nn.Conv2d(3, CLASSES, 3, padding=1))
        self.ranks, self.compared = ranks, list[bool]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank in self.ranks:
            time.sleep(self.SECONDS)
        self.compared.append(batch[0].parts.checks_order)
        return F.cross_entropy(self.network(batch[0]), batch[1])


def train_with_sleep(make: Callable[[], Any], devices: int, *ranks: int) -> tuple[dict[str, float], list[bool]]:
    """Train while some ranks sleep in each step.

    Returns:
        The mean time of each part of a step in ms, and for each step whether the ranks have compared their operations.
    """
    use_strategy(devices)
    profile = StepProfile(skip_first=1, steps=2)
    trainer = quiet_trainer(make(), devices, max_epochs=1, limit_train_batches=3, callbacks=[profile])
    with redirect_stdout(StringIO()):
        trainer.fit(module := Slow(ranks), DataLoader(images_with(True), 2))
    return profile.milliseconds, module.compared


class HeldRows(HeldBytes):
    """A count of the bytes of tensors, with the rows of divided tensors, for which torch runs several operations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, RowsTensor) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class Peaks(Callback):
    """Notes the predicted peaks of all ranks on rank 0, and the largest number of bytes of a rank's tensors."""

    predicted: Sequence[PeakMemory] = ()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.predicted = start_panel.predicted_memory(trainer, 4).peaks
        self.held = HeldRows()
        self.held.__enter__()
        self.state = sum(tensor.nbytes for tensor in (*pl_module.parameters(), *pl_module.buffers()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.held.__exit__(None, None, None)

    def counted(self) -> int:
        """Return the largest number of bytes of tensors until now."""
        return self.held.most + self.state


def peaks(make: Callable[[], Any], devices: int, precision: str) -> tuple[Sequence[PeakMemory], int, list[str]]:
    """Train for three steps, and return the predicted peaks of all ranks, this rank's real peak, and panels' lines.

    Rank 0 has the predictions. The lines are those of panels that get the real peak, and 1.3 times this peak.
    """
    torch.set_default_dtype(torch.float32)
    use_strategy(devices)
    module = OwnModule(UNet("bilinear", classes=CLASSES))
    module.example_input_array = torch.zeros(1, 3, HEIGHT, WIDTH)
    noted = Peaks()
    with panels.compared_peaks(noted.counted, 1.0, 1.3) as (callbacks, lines):
        trainer = quiet_trainer(make(), devices, max_epochs=1, precision=precision, callbacks=[*callbacks, noted])
        trainer.fit(module, DataLoader(images_with(True), 4))
    return noted.predicted, noted.counted(), lines


class Signalled(Callback):
    """Notes the number of steps, and sends a signal to one rank in the third step."""

    steps = 0

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.steps = trainer.global_step
        if trainer.global_rank == self.rank and self.steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def train_with_signal(make: Callable[[], Any], devices: int, rank: int) -> tuple[int, bool]:
    """Train until a rank gets a signal, and return the number of the last step, and whether the signal stopped it."""
    use_strategy(devices)
    graceful_stop.CHECK_SECONDS = 0
    module, signalled = OwnModule(nn.Conv2d(3, CLASSES, 3, padding=1)), Signalled(rank)
    # After the usual time to stop, this process would be killed in the runs that follow.
    trainer = quiet_trainer(make(), devices, max_epochs=20, callbacks=[signalled, GracefulStop(grace=600)])
    try:
        trainer.fit(module, DataLoader(images_with(True), 2))
    except SystemExit:
        return signalled.steps, True
    return signalled.steps, False


def use_strategy(devices: int) -> None:
    """Set the environment variables of a process that is a rank."""
    if dist.is_initialized():
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": str(devices)}


class Spiked(OwnModule):
    """A module with gradients in the second step of the last batch that are infinite in half precision, in one row."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        scores = self.network(images)
        loss = F.cross_entropy(scores, targets)
        is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        return loss + 1000 * scores[:, :, -1].float().sum() if is_last and batch_idx == 1 else loss


def train_in(
    make: Callable[[], Any], devices: int, precision: str, kind: type[OwnModule] = OwnModule
) -> tuple[Tensor, float]:
    """Return all weights after an epoch in a precision, and the scale of the loss."""
    use_strategy(devices)
    torch.manual_seed(2)
    module, scaler, options = kind(UNet("transposed", classes=CLASSES)), None, {"precision": precision}
    if precision == "16-mixed":  # Lightning's own plugin for the CPU would take bfloat16.
        scaler = torch.amp.GradScaler("cpu", 1024.0, growth_factor=8.0, growth_interval=1)
        options = {"plugins": [MixedPrecision(precision, "cpu", scaler)]}
    quiet_trainer(make(), devices, max_epochs=1, **options).fit(module, DataLoader(images_with(True), 4))
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    return weights, 1.0 if scaler is None else scaler.get_scale()


def train_from(make: Callable[[], Any], devices: int, epochs: int, file: str | None, saved: str) -> None:
    """Train up to a number of epochs, from a checkpoint if there is one, and save a checkpoint."""
    torch.set_default_dtype(torch.float64)
    use_strategy(devices)
    torch.manual_seed(2)
    module = ImageSegmenter(UNet("bilinear", classes=CLASSES), CLASSES, SGD)
    trainer = quiet_trainer(make(), devices, max_epochs=epochs)
    trainer.fit(module, DataLoader(images_with(True), 4), ckpt_path=file)
    trainer.save_checkpoint(saved)
