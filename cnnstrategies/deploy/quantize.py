"""Post-training static quantisation of a trained network to int8."""

import copy
import io
import itertools
import logging
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from cnnstrategies.data.without_run import give_trainer
from cnnstrategies.deploy.inference import images_of, network_of
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.logits import giving_logits, main_logits, name_of
from cnnstrategies.models.network_module import NetworkModule
from cnnstrategies.runtime.whole_file import whole_file

if TYPE_CHECKING:
    from torch.fx import GraphModule

Network = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Figures:
    """Quality, size and speed of a network.

    Attributes:
        quality: Accuracy on the validation images, or the model's own metric, such as the mean IoU for segmentation.
        megabytes: Size of the weights and buffers, in 10^6 bytes.
        milliseconds: Median time of one batch on the CPU.
    """

    quality: float
    megabytes: float
    milliseconds: float


@dataclass(frozen=True)
class Report:
    """Comparison of a network before and after quantisation.

    Attributes:
        before: Figures of the original network.
        after: Figures of the quantised network.
        batch_size: Number of images in a batch of the time measurement.
        lowered: Whether the quantised network uses int8 kernels on this CPU.
        metric: Name of the metric whose values are in ``Figures.quality``.
    """

    before: Figures
    after: Figures
    batch_size: int
    lowered: bool
    metric: str = "val_acc"


def quantize(
    model: LightningModule, datamodule: LightningDataModule, output: Path, calibration_batches: int = 16
) -> Report:
    """Quantise a module's network to int8 and save it.

    Weights and activations are quantised by torchao's PT2E flow: observers are inserted into the exported graph,
    training batches calibrate the range of each activation, and the graph is converted to int8. The file is written by
    ``torch.export.save`` and contains the int8 weights, but not the original weights. Load the file with
    :func:`load_quantized`. The module is moved to the CPU and set to eval mode.

    Args:
        model: The module whose network is quantised.
        datamodule: The data module. Its training data is used for calibration, and its validation data for measuring
            the quality.
        output: Path of the file to write.
        calibration_batches: Number of training batches for calibration.

    Returns:
        Figures of the original network and of the quantised network as loaded from the file.
    """
    network = network_of(model, "quantize")
    network.cpu().eval()
    give_trainer(datamodule)
    datamodule.prepare_data()
    datamodule.setup("fit")
    network = giving_logits(network, images_of(next(iter(datamodule.val_dataloader())), "quantize"))
    exported, converted, example = int8_graph(network, datamodule, calibration_batches)
    save_program(exported_program(converted, example, strict=True), output)
    quantized = load_quantized(output)
    times = milliseconds([network, quantized], example)
    measure, metric = accuracy, "val_acc"
    if isinstance(model, NetworkModule) and model.quality != "acc":
        measure, metric = partial(quality, model=model), f"val_{model.quality}"
    before = Figures(measure(network, datamodule.val_dataloader()), _megabytes(exported), times[0])
    after = Figures(measure(quantized, datamodule.val_dataloader()), _megabytes(torch.export.load(output)), times[1])
    return Report(before, after, len(example), has_int8_kernels(), metric)


def save_program(program: "torch.export.ExportedProgram", path: Path) -> None:
    """Write an exported program to a file, so that the file is either complete or does not exist.

    The program is serialised in memory first, because torch's own writer aborts the process when the disk is full.
    """
    content = io.BytesIO()
    torch.export.save(program, content)
    with whole_file(path, "free some space, or set another path with --output") as file:
        file.write(content.getbuffer())


def int8_graph(
    network: nn.Module, datamodule: LightningDataModule, calibration_batches: int
) -> tuple["torch.export.ExportedProgram", "GraphModule", Tensor]:
    """Quantise a network. Return its exported graph, its int8 graph, and the batch of images used for the export.

    Raises:
        ConfigurationError: There are no calibration batches, torchao is not installed, or torch cannot export the
            network.
    """
    if calibration_batches < 1:
        raise ConfigurationError(f"calibration_batches={calibration_batches}: use at least 1, for example 16")
    pt2e, quantizer_module = _torchao()
    training = itertools.islice(datamodule.train_dataloader(), calibration_batches)
    calibration = [images_of(batch, "quantize") for batch in training]
    example = for_any_batch(calibration[0])
    with torch.no_grad():
        # With strict=False, the quantizer would treat several calls of one module as one call. For example, ResNet
        # calls the same ReLU several times.
        exported = exported_program(network, example, strict=True)
        quantizer = quantizer_module.X86InductorQuantizer()
        quantizer.set_global(quantizer_module.get_default_x86_inductor_quantization_config())
        graph = exported.module()
        # Remove the layers of auxiliary logits, because the quantizer fails if the output of a convolution is unused.
        graph.graph.eliminate_dead_code()
        graph.recompile()
        prepared = pt2e.prepare_pt2e(graph, quantizer)
        for images in calibration:
            prepared(images)
        converted = pt2e.convert_pt2e(prepared)
        _remove_unused_tensors(converted)
    return exported, converted, example


def load_quantized(path: str | Path, batch_size: int | None = None) -> nn.Module:
    """Load a network that :func:`quantize` has saved.

    On x86 CPUs the network uses oneDNN's int8 kernels. On other CPUs it computes with dequantised weights, which is
    slower.

    Args:
        path: Path of the ``.pt2`` file.
        batch_size: Fixed batch size of the int8 kernels; None for the batch size of the calibration. Smaller batches
            are padded, and larger batches are split. This argument is ignored on CPUs other than x86.

    Returns:
        A module that maps images (N, C, H, W), with the size that was used in training, to logits (N, num_classes).

    Raises:
        ConfigurationError: torchao is not installed, or ``batch_size`` is below 1.
    """
    _torchao()  # This import registers the operators that the file contains.
    if batch_size is not None and batch_size < 1:
        raise ConfigurationError(f"batch_size={batch_size}: use at least 1")
    program = torch.export.load(path)
    assert program.example_inputs is not None
    example: Tensor = program.example_inputs[0][0]
    return QuantizedNetwork(program.module(), example.shape[1:], batch_size or len(example))


