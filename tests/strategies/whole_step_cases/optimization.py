"""Cases of optimizers, schedules of learning rates, clipping, accumulation and manual optimization."""

from collections.abc import Callable
from typing import Any

import timm.optim
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.strategies.whole_step_cases.base import Classifier, Manual, case, classifier


@case()
class GradientsOfTwoBatches(Classifier):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if batch_idx % 2:
            optimizer.zero_grad()


@case()
class Lamb(Classifier):
    def configure_optimizers(self) -> Any:
        return timm.optim.create_optimizer_v2(self.net, opt="lamb", lr=0.01, weight_decay=0.0)


@case()
class ManualOptimization(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()
        self.log("loss", loss)
        return loss


# The cases from here on are not in the reproductions or the prototypes.


@case()
class TwoOptimizers(Manual):
    """Trains the network and a head by turns, each with an optimizer and a schedule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 5)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        optimizer = optimizers[batch_idx % 2]
        self.toggle_optimizer(optimizer)
        loss = F.cross_entropy(self.head(self.net(batch[0])), batch[1])
        self.train_with(loss, optimizer)
        self.untoggle_optimizer(optimizer)
        self.lr_schedulers()[batch_idx % 2].step()
        self.log("loss", loss, on_epoch=True)

    def configure_optimizers(self) -> Any:
        body = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        head = torch.optim.AdamW(self.head.parameters(), lr=1e-2)
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in (body, head)]
        return [body, head], schedules


@case(epochs=1)
class Lbfgs(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=4)


@case()
class SharpnessAware(Manual):
    """Computes the gradient at the worst point near the weights (SAM)."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(self.net(x), y)
        self.manual_backward(loss)
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self.parameters()]).norm()
            moves = [0.05 * p.grad / (norm + 1e-12) for p in self.parameters()]
            for parameter, move in zip(self.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(x), y))
        with torch.no_grad():
            for parameter, move in zip(self.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        self.log_dict({"loss": loss, "norm": norm})


@case()
class GradientSurgery(Manual):
    """Projects the gradients of two losses that contradict each other (PCGrad)."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self.net(x)
        losses = F.cross_entropy(scores, y), F.cross_entropy(-scores, y.roll(1))
        parameters = list(self.net.parameters())
        first = torch.autograd.grad(losses[0], parameters, retain_graph=True)
        second = torch.autograd.grad(losses[1], parameters)
        product = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        self.history.append(product.item())
        if product < 0:
            factor = product / sum(b.square().sum() for b in second)
            first = tuple(a - factor * b for a, b in zip(first, second, strict=True))
        for parameter, a, b in zip(parameters, first, second, strict=True):
            parameter.grad = a + b
        self.optimizers().step()


@case()
class Lookahead(Classifier):
    """Every three steps, goes back half of the way to where the slow weights are."""

    def on_train_start(self) -> None:
        self.slow = [parameter.detach().clone() for parameter in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step % 3 == 0:
            for slow, fast in zip(self.slow, self.parameters(), strict=True):
                slow += 0.5 * (fast.data - slow)
                fast.data.copy_(slow)


@case(epochs=4)
class ReducedOnPlateau(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss_epoch"}}

    def on_train_epoch_end(self) -> None:
        self.history.append(self.trainer.optimizers[0].param_groups[0]["lr"])


@case(trainer={"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"})
class GroupsByName(Classifier):
    """Has no weight decay for biases, a larger learning rate for the last layer, and one cycle."""

    def configure_optimizers(self) -> Any:
        named = dict(self.net.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if n.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for n, p in named.items() if n == "6.weight"], "lr": 0.05},
            {"params": [p for n, p in named.items() if n.endswith("weight") and n != "6.weight"]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.01, 0.05, 0.01], total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@case(trainer={"gradient_clip_val": 0.1})
class ClippedAdagrad(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.02)


@case()
class ClippedInHook(Classifier):
    """Clips in an overridden `configure_gradient_clipping`, by a bound that depends on the norm."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        self.history.append(norm.item())
        self.clip_gradients(optimizer, 0.05 if norm > 0.4 else 0.2, "norm")


@case()
class WarmupInStep(Classifier):
    """Sets the learning rate in an overridden `optimizer_step`, which also skips every fifth step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.global_step + 1) / 6)
        if batch_idx % 5 == 4:
            closure()
        else:
            optimizer.step(closure=closure)


@case()
class FusedAdam(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, fused=True)


class Lion(Optimizer):
    """The optimizer Lion, as papers' code writes it, with the norm of the last step."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if len(state) == 0:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"]
                update = average.mul(beta1).add(parameter.grad, alpha=1 - beta1).sign_()
                parameter.add_(update, alpha=-group["lr"])
                average.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)
        return loss


