"""Post-training static quantisation of a trained network to int8."""

import itertools
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from cnnstrategies.classifier import main_logits
from cnnstrategies.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.fx import GraphModule

Network = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Figures:
    """What a network costs and what it can do.

    Attributes:
        accuracy: Share of the validation images that it classifies rightly.
        megabytes: Size of its weights and buffers, MB (10^6 bytes).
        milliseconds: Median time of one batch on the CPU.
    """

    accuracy: float
    megabytes: float
    milliseconds: float


@dataclass(frozen=True)
class Report:
    """A network before and after quantisation, for batches of ``batch_size`` images."""

    before: Figures
    after: Figures
    batch_size: int
    lowered: bool


def quantize(
    model: LightningModule, datamodule: LightningDataModule, output: Path, calibration_batches: int = 16
) -> Report:
    """Quantise ``model.network`` to int8 and save it.

    Weights and activations become int8 by torchao's PT2E flow: the exported graph is given observers, sees
    training batches to find the range of each activation, and is converted. The file, written by
    ``torch.export.save``, holds int8 weights and takes any batch size; :func:`load_quantized` brings it back.

    Args:
        model: Its ``network`` is quantised; it is moved to the CPU and to eval mode.
        datamodule: Training batches calibrate, validation batches measure the accuracy.
        output: The ``.pt2`` file.
        calibration_batches: Number of training batches that are shown to the observers.

    Returns:
        Accuracy, size and time before and after.

    Raises:
        ConfigurationError: torchao is not installed, or the network cannot be exported.
    """
    pt2e, quantizer_module = _torchao()
    network: nn.Module = model.network.cpu().eval()  # type: ignore[union-attr]
    datamodule.prepare_data()
    datamodule.setup("fit")
    calibration = [images for images, _ in itertools.islice(datamodule.train_dataloader(), calibration_batches)]
    example = calibration[0]
    with torch.no_grad():
        exported = _export(network, example)
        quantizer = quantizer_module.X86InductorQuantizer()
        quantizer.set_global(quantizer_module.get_default_x86_inductor_quantization_config())
        prepared = pt2e.prepare_pt2e(exported.module(), quantizer)
        for images in calibration:
            prepared(images)
        converted = pt2e.convert_pt2e(prepared)
        output.parent.mkdir(parents=True, exist_ok=True)
        torch.export.save(_export(converted, example), output)
        before = Figures(
            accuracy(network, datamodule.val_dataloader()), _megabytes(exported), milliseconds(network, example)
        )
        saved = torch.export.load(output)
        after = Figures(
            # Any batch size, so in the graph that is not lowered; the int8 arithmetic is the same.
            accuracy(saved.module(), datamodule.val_dataloader()),
            _megabytes(saved),
            milliseconds(load_quantized(output, example), example),
        )
    return Report(before, after, len(example), lowered=_has_int8_kernels())


def load_quantized(path: Path, example: Tensor) -> "GraphModule":
    """Load what :func:`quantize` saved, lowered to oneDNN's int8 kernels where the processor is x86.

    Args:
        path: The ``.pt2`` file.
        example: Images (N, C, H, W) of the batch size that the lowered network will get. ``torch.export.load``
            alone gives a network for any batch size, which computes with dequantised weights and is slower.

    Returns:
        A module that maps images to logits.
    """
    module: GraphModule = torch.export.load(path).module()
    if not _has_int8_kernels():
        return module
    from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

    with torch.no_grad():
        lowered: GraphModule = lower_pt2e_quantized_to_x86(module, (example,))
    return lowered


def accuracy(network: Network, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Share of the samples that ``network`` classifies rightly.

    Args:
        network: Maps images to logits.
        batches: Images (N, C, H, W) and class indices (N,).
    """
    right = total = 0
    with torch.no_grad():
        for images, targets in batches:
            right += int((main_logits(network(images)).argmax(1) == targets).sum())
            total += len(targets)
    return right / total


def milliseconds(network: Network, images: Tensor, repeats: int = 20) -> float:
    """Median time of ``network(images)``, after three calls that are not counted.

    Args:
        network: What is timed.
        images: One batch.
        repeats: Calls that are counted.
    """
    times = []
    with torch.no_grad():
        for _ in range(3 + repeats):
            start = time.perf_counter()
            network(images)
            times.append(time.perf_counter() - start)
    return 1000 * sorted(times[3:])[repeats // 2]


def _export(network: nn.Module, example: Tensor) -> "torch.export.ExportedProgram":
    try:
        return torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:
        raise ConfigurationError(
            f"torch.export cannot export {type(network).__name__}, so it cannot be quantised: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error


def _has_int8_kernels() -> bool:
    return platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _megabytes(program: "torch.export.ExportedProgram") -> float:
    values = [*program.state_dict.values(), *program.constants.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) / 1e6


def _torchao() -> tuple[Any, Any]:
    try:
        from torchao.quantization.pt2e import quantize_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer
    except ImportError as error:
        raise ConfigurationError(
            'quantize needs torchao, which is not installed: pip install "cnnstrategies[quantize]"'
        ) from error
    return quantize_pt2e, x86_inductor_quantizer