class QuantizedNetwork(nn.Module):
    """Network that runs a quantised graph on batches of any size.

    Args:
        graph: The quantised graph.
        image_shape: Shape of an image (C, H, W).
        batch_size: Fixed batch size of the int8 kernels.
    """

    def __init__(self, graph: "GraphModule", image_shape: torch.Size, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.lowered = has_int8_kernels()
        if self.lowered:
            from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

            with torch.no_grad():
                graph = lower_pt2e_quantized_to_x86(graph, (torch.zeros(batch_size, *image_shape),))
            # The results of int8 kernels are in channels_last format. For these tensors `view` may fail, although it
            # worked when the graph was traced. `reshape` copies the tensor if necessary, so it replaces `view`.
            for node in graph.graph.nodes:
                if node.target is torch.ops.aten.view.default:
                    node.target = torch.ops.aten.reshape.default
            graph.recompile()
        self.graph = graph

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, C, H, W) to logits (N, num_classes), without gradients."""
        with torch.no_grad():
            if not self.lowered:
                return main_logits(self.graph(images))
            logits = []
            for part in torch.split(images, self.batch_size):
                padding = part.new_zeros(self.batch_size - len(part), *part.shape[1:])
                full = torch.cat([part, padding]) if len(padding) else part
                logits.append(main_logits(self.graph(full))[: len(part)])
            return torch.cat(logits) if len(logits) > 1 else logits[0]


def accuracy(network: Network, batches: Iterable[Sequence[Tensor]]) -> float:
    """Return the accuracy: the fraction of the samples that ``network`` classifies correctly.

    Args:
        network: Function that maps images (N, C, H, W) to logits (N, classes).
        batches: Batches that begin with images (N, C, H, W) and targets (N,).
    """
    correct = total = 0
    with torch.no_grad():
        for images, targets, *_ in batches:
            correct += int((main_logits(network(images)).argmax(1) == targets).sum())
            total += len(targets)
    return correct / total


def quality(network: Network, batches: Iterable[Sequence[Tensor]], model: NetworkModule) -> float:
    """Return the model's own metric over all batches. The model's attribute ``quality`` names this metric."""
    metric = copy.deepcopy(getattr(model.val_metrics, model.quality)).cpu()
    metric.reset()
    with torch.no_grad():
        for images, targets, *_ in batches:
            metric.update(*model.compared(main_logits(network(images)), targets))
    return float(metric.compute())


def milliseconds(networks: Sequence[Network], images: Tensor, repeats: int = 20) -> list[float]:
    """Return the median time of ``network(images)`` for each network, in milliseconds.

    Three warm-up calls are not counted. The networks are called in turn, so that other load on the machine affects all
    networks equally.

    Args:
        networks: The networks to compare.
        images: Batch of images.
        repeats: Number of measured calls of each network.
    """
    times: list[list[float]] = [[] for _ in networks]
    with torch.no_grad():
        for _ in range(3 + repeats):
            for network, seconds in zip(networks, times, strict=True):
                start = time.perf_counter()
                network(images)
                seconds.append(time.perf_counter() - start)
    return [1000 * statistics.median(seconds[3:]) for seconds in times]


def for_any_batch(images: Tensor) -> Tensor:
    """Return the images, or two copies of the image if there is only one.

    From an example of one image, torch.export would conclude that the batch size is always 1.
    """
    return images if len(images) > 1 else images.repeat(2, 1, 1, 1)


def exported_program(network: nn.Module, example: Tensor, strict: bool = False) -> "torch.export.ExportedProgram":
    """Export a network with ``torch.export``, for batches of any size.

    Raises:
        ConfigurationError: torch cannot export the network.
    """
    try:
        with torch.no_grad():
            return torch.export.export(
                network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=strict
            )
    except Exception as error:
        raise ConfigurationError(
            f"torch.export cannot export {name_of(network)}: {str(error).strip().splitlines()[0]}; use the weights in "
            "the checkpoint (state_dict) instead"
        ) from error


def _remove_unused_tensors(graph: "GraphModule") -> None:
    """Remove the float32 weights, which torchao leaves in the graph in addition to the int8 weights."""
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in (*graph.named_parameters(), *graph.named_buffers()) if name not in used]:
        owner, _, attribute = name.rpartition(".")
        delattr(graph.get_submodule(owner), attribute)


def has_int8_kernels() -> bool:
    """Whether torch has int8 kernels for this CPU."""
    return platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _megabytes(program: "torch.export.ExportedProgram") -> float:
    values = [*program.state_dict.values(), *program.constants.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) / 1e6


def _torchao() -> tuple[Any, Any]:
    # torchao's import calls a function of torch in a way that torch deprecates. The line about it is hidden, because
    # users cannot change the call.
    logging.getLogger("torch.utils._pytree").addFilter(lambda record: "register_constant()" not in record.getMessage())
    try:
        from torchao.quantization.pt2e import quantize_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer
    except ImportError as error:
        raise ConfigurationError(
            "quantize needs torchao, which is not installed: pip install torchao (extra `quantize`)"
        ) from error
    return quantize_pt2e, x86_inductor_quantizer