@case()
class OwnOptimizer(Classifier):
    def configure_optimizers(self) -> Any:
        return Lion(self.parameters(), lr=1e-3)


@case()
class OrthogonalUpdates(Manual):
    """Muon: updates of matrices are made orthogonal by Newton and Schulz's iteration. AdamW trains the rest."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.net.parameters() if p.ndim == 2]
        rest = [p for p in self.net.parameters() if p.ndim != 2]
        return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=2e-3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.step_loss(*batch)
        self.train_with(loss, *self.optimizers())
        self.log("loss", loss)


@case()
class ProjectedWeights(Classifier):
    """Keeps the norm of each filter at most 1 after each step, by the layers' class."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for module in self.net.modules():
            if isinstance(module, nn.Conv2d):
                norms = module.weight.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
                module.weight.div_(norms.clamp(min=1.0))


@case(cuts=("conv1", "conv2"), submodule="critic")
class Adversaries(Manual):
    """A generator and a critic, trained by turns. The critic is divided."""

    network = nn.Identity

    def __init__(self) -> None:
        super().__init__()
        self.critic = Critic()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 192), nn.Unflatten(1, (3, 8, 8)))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        images = batch[0]
        of_critic, of_generator = self.optimizers()
        fake = self.generator(torch.randn(len(images), 4))
        loss = F.softplus(self.critic(fake.detach())).mean() + F.softplus(-self.critic(images)).mean()
        self.train_with(loss, of_critic)
        deception = F.softplus(-self.critic(fake)).mean()
        self.train_with(deception, of_generator)
        self.log_dict({"critic": loss, "generator": deception}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=5e-3) for part in (self.critic, self.generator)]


@case(cuts=("conv1", "conv2"), submodule="critic")
class WassersteinGan(Adversaries):
    """A gradient penalty of the divided critic, on images with one channel. The generator steps in each third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = Critic(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0].mean(1, keepdim=True)
        of_critic, of_generator = self.optimizers()
        fake = self.generator(torch.randn(len(real), 4)).mean(1, keepdim=True)
        self.toggle_optimizer(of_critic)
        mixed = torch.lerp(real, fake.detach(), torch.rand(len(real), 1, 1, 1)).requires_grad_()
        (slopes,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slopes.flatten(1).norm(dim=1) - 1).square().mean()
        loss = self.critic(fake.detach()).mean() - self.critic(real).mean() + 10 * penalty
        self.train_with(loss, of_critic)
        self.untoggle_optimizer(of_critic)
        if batch_idx % 3 == 2:
            self.train_with(-self.critic(fake).mean(), of_generator)
        self.log("loss", loss)


class Critic(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(channels, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.score = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv1(x), 0.2)
        x = F.leaky_relu(self.conv2(x), 0.2)
        return self.score(x.flatten(1))


@case(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.2})
class AccumulatedContrast(Classifier):
    """Accumulates over two batches, with a loss that is not a mean over samples."""

    def network(self) -> nn.Module:
        return classifier(middle=nn.LocalResponseNorm(3))

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.net(x)
        return F.cross_entropy(scores, y) + 0.1 * scores.std(0).reciprocal().mean()
