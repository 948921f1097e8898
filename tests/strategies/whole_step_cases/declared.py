"""Cases of modules that declare `loss(outputs, targets)`, and of losses that are not quite the declared loss."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.strategies.whole_step_cases.base import CLASSES, Classifier, case


class Declared(Classifier):
    """A classifier that declares its loss as a mean over samples."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def changed(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        loss = self.changed(self.loss(outputs, batch[1]), outputs, batch[1])
        self.log("loss", loss)
        return loss


@case(samples=45)
class DeclaredLoss(Declared):
    pass


@case()
class DeclaredHead(Declared):
    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(4 * F.normalize(outputs) @ F.normalize(self.proxies).T, targets)


@case()
class DeclaredClassWeights(Declared):
    """The weighted cross entropy divides by the batch's weights, so it is not a mean over samples."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, weight=torch.arange(1.0, 6.0))


@case()
class DeclaredTwoCalls(Declared):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.loss(self.net(x), y) + self.loss(self.net(x.flip(-1)), y)


@case()
class DeclaredSmoothing(Declared):
    def changed(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, label_smoothing=0.1)


@case()
class DeclaredPenalty(Declared):
    def changed(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss + 0.1 * sum(p.square().sum() for p in self.net.parameters())


@case()
class DeclaredTiny(Declared):
    """A small term must not be lost in a tolerance."""

    def changed(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss + 1e-6 * outputs.square().mean()


@case()
class DeclaredBranch(Declared):
    def changed(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss * 2 if loss > 1.6 else loss


@case()
class DeclaredMixed(Declared):
    def changed(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * loss + 0.5 * self.loss(outputs, targets.roll(1))


@case()
class DeclaredSkip(Declared):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 3 else loss


@case()
class DeclaredManual(Declared):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


@case(trainer={"gradient_clip_val": 0.1})
class DeclaredClip(Declared):
    pass


@case(trainer={"accumulate_grad_batches": 4})
class DeclaredAccumulation(Declared):
    pass


# The cases from here on are not in the reproductions or the prototypes.


@case()
class DeclaredFocal(Declared):
    """A focal loss with a margin that grows, and outputs that a hook records."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return ((1 - torch.exp(-losses)) ** 2 * losses).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history.append(outputs["loss"].item())


@case()
class DeclaredSum(Declared):
    """Declares a sum over samples."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.1 * F.cross_entropy(outputs, targets, reduction="sum")


@case(validates=True)
class DeclaredAndValidated(Declared):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self(batch[0]), batch[1]))


@case(samples=45)
class DeclaredWeight(DeclaredClassWeights):
    """The class weights divide the loss, and the module says so."""

    def loss_weight(self, targets: Tensor) -> Tensor:
        return torch.arange(1.0, 6.0)[targets].sum()


@case(samples=45)
class DeclaredWithTraces(Declared):
    """The loss logs, counts and stores values, of which calls for microbatches must not leave a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = super().loss(outputs, targets)
        self.count += 1
        self.history.append(loss.item())
        self.log("inner", loss, on_epoch=True)
        return loss


@case()
class DeclaredByModule(Declared):
    """Declares the loss by a module with a parameter, and adds a penalty in the last epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = ScaledLoss()  # type: ignore[assignment]

    def changed(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss + 1e-6 * outputs.square().mean() if self.current_epoch == 1 else loss


class ScaledLoss(nn.CrossEntropyLoss):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(self.scale * outputs, targets) + 0.1 * self.scale.square()


@case()
class DeclaredAdversarial(Declared):
    """Trains with images that are changed by their own gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].requires_grad_()
        loss = self.loss(self.net(x), batch[1])
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss + self.loss(self.net(x.detach() + 0.1 * gradient.sign()), batch[1])
