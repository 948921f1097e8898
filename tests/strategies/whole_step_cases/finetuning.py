"""Cases of callbacks: Lightning's own callbacks, and callbacks that users write."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn

from tests.strategies.whole_step_cases.base import BATCH, Classifier, case


class UnfreezeFirst(BaseFinetuning):
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.05)


@case(callbacks=lambda: [UnfreezeFirst()])
class Finetuning(Classifier):
    pass


# The cases from here on are not in the reproductions or the prototypes.


class Validated(Classifier):
    """A classifier that logs a loss in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))


@case(callbacks=lambda: [BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01)], epochs=3)
class FinetunedBackbone(Classifier):
    """Lightning's BackboneFinetuning takes `self.backbone`. The network is divided, the head is outside."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 5)

    @property
    def backbone(self) -> Any:
        return self.net

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


@case(callbacks=lambda: [EMAWeightAveraging(decay=0.8)], validates=True)
class AveragedWeights(Validated):
    pass


class EveryThird(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.7), use_buffers=False)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 3 == 0


@case(callbacks=lambda: [EveryThird()])
class AveragedNowAndThen(Classifier):
    pass


@case(callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3})], epochs=3)
class GrowingAccumulation(Classifier):
    pass


@case(
    callbacks=lambda: [LearningRateMonitor(log_momentum=True)],
    trainer={"logger": CSVLogger("."), "log_every_n_steps": 1},
)
class MonitoredLearningRate(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


@case(callbacks=lambda: [EarlyStopping("val_loss", min_delta=0.3, patience=1)], epochs=8, validates=True)
class StoppedEarly(Validated):
    def on_fit_end(self) -> None:
        self.history.append(float(self.trainer.current_epoch))


@case(
    callbacks=lambda: [ModelCheckpoint(".", "best", "val_loss", save_last=True, enable_version_counter=False)],
    trainer={"enable_checkpointing": True},
    epochs=3,
    validates=True,
)
class BestCheckpoint(Validated):
    """Reads the best checkpoint at the end of training, and compares it with the weights now."""

    def on_train_end(self) -> None:
        checkpoint: Any = self.trainer.checkpoint_callback
        self.trainer.strategy.barrier()
        saved = torch.load(checkpoint.best_model_path, weights_only=True)
        self.history.append(float(checkpoint.best_model_score))
        for name in sorted(saved["state_dict"]):
            self.history.append(saved["state_dict"][name].abs().sum().item())
        for number in sorted(saved["optimizer_states"][0]["state"]):
            self.history.append(saved["optimizer_states"][0]["state"][number]["momentum_buffer"].abs().sum().item())


@case(callbacks=lambda: [LearningRateFinder(num_training_steps=20, max_lr=0.5)], epochs=1)
class FoundLearningRate(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_fit_end(self) -> None:
        self.history.append(self.lr)


def note_norm(trainer: Trainer, module: Any, *_: Any) -> None:
    module.history.append(float(sum(parameter.norm() for parameter in module.parameters())))


@case(callbacks=lambda: [LambdaCallback(on_train_batch_end=note_norm, on_train_epoch_end=note_norm)])
class NotedNorms(Classifier):
    pass


@case(callbacks=lambda: [ModelPruning("l1_unstructured", amount=0.2, use_global_unstructured=True)])
class Pruned(Classifier):
    pass


class NewHead(Callback):
    """A callback that draws a new last layer in each epoch, and freezes the layers before by their number."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        last = [module for module in pl_module.net.modules() if isinstance(module, nn.Linear)][-1]
        nn.init.kaiming_uniform_(last.weight)
        nn.init.zeros_(last.bias)
        for number, module in enumerate(pl_module.net):
            module.requires_grad_(number >= 2 or trainer.current_epoch > 0)


@case(callbacks=lambda: [NewHead()])
class DrawnHead(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Histograms(Callback):
    """A callback that records histograms and quantiles of weights and gradients."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.net.parameters():
            if parameter.grad is not None:
                pl_module.history.append(parameter.grad.flatten().quantile(0.9).item())

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        weights = torch.cat([parameter.detach().flatten() for parameter in pl_module.parameters()])
        pl_module.history += torch.histc(weights, 5, -0.5, 0.5).tolist()


@case(callbacks=lambda: [Histograms()])
class RecordedHistograms(Classifier):
    pass


class BestWeights(Callback):
    """A callback that keeps a copy of the best weights in memory, and loads them when training ends."""

    best = float("inf")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        loss = trainer.callback_metrics["loss_epoch"].item()
        if loss < self.best:
            self.best = loss
            self.weights = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.history.append(self.best)
        pl_module.load_state_dict(self.weights)


@case(callbacks=lambda: [BestWeights()], epochs=4)
class RestoredBest(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.95)


class WeightDecayOnce(Callback):
    """A callback that shrinks all weights at once by torch's foreach functions, and swaps two layers' biases."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        torch._foreach_mul_(list(pl_module.net.parameters()), 0.995)
        first, second = pl_module.net[1].conv.bias, pl_module.net[3].conv.bias
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)


@case(callbacks=lambda: [WeightDecayOnce()])
class SwappedBiases(Classifier):
    pass


class Progress(Callback):
    """A callback that counts what it sees: batches, samples, and the labels of each batch."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        assert images.shape[0] == len(labels) <= BATCH
        pl_module.history += [float(batch_idx), float(labels.sum()), images.mean().item()]


@case()
class CountedBatches(Classifier):
    """The module itself gives the callback to the Trainer."""

    def configure_callbacks(self) -> Any:
        return [Progress()]
