"""Cases in which the user's code reads values: logs, metrics, branches, lists and files."""

import json
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Accuracy, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score

from tests.strategies.whole_step_cases.base import CLASSES, Classifier, case


@case(samples=45)
class PartialLastBatch(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss


@case()
class BranchOnLoss(Classifier):
    best = 0.0

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        self.best = max(self.best, loss.item())
        self.log("best", self.best)
        self.log("item", loss.item())
        if loss > 1.6:
            loss = loss * 2
        if self.net[0].weight.norm() > 1.0:
            loss = loss * 1.5
        self.history.append(float(loss))
        return loss


@case()
class LoggedMetric(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        self.accuracy(scores.softmax(1), y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return F.cross_entropy(scores, y)


@case()
class BranchOnMetric(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        self.accuracy.update(scores.argmax(1), y)
        accuracy = self.accuracy.compute()
        self.log("accuracy", accuracy)
        loss = F.cross_entropy(scores, y)
        return loss * 2 if accuracy > 0.25 else loss


@case()
class NumpyAndLists(Classifier):
    hits = 0

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        self.hits += int((scores.detach().argmax(1).numpy() == y.numpy()).sum())
        self.log("hits", float(self.hits))
        self.history += map(float, scores.argmax(1).tolist())
        self.log("moments", torch.tensor([scores.mean(), scores.std()]).sum())
        self.history.append(float(f"{scores.mean():.6f}"))
        assert str(scores)
        return F.cross_entropy(scores, y)


@case(error="the ranks run different code: .* waits for _local_scalar_dense")
class ReadOnMainRank(Classifier):
    """Reads the loss on the first rank only. Under several stages this cannot work, and must end with an error."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        if self.trainer.is_global_zero:
            self.best = loss.item()
        return loss


@case()
class BranchOnMean(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        if len(self.losses) > 3 and loss > torch.stack(self.losses).mean():
            return loss * 0.5
        return loss


# The cases from here on are not in the reproductions or the prototypes.


@case()
class OutputsOfEpoch(Classifier):
    """Collects outputs, and computes a confusion matrix from them at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[tuple[Tensor, Tensor]] = []

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        self.outputs.append((scores.detach(), y))
        return F.cross_entropy(scores, y)

    def on_train_epoch_end(self) -> None:
        scores = torch.cat([score for score, _ in self.outputs])
        labels = torch.cat([label for _, label in self.outputs])
        matrix = MulticlassConfusionMatrix(CLASSES)(scores, labels)
        self.history += matrix.flatten().tolist()
        for index, row in enumerate(matrix):
            self.log(f"recall_{index}", row[index] / row.sum().clamp(min=1))
        self.outputs.clear()


@case()
class FiniteLoss(Classifier):
    """Skips a batch whose loss is not finite, or whose loss is far above the moving average."""

    average: float | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.step_loss(*batch)
        if not torch.isfinite(loss).all():
            raise RuntimeError("the loss is not finite")
        value = loss.detach().item()
        skipped = self.average is not None and value > 1.1 * self.average
        self.average = value if self.average is None else 0.7 * self.average + 0.3 * value
        self.history.append(self.average)
        return None if skipped else loss


@case()
class LossOfSamples(Classifier):
    """Keeps the loss of each sample, found by a key of its image, and weighs samples by their last loss."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[float, float] = {}

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        keys = [round(image.sum().item(), 6) for image in x]
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        weights = torch.tensor([self.known.get(key, 1.0) for key in keys])
        self.known.update(zip(keys, losses.detach().cpu().numpy().tolist(), strict=True))
        self.history.append(sum(self.known.values()))
        return (weights * losses).sum() / weights.sum()


@case()
class LoggedNorms(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict({f"norm/{name}": parameter.norm() for name, parameter in self.net.named_parameters()})
        self.log("step_loss", outputs["loss"])

    def on_train_epoch_end(self) -> None:
        self.history.append(float(self.trainer.callback_metrics["loss_epoch"]))
        self.history += [float(value) for _, value in sorted(self.trainer.logged_metrics.items())]


@case()
class CollectionOfMetrics(Classifier):
    def __init__(self) -> None:
        super().__init__()
        metrics = {"top1": Accuracy("multiclass", num_classes=CLASSES), "f1": MulticlassF1Score(CLASSES)}
        self.metrics = MetricCollection(metrics, prefix="train/")
        self.mean_margin = MeanMetric()

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        self.metrics.update(scores, y)
        best = scores.detach().topk(2, dim=1).values
        self.mean_margin.update(best[:, 0] - best[:, 1])
        return F.cross_entropy(scores, y)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.metrics.compute())
        self.log("margin", self.mean_margin.compute())
        self.metrics.reset()
        self.mean_margin.reset()


@case()
class QuantileWeights(Classifier):
    """Cuts the losses at a quantile that numpy computes from all earlier losses."""

    def __init__(self) -> None:
        super().__init__()
        self.values = np.zeros(0)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        self.values = np.concatenate([self.values, losses.detach().numpy()])[-64:]
        limit = float(np.quantile(self.values, 0.8))
        self.history.append(limit)
        return losses.clamp(max=limit).mean()


@case()
class WrittenFile(Classifier):
    """Writes a line of JSON for each step, on the first rank only. All ranks have read the values before."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        line = {"loss": outputs["loss"].item(), "step": self.global_step, "labels": batch[1].tolist()}
        if self.trainer.is_global_zero:
            with open("steps.jsonl", "a") as file:
                print(json.dumps(line), file=file)
        self.history.append(line["loss"])


@case()
class ThresholdsOfClasses(Classifier):
    """Adjusts a threshold for each class by what the batch's predictions were, in plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.thresholds = [0.0] * CLASSES

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        for label in range(CLASSES):
            chosen = (scores.argmax(1) == label).sum()
            self.thresholds[label] += 0.05 * (1 if chosen > len(y) / CLASSES else -1)
        self.history += self.thresholds
        return F.cross_entropy(scores - torch.tensor(self.thresholds), y)


@case()
class RawSecondMoments(Classifier):
    """Computes with values that were read on the way: norms, shapes, `bool`, `int`, `max` and sorting in Python."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        order = sorted(range(len(scores)), key=lambda row: scores[row, 0].item())
        weights = torch.ones(len(scores))
        weights[order[:2]] = 2.0
        if bool((scores[:, 0] > scores[:, 1]).any()):
            weights[int(scores[:, 0].argmax())] = 3.0
        largest = max(scores.abs().max(), torch.tensor(0.5))
        nonzero = (scores > 0).nonzero()
        self.history += [float(largest), float(len(nonzero)), float(scores.unique().numel())]
        return (weights * F.cross_entropy(scores / largest, y, reduction="none")).mean()
