"""Cases of options of Lightning's Trainer and of Lightning's callbacks."""

import io
import re
import sys
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.strategies.whole_step_cases.base import CLASSES, Block, Classifier, Part, case, classifier, labelled_images
from tests.strategies.whole_step_cases.finetuning import Validated


@case(
    trainer={
        "overfit_batches": 2,
        "detect_anomaly": True,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
        "profiler": "simple",
    }
)
class Overfit(Validated):
    pass


@case(
    trainer={
        "gradient_clip_val": 0.05,
        "accumulate_grad_batches": 2,
        "limit_train_batches": 5,
        "limit_val_batches": 1,
        "val_check_interval": 2,
        "num_sanity_val_steps": 2,
    },
    validates=True,
)
class Limits(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.history.append(float(self.global_step))


@case(
    trainer={
        "limit_train_batches": 0.5,
        "limit_val_batches": 0.5,
        "check_val_every_n_epoch": 2,
        "inference_mode": False,
    },
    validates=True,
    then=("validate", "test", "predict"),
)
class GradientsOfValidation(Validated):
    """Computes gradients in validation, which inference mode would forbid."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            loss = F.cross_entropy(self(batch[0]), batch[1])
            gradients = torch.autograd.grad(loss, list(self.net.parameters()))
        self.log_dict({"val_gradient": sum(gradient.norm() for gradient in gradients), "val_loss": loss.detach()})

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).softmax(1)


@case(trainer={"fast_dev_run": 2}, validates=True)
class FastDevRun(Validated):
    pass


@case(trainer={"profiler": "pytorch"}, samples=20, epochs=1)
class TorchProfiler(Classifier):
    pass


@case(
    trainer={
        "barebones": True,
        "max_steps": 5,
        "max_epochs": -1,
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")),
        "num_sanity_val_steps": None,
    }
)
class Barebones(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step_loss(*batch)


class Loading(Classifier):
    """Makes its loaders, with more data in each epoch."""

    batch_size = 4

    def train_dataloader(self) -> Any:
        size, rank = self.trainer.world_size, self.trainer.global_rank
        parts = self.trainer.strategy.loading_processes(size) if size > 1 else 1
        data = Subset(labelled_images(), range(16 * (1 + self.current_epoch)))
        return DataLoader(data, self.batch_size // parts, sampler=Part(data, parts, rank % parts, seed=3))


@case(loads_itself=True, trainer={"reload_dataloaders_every_n_epochs": 1}, epochs=3)
class Reloaded(Loading):
    pass


@case(
    callbacks=lambda: [BatchSizeFinder(init_val=2, max_trials=2)],
    loads_itself=True,
    epochs=1,
    error="Batch size finder is not supported with distributed strategies",
)
class FoundBatchSize(Loading):
    pass


@case(
    callbacks=lambda: [
        ModelPruning(
            "ln_structured",
            amount=0.25,
            pruning_dim=0,
            pruning_norm=2,
            use_global_unstructured=False,
            parameter_names=["weight"],
            use_lottery_ticket_hypothesis=True,
            resample_parameters=True,
            make_pruning_permanent=False,
        )
    ],
    epochs=3,
)
class LotteryTicket(Classifier):
    """Weights are pruned after each epoch, then set back. At the end a graph uses the masks."""


@case(
    callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01, train_bn=False)],
    epochs=3,
    cuts=("backbone.0", "backbone.2"),
    microbatches=1,
    submodule=None,
)
class FinetunedParts(LightningModule):
    """The backbone and the head are parts of the module's own forward, which is divided."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, 2, 1), Block(), nn.BatchNorm2d(8), Block(), nn.AdaptiveAvgPool2d(2)]
        self.backbone, self.head = nn.Sequential(*layers), nn.Linear(32, CLASSES)
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x).flatten(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        trained = filter(lambda parameter: parameter.requires_grad, self.parameters())
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Normalised(Validated):
    def network(self) -> nn.Module:
        return classifier(middle=nn.BatchNorm2d(8))


@case(
    callbacks=lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=0.4, annealing_epochs=2)],
    epochs=4,
    microbatches=1,
    validates=True,
)
class StochasticNormalised(Normalised):
    """Batch normalisation gets its statistics in one more epoch at the end."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


@case(
    callbacks=lambda: [EMAWeightAveraging(decay=0.7, update_starting_at_step=2)],
    microbatches=1,
    validates=True,
    then=("validate",),
)
class AveragedNormalised(Normalised):
    pass


def checkpoints() -> list[Any]:
    options: Any = {"dirpath": ".", "enable_version_counter": False}
    return [
        ModelCheckpoint(filename="top-{epoch}", monitor="val_loss", save_top_k=2, mode="max", **options),
        ModelCheckpoint(filename="steps-{step}", every_n_train_steps=2, save_top_k=-1, **options),
        ModelCheckpoint(filename="weights-{epoch}", save_weights_only=True, every_n_epochs=2, **options),
        ModelCheckpoint(
            filename="{loss_step:.9f}", monitor="loss_step", every_n_train_steps=1, save_last="link", **options
        ),
        EarlyStopping("val_loss", patience=1, stopping_threshold=0.1),
        Timer("00:01:00:00"),
    ]


@case(callbacks=checkpoints, trainer={"enable_checkpointing": True}, samples=24, epochs=3, validates=True)
class SeveralCheckpoints(Validated):
    def on_train_end(self) -> None:
        self.trainer.strategy.barrier()
        for callback in self.trainer.checkpoint_callbacks:
            self.history += [float(len(callback.best_k_models)), float(callback.best_model_score or 0)]
            saved = torch.load(callback.best_model_path or callback.last_model_path, weights_only=True)
            self.history += [float(saved["global_step"]), *(v.sum().item() for v in saved["state_dict"].values())]
        self.trainer.strategy.barrier()


@case(
    callbacks=lambda: [ModelSummary(max_depth=-1), TQDMProgressBar(refresh_rate=1)],
    trainer={
        "logger": CSVLogger("."),
        "log_every_n_steps": 1,
        "enable_progress_bar": True,
        "enable_model_summary": True,
    },
    validates=True,
)
class Bars(Validated):
    """Notes whether rank 0 alone prints, and the numbers of parameters in what rank 0 prints."""

    def setup(self, stage: str) -> None:
        self.printed = sys.stdout = io.StringIO()

    def on_fit_end(self) -> None:
        sys.stdout = sys.__stdout__
        text = self.printed.getvalue()
        self.history.append(float(bool(text) == self.trainer.is_global_zero))
        lines = [line for line in self.trainer.strategy.broadcast(text).splitlines() if "rainable params" in line]
        self.history += [float(number) for line in lines for number in re.findall(r"\d+\.?\d*", line)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.step_loss(*batch)
        self.log("loss", loss, prog_bar=True)
        return loss


@case(
    callbacks=lambda: [RichModelSummary(max_depth=-1), RichProgressBar()],
    trainer={"enable_progress_bar": True, "enable_model_summary": True},
    validates=True,
)
class RichBars(Bars):
    pass
