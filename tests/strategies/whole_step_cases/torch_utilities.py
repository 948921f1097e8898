"""Cases of torch's utilities, of what a module may ask its trainer, and of ways to optimize."""

import copy
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.strategies.whole_step_cases.base import CLASSES, Classifier, Manual, case
from tests.strategies.whole_step_cases.finetuning import Validated


@case(trainer={"accumulate_grad_batches": 2})
class CycleOfSteps(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@case()
class PlateauOfSteps(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        options = {"scheduler": schedule, "interval": "step", "frequency": 2, "monitor": "loss_step"}
        return {"optimizer": optimizer, "lr_scheduler": options}


@case()
class Parametrized(Classifier):
    """Has every parametrization of torch, and keeps a graph that uses the parameters at the end."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.net[0])
        parametrizations.spectral_norm(self.net[1].conv)
        parametrizations.orthogonal(self.net[6])
        nn.utils.weight_norm(self.net[3].conv)

    def on_train_end(self) -> None:
        self.scores = self(torch.zeros(2, 3, 8, 8))
        self.history.append(self.scores.sum().item())


class PruneLater(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            prune.l1_unstructured(module.net[0], "weight", 0.3)
            prune.random_structured(module.net[3].conv, "weight", 2, 0)
        if trainer.current_epoch == 2:
            prune.remove(module.net[0], "weight")
            prune.remove(module.net[6], "weight")


@case(callbacks=lambda: [PruneLater()], samples=20, epochs=3)
class PrunedByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        prune.random_unstructured(self.net[1].conv, "weight", 0.5)
        prune.global_unstructured([(self.net[0], "bias"), (self.net[6], "weight")], prune.L1Unstructured, amount=0.4)


@case()
class OptimizerInBackward(Manual):
    """Each parameter is trained by an optimizer of its own, as soon as its gradient is complete."""

    def on_fit_start(self) -> None:
        self.each = {parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9) for parameter in self.parameters()}
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.train_parameter)

    def train_parameter(self, parameter: Any) -> None:
        self.each[parameter].step()
        self.each[parameter].zero_grad()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.step_loss(*batch))

    def configure_optimizers(self) -> None:
        return None


@case()
class HooksOfEveryKind(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_full_backward_hook(lambda module, of_inputs, of_outputs: (of_inputs[0] * 0.5,))
        self.net[3].register_full_backward_pre_hook(lambda module, of_outputs: (of_outputs[0] * 2,))
        self.net[6].register_forward_hook(lambda module, inputs, output: output * 1.5)
        self.net[6].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.net[0].weight.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(parameter: Any) -> None:
        parameter.grad *= 0.5

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self(x)
        scores.register_hook(lambda gradient: gradient * 0.5)
        return F.cross_entropy(scores, y)


@case(validates=True, trainer={"logger": CSVLogger("."), "log_every_n_steps": 1})
class LoggedInManyWays(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        self.log("sum", loss, sync_dist=True, on_epoch=True, on_step=True, reduce_fx="sum")
        self.log("max", loss, sync_dist=True, on_epoch=True, reduce_fx="max")
        self.log("min", scores.min(), on_epoch=True, reduce_fx=torch.min)
        self.log("mean", scores.mean(), sync_dist=True, on_epoch=True, on_step=False, batch_size=3)
        self.log("number", batch_idx, on_epoch=True, on_step=False)
        self.log("main rank", loss, rank_zero_only=True)
        self.log_dict({"a": loss, "b": scores.std()}, sync_dist=True, prog_bar=True)
        return {"loss": loss, "scores": scores.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history += [outputs["loss"].item(), outputs["scores"].sum().item()]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self(batch[0])
        self.log("val_sum", scores.sum(), reduce_fx="sum", sync_dist=True)
        self.log("val", F.cross_entropy(scores, batch[1]), sync_dist=True, on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("end", self.trainer.callback_metrics["sum_epoch"] * 2, sync_dist=True)
        self.history += [float(value) for _, value in sorted(self.trainer.logged_metrics.items())]


@case()
class AsksTheStrategy(Classifier):
    """Code that was written for several processes gathers, reduces and broadcasts in the step.

    Ranks would diverge if each kept its own number of a broadcast.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        scores, strategy = self(x), self.trainer.strategy
        gathered = self.all_gather(scores)
        numbers = self.all_gather({"a": scores.detach().amin(), "b": [y.double().mean(), 3]})
        strategy.barrier("here")
        self.history += [
            float(gathered.sum()),
            float(numbers["a"]),
            float(numbers["b"][0]),
            float(strategy.reduce(scores.detach().mean(), reduce_op="mean")),
            float(strategy.reduce(scores.detach().sum(), reduce_op="sum")),
            float(strategy.reduce(torch.tensor(2.0), reduce_op="max")),
            strategy.broadcast(float(self.global_rank)),
            strategy.broadcast({"std": scores.detach().std()})["std"].item(),
            float(strategy.reduce_boolean_decision(bool(scores.mean() > 0), all=False)),
        ]
        return F.cross_entropy(scores, y) + 0.01 * gathered.square().mean()


@case()
class MixupWithWeights(Classifier):
    """Mixes images, and pastes parts of images, with draws of torch and numpy, and weighs the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        order, weights = torch.randperm(len(x)), torch.rand(len(x)) + 0.5
        if np.random.random() < 0.5:
            share = torch.distributions.Beta(0.4, 0.4).sample()
            x = share * x + (1 - share) * x[order]
        else:
            share = np.random.beta(1.0, 1.0)
            side, row = int(8 * np.sqrt(1 - share)), np.random.randint(8)
            x[:, :, row : row + side, :side] = x[order, :, row : row + side, :side]
        scores = self(x)
        losses = share * self.criterion(scores, y) + (1 - share) * self.criterion(scores, y[order])
        return (losses * weights).sum() / weights.sum()


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization, which calls the closure twice."""

    def __init__(self, parameters: Any, rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad * self.param_groups[0]["rho"] / (norm + 1e-12))
        closure()
        for parameter in parameters:
            parameter.data = self.state[parameter]["old"]
        self.base.step()
        return loss


@case(trainer={"gradient_clip_val": 0.5})
class SamByClosure(Classifier):
    def configure_optimizers(self) -> Any:
        return Sam(self.parameters(), lr=0.1, momentum=0.9)


@case()
class HookedOptimization(Classifier):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.history += [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]

    def on_before_backward(self, loss: Tensor) -> None:
        self.history.append(loss.item())

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.2 if self.current_epoch else 0.1, "norm")
        self.history.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        self.history.append(float(closure()))
        if batch_idx % 2 == 0:
            optimizer.step(closure=closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.history.append(scheduler.get_last_lr()[0])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Gan(LightningModule):
    """Lightning's example of a GAN: each network has an optimizer, and is frozen while the other one trains."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        layers = [nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 192), nn.Tanh(), nn.Unflatten(1, (3, 8, 8))]
        self.generator = nn.Sequential(*layers)
        layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 8, 3, 2, 1), nn.Flatten()]
        self.discriminator = nn.Sequential(*layers, nn.Linear(32, 1), nn.Sigmoid())
        self.validation_z = torch.randn(4, 4)
        self.history: list[float] = []

    def forward(self, z: Tensor) -> Any:
        return self.generator(z)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(images.shape[0], 4).type_as(images)
        valid = torch.ones(images.size(0), 1).type_as(images)
        self.toggle_optimizer(optimizer_g)
        self.generated = self(z)
        g_loss = F.binary_cross_entropy(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        real_loss = F.binary_cross_entropy(self.discriminator(images), valid)
        fake = torch.zeros(images.size(0), 1).type_as(images)
        fake_loss = F.binary_cross_entropy(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_train_epoch_end(self) -> None:
        self.history.append(self(self.validation_z).sum().item())

    def configure_optimizers(self) -> Any:
        parts = self.generator, self.discriminator
        return [torch.optim.Adam(part.parameters(), lr=0.002, betas=(0.5, 0.999)) for part in parts], []


@case(submodule="discriminator", cuts=("0", "2"))
class DividedDiscriminator(Gan):
    pass


@case(submodule="generator", cuts=("1", "3"))
class DividedGenerator(Gan):
    pass


@case()
class NoisyWeights(Classifier):
    """Changes weights before the network is called: adds noise to a head, and lets a hidden teacher forget."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, CLASSES)
        self.hidden = [copy.deepcopy(self.net).requires_grad_(False)]  # A list hides it from state_dict.

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            for parameter in self.hidden[0].parameters():
                parameter.mul_(0.9)
            soft = self.hidden[0](x).softmax(1)
        scores = self.head(self(x))
        return F.cross_entropy(scores, y) + F.cross_entropy(scores, soft)


@case(validates=True)
class SwappedAverage(Validated):
    """Uses averaged weights in validation."""

    def on_fit_start(self) -> None:
        self.averaged = [AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))]

    def on_train_batch_end(self, *_: Any) -> None:
        self.averaged[0].update_parameters(self.net)

    def on_validation_epoch_start(self) -> None:
        self.kept = {name: value.clone() for name, value in self.net.state_dict().items()}
        self.net.load_state_dict(self.averaged[0].module.state_dict())

    def on_validation_epoch_end(self) -> None:
        self.net.load_state_dict(self.kept)


@case(samples=16, epochs=1)
class CompiledLoss(Classifier):
    """Compiles the loss, a head outside of the divided network, and a block of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].compile(backend="eager")
        self.head = torch.compile(nn.Linear(CLASSES, CLASSES), backend="eager")
        self.loss = torch.compile(self.plain_loss, backend="eager")

    def plain_loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores, y) + 0.1 * scores.square().mean()

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(self.net(x)), y)
