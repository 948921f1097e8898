"""Cases of validation, test and prediction with losses, metrics and outputs of their own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Accuracy, MetricCollection
from torchmetrics.classification import MulticlassAUROC

from tests.strategies.whole_step_cases.base import CLASSES, Classifier, case
from tests.strategies.whole_step_cases.comparing import nt_xent


@case(validates=True, then=("validate",))
class ValidationMetrics(Classifier):
    def __init__(self) -> None:
        super().__init__()
        metrics = {"accuracy": Accuracy("multiclass", num_classes=CLASSES), "area": MulticlassAUROC(CLASSES)}
        self.metrics = MetricCollection(metrics, prefix="val/")

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        self.metrics.update(scores.softmax(1), batch[1])
        self.log("val/loss", loss, prog_bar=True)
        return {"loss": loss, "scores": scores}

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.metrics.compute())
        self.metrics.reset()


@case(then=("test",))
class TestWithFlips(Classifier):
    """Averages the predictions of several views in the test."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = torch.stack([self(x).softmax(1), self(x.flip(-1)).softmax(1), self(x.roll(1, -2)).softmax(1)])
        self.log("test_accuracy", (scores.mean(0).argmax(1) == y).double().mean())
        self.log("agreement", (scores.argmax(-1).unique_consecutive(dim=0).shape[0] == 1) * 1.0)
        self.history.append(scores.var(0).sum().item())


@case(then=("predict",))
class Predictions(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        confidence, label = scores.softmax(1).max(1)
        return {"label": label, "confidence": confidence, "batch": batch_idx}


@case(validates=True)
class NeighboursInMemory(Classifier):
    """Validates with the nearest neighbours in a memory of training embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Tensor] = []
        self.labels: list[Tensor] = []

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        embeddings = self.net(x)
        self.memory.append(F.normalize(embeddings.detach(), dim=1))
        self.labels.append(y)
        return nt_xent(torch.cat([embeddings, self.net(x.flip(-1))]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.memory:
            return
        queries = F.normalize(self(batch[0]), dim=1)
        nearest = (queries @ torch.cat(self.memory).T).topk(3).indices
        votes = torch.cat(self.labels)[nearest].mode(1).values
        self.log("knn", (votes == batch[1]).float().mean())

    def on_validation_epoch_end(self) -> None:
        self.memory.clear()
        self.labels.clear()


@case(validates=True, epochs=3)
class ValidationOutputs(Classifier):
    """Collects outputs of validation, and changes the loss of the next epoch by the classes' recalls."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.weights = torch.ones(CLASSES)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y, weight=self.weights)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        self.outputs.append((scores.argmax(1), batch[1]))
        return F.cross_entropy(scores, batch[1])

    def on_validation_epoch_end(self) -> None:
        predicted, labels = (torch.cat(column) for column in zip(*self.outputs, strict=True))
        hits = torch.bincount(labels[predicted == labels], minlength=CLASSES)
        self.weights = 2 - hits / torch.bincount(labels, minlength=CLASSES).clamp(min=1)
        self.outputs.clear()
        self.log("lowest_recall", 2 - self.weights.max())


@case(validates=True)
class PlateauOfValidation(Classifier):
    """Halves the learning rate in Python if validation has not improved, and keeps the best value."""

    def __init__(self) -> None:
        super().__init__()
        self.best = 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), on_step=False, on_epoch=True)

    def on_validation_end(self) -> None:
        value = self.trainer.callback_metrics["val_loss"].item()
        self.history.append(value)
        if value > self.best - 0.05:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] *= 0.5
        self.best = min(self.best, value)


@case(validates=True, trainer={"val_check_interval": 2, "num_sanity_val_steps": 1})
class ValidationInEpoch(Classifier):
    """Validates every two batches, with a mode of its own for some layers."""

    def on_validation_model_eval(self) -> None:
        self.net.eval()
        self.net[3].train()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("training_blocks", float(sum(module.training for module in self.net)))
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))


@case(validates=True)
class SeveralLosses(Classifier):
    """Shares one step between training and validation, with a stage name in each log."""

    def shared_step(self, batch: Any, stage: str) -> Tensor:
        x, y = batch
        scores = self(x)
        loss = F.cross_entropy(scores, y)
        entropy = -(scores.softmax(1) * scores.log_softmax(1)).sum(1).mean()
        self.log_dict({f"{stage}_loss": loss, f"{stage}_entropy": entropy}, on_epoch=True, on_step=False)
        return loss - 0.1 * entropy

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared_step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared_step(batch, "val")
