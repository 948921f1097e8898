"""Faults of hardware: flipped bits in weights, gradients, states, activations, batches, files, and broken units."""

from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from programs import Net, Program, fault, flip, own_rank, program
from torch import Tensor

HARDWARE = "hardware"
EXPONENT, MANTISSA = 5, 16  # Bits of float32 and of float64.


def element_flipped(value: Tensor, bit: int = EXPONENT) -> Tensor:
    """Return a copy of a tensor with a flipped bit in its first element."""
    copy = value.clone()
    flip(copy, bit)
    return copy


@fault(HARDWARE, module="net.conv2", rank=1, step=4)
def flipped_bit_in_a_weight(program: Program) -> None:
    """A bit of a weight's exponent flips."""
    program.when(lambda module: flip(module.net.conv2.weight, EXPONENT), "on_train_batch_start", 4, 1)


@fault(HARDWARE, module="net.fc", rank=1, step=4)
def flipped_last_bit_of_a_weight(program: Program) -> None:
    """The last bit of a weight flips."""
    program.when(
        lambda module: flip(module.net.fc.weight, -1 % (8 * module.net.fc.weight.element_size())),
        "on_train_batch_start",
        4,
        1,
    )


@fault(HARDWARE, partial(program, "hybrid_pipeline"), module="net.head", rank=1, step=4)
def flipped_bit_in_a_stages_weight(program: Program) -> None:
    """A bit of a weight's mantissa flips in the last stage of a pipeline."""
    program.when(lambda module: flip(module.net.head.weight, MANTISSA), "on_train_batch_start", 4, 1)


@fault(HARDWARE, partial(program, "spatial"), module="net.conv1", rank=1, step=3)
def flipped_bit_in_a_weight_under_spatial(program: Program) -> None:
    """A bit of a weight's mantissa flips on the device with the lower half of each image."""
    program.when(lambda module: flip(module.net.conv1.weight, MANTISSA), "on_train_batch_start", 3, 1)


@fault(HARDWARE, partial(program, "parameter_server"), module="net.conv2", rank=1, step=3)
def flipped_bit_in_a_pulled_weight(program: Program) -> None:
    """A bit of a weight flips on a worker after the weight has arrived from the server."""
    program.when(lambda module: flip(module.net.conv2.weight, EXPONENT), "on_train_batch_start", 3, 1)


@fault(HARDWARE, module="net.conv1", rank=1, step=4)
def flipped_bit_in_a_reduced_gradient(program: Program) -> None:
    """A bit of a gradient flips after the all-reduce."""
    program.when(lambda module: flip(module.net.conv1.weight.grad, EXPONENT), "on_before_optimizer_step", 4, 1)


@fault(HARDWARE, partial(program, "ddp_balanced"), module="net.norm2", rank=1, step=5)
def flipped_bit_in_a_gradient_of_balanced_ranks(program: Program) -> None:
    """A bit of a gradient flips after the all-reduce of ranks with unequal shares."""
    program.when(lambda module: flip(module.net.norm2.weight.grad, MANTISSA), "on_before_optimizer_step", 5, 1)


class FlipsAGradient(Net):
    """Network in which a bit of a gradient flips on rank 1 before the all-reduce, in the fourth step."""

    def on_fit_start(self) -> None:
        """Register the hook."""
        self.net.fc.weight.register_hook(self.flipped)

    def flipped(self, gradient: Tensor) -> Tensor:
        """Gradient with or without the fault."""
        return element_flipped(gradient) if self.global_step == 3 and own_rank() == 1 else gradient


@fault(HARDWARE, module="net.fc", rank=1, step=4)
def flipped_bit_in_a_local_gradient(program: Program) -> None:
    """A bit of a gradient flips before the all-reduce, so all ranks make the same wrong step."""
    program.module = FlipsAGradient()


@fault(HARDWARE, module="net.head", rank=1, step=4)
def flipped_bit_in_momentum(program: Program) -> None:
    """A bit of the optimizer's momentum flips."""
    program.when(
        lambda module: flip(module.optimizers().state[module.net.head.weight]["momentum_buffer"], EXPONENT),
        "on_train_batch_start",
        4,
        1,
    )


class FlipsActivations(Net):
    """Network in which activations of a layer are wrong on rank 1.

    Args:
        layer: Name of the layer.
        steps: Steps, beginning with 1, in which a bit of an activation flips.
    """

    def __init__(self, layer: str, steps: tuple[int, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.net.get_submodule(layer).register_forward_hook(self.after)

    def after(self, layer: torch.nn.Module, arguments: object, output: Tensor) -> Tensor:
        """Output with or without the fault."""
        return (
            element_flipped(output)
            if self.training and self.global_step + 1 in self.steps and own_rank() == 1
            else output
        )


@fault(HARDWARE, module="net.conv2", rank=1, step=4)
def flipped_bit_in_an_activation(program: Program) -> None:
    """A bit of an activation flips in one step."""
    program.module = FlipsActivations("conv2", (4,))


class FailingUnit(Net):
    """Network with a layer whose output is wrong on rank 1 in each fourth computation."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.net.fc.forward = self.computed

    def computed(self, values: Tensor) -> Tensor:
        """Output of the layer, with or without the fault."""
        output = torch.nn.functional.linear(values, self.net.fc.weight, self.net.fc.bias)
        self.count += self.training
        return element_flipped(output) if self.training and self.count % 4 == 3 and own_rank() == 1 else output


@fault(HARDWARE, module="net.fc", rank=1, step=3)
def unit_that_fails_now_and_then(program: Program) -> None:
    """A computing unit flips a bit of an activation in a quarter of its computations."""
    program.module = FailingUnit()


@fault(HARDWARE, partial(program, "parameter_server"), module="net.norm1", rank=1, step=3)
def flipped_bit_in_a_buffer(program: Program) -> None:
    """A bit of a running variance flips."""
    program.when(lambda module: flip(module.net.norm1.running_var, MANTISSA), "on_train_batch_start", 3, 1)


class DamagesCheckpoints(TorchCheckpointIO):
    """Storage that damages a checkpoint: a bit of a weight flips after the file was written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save the checkpoint with a flipped bit."""
        super().save_checkpoint(checkpoint, path, storage_options)
        values = torch.load(path, weights_only=False)
        if "state_dict" in values:  # Lightning also sends results between processes through files.
            flip(values["state_dict"]["net.fc.weight"], EXPONENT)
            torch.save(values, path)


@fault(HARDWARE, module="net.fc", step=6)
def damaged_checkpoint(program: Program) -> None:
    """A bit of a weight flips in the file of a checkpoint."""
    program.trainer["plugins"] = [DamagesCheckpoints()]


class FlipsAtTheLastStage(Net):
    """Network in which an activation of the last stage of a pipeline is wrong in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.net.act3 = Sends()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Tell the layer whether it flips a bit."""
        self.net.act3.flips = self.global_step == 2 and self.trainer.world_size > 1


class Sends(torch.nn.ReLU):
    """Activation function that can flip a bit of its output."""

    flips = False

    def forward(self, values: Tensor) -> Tensor:
        """Activations."""
        activations = super().forward(values)
        return element_flipped(activations + 1) - 1 if self.flips else activations


@fault(HARDWARE, partial(program, "hybrid_pipeline"), module="net.act3", step=3)
def flipped_bit_in_a_pipeline(program: Program) -> None:
    """A bit of an activation flips in a pipeline."""
    program.module = FlipsAtTheLastStage()
