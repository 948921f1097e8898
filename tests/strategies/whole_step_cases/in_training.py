"""Cases of code that changes the network, or looks at it, while it trains."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from tests.strategies.whole_step_cases.base import Block, Classifier, case, classifier


class SwappingBlocks(Callback):
    """Replaces a block by a copy of it with other weights, and adds the weights to the optimizer."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.net[2] = nn.Sequential(nn.Dropout(0.0), nn.ReLU())


@case(callbacks=lambda: [SwappingBlocks()])
class SwappedContainer(Classifier):
    pass


@case()
class WeightNormUndone(Classifier):
    """Weights have a norm of their own in the first epoch, and are plain weights in the second."""

    def __init__(self) -> None:
        super().__init__()
        for index in (0, 6):
            weight_norm(self.net[index])
        weight_norm(self.net[3].conv)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            parametrize.remove_parametrizations(self.net[3].conv, "weight")
            self.trainer.optimizers[0].add_param_group({"params": [self.net[3].conv.weight]})


class Symmetric(nn.Module):
    strength = 0.0

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.strength * weight.flip(-1)


@case()
class ChangedParametrization(Classifier):
    """A parametrization has an attribute that training changes."""

    def __init__(self) -> None:
        super().__init__()
        for index in (0, 6):
            parametrize.register_parametrization(self.net[index], "weight", Symmetric())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for module in self.net.modules():
            if isinstance(module, Symmetric):
                module.strength = 0.1 * self.global_step


@case()
class FastWeights(Classifier):
    """Takes a step of inner optimization and trains through it, as MAML does."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        parameters = dict(self.net.named_parameters())
        inner = F.cross_entropy(functional_call(self.net, parameters, x), y)
        gradients = torch.autograd.grad(inner, parameters.values(), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
        return F.cross_entropy(functional_call(self.net, fast, x.flip(-1)), y)


@case()
class PerturbedWeights(Classifier):
    """Computes the loss at perturbed weights, without changing the weights."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        perturbed = {name: p + 0.01 * p.detach().sign() for name, p in self.net.named_parameters()}
        return F.cross_entropy(functional_call(self.net, perturbed, (x,)), y)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), Block(), Block())
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


@case(cuts=("features.1", "features"))
class PartialForward(Classifier):
    """Calls the parts of the network one by one."""

    network = Parts

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        maps = self.net.features(x)
        scores = self.net.head(maps.mean((2, 3)))
        return F.cross_entropy(scores, y) + 0.1 * maps.square().mean() + 0.1 * self.net(x.flip(-1)).square().mean()


@case()
class LayerByLayer(Classifier):
    """Calls the layers in a loop, and regularises what is between them."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        norms = []
        for index in range(len(self.net)):
            x = self.net[index](x)
            norms.append(x.square().mean())
        return F.cross_entropy(x, y) + 0.01 * sum(norms)


@case()
class ShallowCopy(Classifier):
    """Calls a shallow copy of the network, which has the same parameters."""

    def on_fit_start(self) -> None:
        self.shallow = [copy.copy(self.net)]

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y) + 0.1 * F.mse_loss(self.shallow[0](x.flip(-1)), self.net(x).detach())


@case()
class SameType(Classifier):
    """Converts the network to the type that it has, and moves it to the device where it is."""

    def on_train_epoch_start(self) -> None:
        self.net.to(torch.float64)
        self.net.apply(lambda module: module.to("cpu"))
        self.net.double().train()


@case()
class ScheduleOfNorms(Classifier):
    """The learning rate follows the norm of a layer's weights."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()

        def factor(_: int) -> float:
            return 1 / (1 + float(self.net[6].weight.norm()) + self.net[0].weight.detach().abs().amax().item())

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class NoiseOfGradients(Callback):
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            if parameter.grad is not None and parameter.dim() > 1:
                parameter.grad += 0.01 * torch.randn(parameter.grad.shape) * parameter.grad.std()


@case(callbacks=lambda: [NoiseOfGradients()])
class NoiseByCallback(Classifier):
    pass


class ActNorm(nn.Module):
    """Normalises channels by parameters that come from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(8, 1, 1)), nn.Parameter(torch.ones(8, 1, 1))
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(x.mean((0, 2, 3))[:, None, None])
                self.scale.copy_(1 / (x.std((0, 2, 3))[:, None, None] + 1e-6))
            self.ready = True
        return (x - self.shift) * self.scale


@case()
class FirstBatch(Classifier):
    """A layer sets its parameters in the first forward, from the first batch."""

    middle = ActNorm


class Patched(Classifier):
    """The forward of the network is replaced by a function, as tutorials do with torchvision's networks."""

    def __init__(self) -> None:
        super().__init__()
        network = self.net
        network.forward = lambda x: nn.Sequential.forward(network, x) * 2.0


@case(error="forward was replaced")
class PatchedForward(Patched):
    pass


@case()
class HookOfTensors(Classifier):
    """A hook of a module changes its argument in place, before a residual connection uses the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].conv.register_forward_pre_hook(self.halve)

    def halve(self, module: nn.Module, inputs: Any) -> None:
        with torch.no_grad():
            inputs[0].mul_(0.5)


@case(error="gets its shape in the first forward")
class LazyLayer(Classifier):
    def network(self) -> nn.Module:
        return classifier(middle=nn.LazyConv2d(8, 1))


class MakingLayer(nn.Module):
    """A layer that makes its convolution in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.conv: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.conv is None:
            self.conv = nn.Conv2d(x.shape[1], 8, 1)
        return self.conv(x)


@case(error="has created a submodule")
class LayerMadeInForward(Classifier):
    middle = MakingLayer


class SwappingTrained(Callback):
    """Replaces a block by a new one in the second epoch, and gives its parameters to the optimizer."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.net[3] = Block().to(torch.float64)
            module.net[1].conv.weight.data.mul_(0.5)
            trainer.optimizers[0].add_param_group({"params": list(module.net[3].parameters())})


@case(callbacks=lambda: [SwappingTrained()])
class SwappedBlock(Classifier):
    pass


class Logging(nn.Module):
    """A layer that logs a value of its input by the user's module."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = [module]

    def forward(self, x: Tensor) -> Tensor:
        self.module[0].log("inside", x.detach().abs().mean())
        return x


@case(error="the forward of a layer logs 'inside'")
class LoggedInForward(Classifier):
    def network(self) -> nn.Module:
        return classifier(middle=Logging(self))


@case()
class PerSampleGradients(Classifier):
    """Computes the gradient of each sample by torch.func, and logs the norms."""

    def step_loss(self, x: Tensor, y: Tensor) -> Tensor:
        def loss(parameters: Any, image: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.net, parameters, (image[None],)), label[None])

        parameters = {name: p.detach() for name, p in self.net.named_parameters()}
        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        norms = sum(gradient.flatten(1).square().sum(1) for gradient in gradients.values()).sqrt()
        self.log("largest", norms.amax())
        return F.cross_entropy(self.net(x), y)
