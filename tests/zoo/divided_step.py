"""A training step of a network with divided images, compared with one process, and with one process's rounding errors.

Three changes of the step on one process show how far rounding errors go. The step would have the same result in exact
arithmetic, or a result that is different in the last bit of some values: the images in another order, so that sums over
the batch are rounded differently; other last bits of the images; other last bits of each layer's output and gradient.
"""

import copy
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cnnstrategies.spatial import RowsTensor, SpatialParts
from tests.spatial.parts_in_turn import on_parts
from tests.zoo.divided_networks import CLASSES, Published

SAMPLES = 2
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
COUNTS = (2, 3)
EXACT = 1e-12
SEEDS = 3  # Of each kind of rounding errors, if the first one does not explain a difference.
CALM_TERM = 10.0  # Added to variances, in place of 1e-5.
MOST_ROUNDING = 1e-8  # Larger differences are not called rounding errors.
LEAST_SHARE = 1e-3  # Gradients of a parameter are compared relative to at least this share of the largest gradient.


@dataclass
class Step:
    """Results of a training step.

    Attributes:
        loss: The loss.
        gradients: Gradient of each parameter.
        buffers: Buffers after the step.
    """

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]

    def differences(self, expected: "Step") -> dict[str, float]:
        """Return the largest relative differences of the loss, the gradients and the buffers from another step's."""
        present = {name for name, gradient in self.gradients.items() if gradient is not None}
        wanted = {name: gradient for name, gradient in expected.gradients.items() if gradient is not None}
        assert present == set(wanted), f"other parameters have gradients: {sorted(present ^ set(wanted))[:3]}"
        largest = max(_largest(gradient) for gradient in wanted.values())
        gradients = [
            _largest(self.gradients[name] - gradient) / max(_largest(gradient), LEAST_SHARE * largest)
            for name, gradient in wanted.items()
        ]
        buffers = [0.0]
        for name, buffer in expected.buffers.items():
            if buffer.is_floating_point():
                buffers.append(_largest(self.buffers[name] - buffer) / max(_largest(buffer), 1.0))
            else:
                assert torch.equal(self.buffers[name], buffer), name
        loss = _largest(self.loss - expected.loss) / max(_largest(expected.loss), 1e-3)
        return {"loss": loss, "gradients": max(gradients), "buffers": max(buffers)}


@patch.object(Tensor, "float", Tensor.double)  # Some networks compute attention in float32.
def compare(published: Published) -> dict[str, Any]:
    """Compare a step with divided images with the same step on one process.

    Where the difference is larger than rounding errors on one process, the network is compared again with a large term
    added to the variances in batch normalisation. Divisions by small numbers then do not make rounding errors large.

    Returns:
        A dictionary with `parts`: for each number of parts the differences, the operations that needed all rows and the
        verdict, or the error; `noise`: for each kind of rounding errors the largest differences; and `calm`: the same
        dictionary for the second comparison, or None.
    """
    torch.manual_seed(0)
    network = varied(published.make().double().train())
    results = _compared(network, published)
    calm = None
    if any(part["verdict"] == "different" for part in results["parts"].values()):
        for module in network.modules():
            if isinstance(module, BATCH_NORMS):
                module.eps = CALM_TERM
        calm = _compared(network, published)
        for count, part in results["parts"].items():
            if part["verdict"] == "different" and calm["parts"][count]["verdict"] in ("equal", "rounding"):
                part["verdict"] = "rounding"
    return {**results, "calm": calm}


