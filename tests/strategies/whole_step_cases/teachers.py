"""Cases that call the network several times in a step, or have a second network such as a teacher."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.strategies.whole_step_cases.base import CLASSES, Classifier, case, classifier
from tests.strategies.whole_step_cases.containers import Skips


@case()
class Byol(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(CLASSES, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for target, online in zip(self.target.parameters(), self.net.parameters(), strict=True):
                target.mul_(0.9).add_(online, alpha=0.1)
            target_a, target_b = self.target(x), self.target(x.flip(-1))
        a, b = self.predictor(self.net(x)), self.predictor(self.net(x.flip(-1)))
        return 4 - 2 * F.cosine_similarity(a, target_b).mean() - 2 * F.cosine_similarity(b, target_a).mean()


@case()
class Moco(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(CLASSES, 32), dim=0))
        self.pointer = 0

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for target, online in zip(self.target.parameters(), self.net.parameters(), strict=True):
                target.data = target.data * 0.9 + online.data * 0.1
            keys = F.normalize(self.target(x.flip(-1)), dim=1)
        queries = F.normalize(self.net(x), dim=1)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone().detach()], 1) / 0.2
        self.queue[:, self.pointer : self.pointer + len(keys)] = keys.T
        self.pointer = (self.pointer + len(keys)) % 32
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@case()
class OutputAsInput(Classifier):
    """Weighs the images of a second call by the confidence of the first call."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        confidence = self.net(x).softmax(1).max(1).values.view(-1, 1, 1, 1)
        return F.cross_entropy(self.net(x * confidence), y)


# The cases from here on are not in the reproductions or the prototypes.


@case()
class MeanTeacher(Classifier):
    """Updates a copied teacher after each batch, and weighs its term more and more."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net)
        for parameter in self.teacher.parameters():
            parameter.detach_()

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        student = self.net(x)
        with torch.no_grad():
            teacher = self.teacher(x.flip(-1))
        weight = min(1.0, self.global_step / 10)
        return F.cross_entropy(student, y) + weight * F.mse_loss(student.softmax(1), teacher.softmax(1))

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        decay = min(0.9, 1 - 1 / (self.global_step + 1))
        teacher, student = self.teacher.state_dict(), self.net.state_dict()
        for key, value in teacher.items():
            value.copy_(decay * value + (1 - decay) * student[key])


@case()
class Distillation(Classifier):
    """Has a frozen teacher of another architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))
        self.teacher.requires_grad_(False).eval()

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = (self.teacher(x) / 2).softmax(1)
        scores = self.net(x)
        return F.cross_entropy(scores, y) + 4 * F.kl_div((scores / 2).log_softmax(1), soft, reduction="batchmean")


@case()
class Prototypes(Classifier):
    """Normalises prototypes in each step, and assigns codes by Sinkhorn's algorithm, as SwAV does."""

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Linear(CLASSES, 6, bias=False)

    @torch.no_grad()
    def codes(self, scores: Tensor) -> Tensor:
        q = torch.exp(scores / 0.2).T
        q /= q.sum()
        for _ in range(3):
            q /= q.sum(1, keepdim=True) * q.shape[0]
            q /= q.sum(0, keepdim=True) * q.shape[1]
        return (q * q.shape[1]).T

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
        first, second = (self.prototypes(F.normalize(self.net(view), dim=1)) for view in (x, x.flip(-1)))
        loss = -(self.codes(first) * F.log_softmax(second / 0.3, 1)).sum(1).mean()
        return loss - (self.codes(second) * F.log_softmax(first / 0.3, 1)).sum(1).mean()


@case()
class Dino(Classifier):
    """Has a teacher whose outputs are centred by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = classifier()
        self.teacher.load_state_dict(self.net.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, CLASSES))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        views = [x, x.flip(-1), x[..., 1:7, 1:7]]
        with torch.no_grad():
            teacher = torch.cat([self.teacher(view) for view in views[:2]])
        students = [self.net(view) for view in views]
        targets = ((teacher - self.center) / 0.1).softmax(1).chunk(2)
        loss = torch.zeros(())
        for index, target in enumerate(targets):
            for other, student in enumerate(students):
                if index != other:
                    loss = loss - (target * F.log_softmax(student / 0.2, dim=1)).sum(1).mean()
        self.center = 0.9 * self.center + 0.1 * teacher.mean(0, keepdim=True)
        return loss / 4

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            teacher.data.mul_(0.95).add_(0.05 * student.detach().data)


@case()
class Fixmatch(Classifier):
    """Trains with labels that the network itself has predicted with confidence."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        half = len(x) // 2
        with torch.no_grad():
            confidence, labels = self.net(x[half:]).softmax(1).max(1)
            mask = (confidence > 0.25).double()
        noisy = self.net(x[half:] + 0.3 * torch.randn_like(x[half:]))
        self.log("used", mask.mean())
        unlabelled = (F.cross_entropy(noisy, labels, reduction="none") * mask).mean()
        return F.cross_entropy(self.net(x[:half]), y[:half]) + unlabelled


@case()
class RotationTask(Classifier):
    """Trains a second head outside the network to tell how far an image was turned."""

    def __init__(self) -> None:
        super().__init__()
        self.rotation = nn.Linear(CLASSES, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        turns = torch.randint(4, (len(x),))
        turned = torch.stack([torch.rot90(image, int(turn), (1, 2)) for image, turn in zip(x, turns, strict=True)])
        main = F.cross_entropy(self(x), y)
        extra = F.cross_entropy(self.rotation(self(turned)), turns)
        self.log_dict({"main": main, "extra": extra})
        return main + 0.5 * extra


@case()
class PartOfNetwork(Classifier):
    """Calls the first layers by themselves for a perceptual term."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(x), y)
        with torch.no_grad():
            features = self.net[:2](x.flip(-1))
        return loss + 0.1 * F.mse_loss(self.net[:2](x), features.flip(-1))


@case()
class AccumulatedViews(Classifier):
    """Averages the predictions of many calls, and compares each call with the average."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = torch.stack([self.net(x.roll(shift, -1)) for shift in range(3)])
        mean = scores.softmax(-1).mean(0)
        spread = (scores.softmax(-1) - mean).square().sum(-1).mean()
        return F.nll_loss(mean.log(), y) + spread


@case()
class Snapshot(Classifier):
    """Keeps the network of the epoch before, and stays close to its predictions and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[nn.Module] = []  # A list hides it from state_dict.

    def on_train_epoch_end(self) -> None:
        self.before = [copy.deepcopy(self.net).eval().requires_grad_(False)]

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        loss = F.cross_entropy(scores, y)
        if self.before:
            loss = loss + F.mse_loss(scores, self.before[0](x))
            pairs = zip(self.net.parameters(), self.before[0].parameters(), strict=True)
            loss = loss + 0.01 * sum((new - old).square().sum() for new, old in pairs)
        return loss


@case(cuts=("down", "bottom"))
class CopiedUnet(Classifier):
    """Has a teacher that is a copy of a network whose own forward joins tensors."""

    network = Skips

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        restored = self.net(x)
        return F.mse_loss(restored, x) + F.mse_loss(restored, self.teacher(x.flip(-1)).flip(-1))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            old.data.lerp_(new.data, 0.2)