def _compared(network: nn.Module, published: Published) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows, columns = published.shape
    images = torch.randn(SAMPLES, 3, rows, columns, generator=generator, dtype=torch.float64)
    is_map = published.kind == "segmentation"
    targets = torch.randint(CLASSES, (SAMPLES, rows, columns) if is_map else (SAMPLES,), generator=generator)
    expected = one_process(network, images, targets)
    assert bool(expected.loss.isfinite()), "the loss is not finite"
    results: dict[str, Any] = {}
    for count in COUNTS:
        try:
            results[str(count)] = divided(network, images, targets, count, expected)
        except AssertionError as error:
            results[str(count)] = {"verdict": "different", "error": str(error)}
        except Exception as error:
            kind = "refused" if type(error).__module__.startswith("cnnstrategies") else "failed"
            results[str(count)] = {"verdict": kind, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    largest = max((result["largest"] for result in results.values() if "largest" in result), default=0.0)
    noise = rounding(network, images, targets, expected, largest)
    for result in results.values():
        if "largest" in result:
            result["verdict"] = (
                "equal" if result["largest"] <= EXACT
                else "rounding" if result["largest"] <= max(noise.values()) <= MOST_ROUNDING
                else "different"
            )  # fmt: skip
    return {"parts": results, "noise": noise}


def divided(network: nn.Module, images: Tensor, targets: Tensor, count: int, expected: Step) -> dict[str, Any]:
    """Return the largest differences of a step with divided images from the expected one, over all ranks."""
    networks = [copied(network) for _ in range(count)]

    def main(parts: SpatialParts) -> Any:
        own_network = networks[parts.rank]
        step = train(
            own_network, parts.scatter(images, -2), parts.scatter(targets, -2) if targets.dim() > 1 else targets
        )
        parts.plain_gradients(own_network.named_parameters())
        step.gradients = {name: parameter.grad for name, parameter in own_network.named_parameters()}
        for values in (step.gradients, step.buffers):
            assert not any(type(value) is RowsTensor for value in values.values())
        return step.differences(expected), sorted({operation for operation, _ in parts.gathers})

    torch.manual_seed(1)
    reports = on_parts(count, main)
    differences = {name: max(report[0][name] for report in reports) for name in ("loss", "gradients", "buffers")}
    return {**differences, "largest": max(differences.values()), "gathered": reports[0][1]}


def one_process(network: nn.Module, images: Tensor, targets: Tensor) -> Step:
    """Return the results of a step on one process."""
    torch.manual_seed(1)
    return train(copied(network), images, targets)


def train(network: nn.Module, images: Tensor, targets: Tensor) -> Step:
    """Compute the loss and its gradients."""
    outputs = network(images)
    if isinstance(outputs, dict):
        outputs = list(outputs.values())
    if not isinstance(outputs, (tuple, list)):
        outputs = [outputs]
    losses = [F.cross_entropy(scores, targets) for scores in outputs if scores is not None]
    loss = sum(losses[1:], start=losses[0])
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    return Step(loss.detach(), gradients, dict(network.named_buffers()))


def rounding(network: nn.Module, images: Tensor, targets: Tensor, expected: Step, largest: float) -> dict[str, float]:
    """Return the largest differences of steps on one process with other rounding errors, by kind; 0 if not needed.

    Args:
        network: The network.
        images: The images.
        targets: The targets.
        expected: The step of one process.
        largest: The difference that rounding errors may explain. Steps are tried until one differs by as much.
    """
    differences = dict.fromkeys(("images", "layers", "order"), 0.0)

    def note(kind: str, step: Step, wanted: Step) -> None:
        differences[kind] = max(differences[kind], *step.differences(wanted).values())

    still = without_draws(network)  # Random numbers belong to positions in the batch.
    in_order = one_process(still, images, targets) if largest > EXACT else expected
    for seed in range(SEEDS):
        changed = last_bits(images, torch.Generator().manual_seed(seed))
        note("images", one_process(network, changed, targets), expected)
        if largest > EXACT:
            reordered = one_process(with_rounding(still, seed), changed.flip(0), targets.flip(0))
            note("order", reordered, in_order)
            note("layers", one_process(with_rounding(network, seed), images, targets), expected)
        if largest <= max(EXACT, *differences.values()):
            break
    return differences


def without_draws(network: nn.Module) -> nn.Module:
    """Return a copy of a network in evaluation mode, except for its batch normalisation."""
    copy_of_network = copied(network).eval()
    for module in copy_of_network.modules():
        if isinstance(module, BATCH_NORMS):
            module.train()
    return copy_of_network


def varied(network: nn.Module) -> nn.Module:
    """Change parameters whose elements are all equal, such as zeros and layer scales, which would hide differences."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                start = 1.0 if float(parameter.flatten()[0]) == 1.0 else 0.0
                parameter.copy_(start + 0.2 * torch.randn_like(parameter))
    return network


def copied(network: nn.Module) -> nn.Module:
    """Return a copy of a network with the same memory for parameters, and with gradients and buffers of its own."""
    copy_of_network = copy.deepcopy(network)
    for parameter, original in zip(copy_of_network.parameters(), network.parameters(), strict=True):
        parameter.data = original.data
    return copy_of_network


def with_rounding(network: nn.Module, seed: int) -> nn.Module:
    """Return a copy of a network that changes the last bits of the outputs and of the gradients of its layers."""
    copy_of_network, generator = copied(network), torch.Generator().manual_seed(seed)

    def change(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return None
        values = output.detach()
        changed = output + (last_bits(values, generator) - values)
        changed.register_hook(lambda gradient: last_bits(gradient, generator))
        return changed

    for module in copy_of_network.modules():
        if not list(module.children()) and not isinstance(module, nn.Identity):
            module.register_forward_hook(change)
    return copy_of_network


def last_bits(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return the next larger or the next smaller number of each element, at random."""
    signs = torch.randint(2, tensor.shape, generator=generator, dtype=torch.int8)
    return torch.nextafter(tensor, torch.where(signs.bool(), torch.inf, -torch.inf).to(tensor.dtype))


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
