"""Export of a trained network to a file that can be used without Lightning and without this package."""

import copy
import importlib.util
import itertools
import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torchvision.transforms import v2

from cnnstrategies.data import ImageDataModule
from cnnstrategies.data.image_folder import shorter_side
from cnnstrategies.data.preprocessing import IMAGENET
from cnnstrategies.data.segmentation_folder import FILL
from cnnstrategies.data.without_run import give_trainer
from cnnstrategies.deploy.inference import images_of, network_of
from cnnstrategies.deploy.model_card import CARD, model_card
from cnnstrategies.deploy.quantize import Network, exported_program, for_any_batch, save_program
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.logits import giving_logits, main_logits, name_of
from cnnstrategies.runtime.whole_file import whole_folder

Format = Literal["torch_export", "onnx", "safetensors"]
FILES = {"torch_export": "model.pt2", "onnx": "model.onnx", "safetensors": "model.safetensors"}
NEEDS = {"torch_export": (), "onnx": ("onnx", "onnxscript", "onnxruntime"), "safetensors": ("safetensors",)}
DESCRIPTION = "export.json"
BATCHES = 4  # Number of validation batches on which the exported network is compared with the original network.
# Largest allowed difference between logits, relative to the largest logit. Small differences are normal, because a
# different compiler may add floating-point numbers in a different order.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """Result of comparing the logits of an exported network with the logits of the original network.

    Attributes:
        file: Path of the exported network.
        images: Number of validation images that were compared.
        difference: Largest absolute difference between the logits of the two networks.
        largest: Largest absolute value of a logit of the original network.
        agreement: Fraction of the images, or of the pixels, for which both networks predict the same class; None if the
            network does not predict classes.
        of: Text that follows ``agreement`` in messages: " of the pixels" for segmentation, otherwise empty.
    """

    file: Path
    images: int
    difference: float
    largest: float
    agreement: float | None
    of: str = ""

    def __str__(self) -> str:
        """Return the comparison as a text of one line."""
        line = (
            f"On {self.images} validation images the logits differ by at most {self.difference:.2g} (the largest logit "
            f"is {self.largest:.3g})"
        )
        return line if self.agreement is None else f"{line}, and {self.agreement:.2%}{self.of} have the same class"


def export(
    model: LightningModule,
    datamodule: LightningDataModule,
    output: Path,
    kind: Format,
    checkpoint: tuple[Path, Mapping[str, Any]] | None = None,
) -> Comparison:
    """Export a module's network to a new folder, and compare the exported network with the original network.

    The folder also contains ``export.json`` with the shape of an image, the preprocessing and the names of the classes,
    and the model card ``README.md``. The module is moved to the CPU and set to eval mode.

    Args:
        model: The module whose network is exported.
        datamodule: The data module. Its validation images are used for the comparison.
        output: Folder to create.
        kind: Format of the exported network.
        checkpoint: Path and content of the checkpoint that the module has loaded, for the model card.

    Raises:
        ConfigurationError: A package is not installed, the folder exists, the network cannot be exported, or the logits
            of the exported network differ too much from those of the original network.
    """
    network = network_of(model, "export")
    if missing := [name for name in NEEDS[kind] if importlib.util.find_spec(name) is None]:
        raise ConfigurationError(
            f"export to {kind} needs packages that are not installed: pip install {' '.join(missing)}, or the "
            "extra `export` of cnnstrategies"
        )
    if output.exists():
        raise ConfigurationError(f"{output} exists already: set another path with --output, or remove the folder")
    network.cpu().eval()
    give_trainer(datamodule)
    datamodule.prepare_data()
    datamodule.setup("validate")
    batches = [images_of(batch, "export") for batch in itertools.islice(datamodule.val_dataloader(), BATCHES)]
    source = giving_logits(network, batches[0])
    with whole_folder(output, "free some space, or set another path with --output") as scratch:
        if kind == "safetensors":
            exported = to_safetensors(network, scratch / FILES[kind])
        else:
            exported = {"torch_export": to_torch_export, "onnx": to_onnx}[kind](
                source, for_any_batch(batches[0]), scratch / FILES[kind]
            )
        comparison = _compare(network, exported, batches, output / FILES[kind])
        if comparison.difference > TOLERANCE * max(1.0, comparison.largest):
            raise ConfigurationError(
                f"the logits of the network exported to {kind} differ from those of the original network by up to "
                f"{comparison.difference:.3g}: set another --format"
            )
        if getattr(model, "task", "classes") != "classes":
            comparison = replace(comparison, agreement=None)
        description = {"format": kind, "file": FILES[kind], **describe(datamodule, batches[0])}
        (scratch / DESCRIPTION).write_text(json.dumps(description, indent=2, ensure_ascii=False), encoding="utf-8")
        card = model_card(model, network, datamodule, description, str(comparison), checkpoint)
        (scratch / CARD).write_text(card, encoding="utf-8")
    return comparison


def describe(datamodule: LightningDataModule, images: Tensor) -> dict[str, Any]:
    """Return the content of ``export.json``: image shape, preprocessing and names of the classes.

    Args:
        datamodule: The data module with which the network was trained.
        images: A validation batch (N, C, H, W), from which the image shape (C, H, W) is taken.
    """
    height, width = images.shape[2:]
    geometry: dict[str, Any] = {
        "resize_shorter_side": None,
        "interpolation": None,
        "crop_centre": [height, width],
    }
    if isinstance(datamodule, ImageDataModule):
        geometry["resize_shorter_side"] = shorter_side(datamodule)
        geometry["interpolation"] = (datamodule.preprocessing or IMAGENET).interpolation
        if datamodule.ignore_index is not None:
            geometry = {"resize_longer_side": height, "fill_right_and_below_to": [height, width], "fill": FILL}
    transform = getattr(datamodule, "eval_transform", None)
    steps = list(transform.modules()) if isinstance(transform, nn.Module) else []
    normalised = next((step for step in steps if isinstance(step, v2.Normalize)), None)
    return {
        "image_shape": list(images.shape[1:]),
        "preprocessing": {
            **geometry,
            "scale": None if normalised is None else 1 / 255,
            "mean": None if normalised is None else list(normalised.mean),
            "std": None if normalised is None else list(normalised.std),
        },
        "class_names": getattr(datamodule, "class_names", None),
    }


def _compare(network: Network, exported: Network, batches: list[Tensor], file: Path) -> Comparison:
    difference = largest = same = 0.0
    total, of = 0, ""
    with torch.no_grad():
        for images in batches:
            expected, actual = main_logits(network(images)), main_logits(exported(images))
            difference = max(difference, float((expected - actual).abs().max()))
            largest = max(largest, float(expected.abs().max()))
            of = " of the pixels" if expected.ndim > 2 else ""
            same += float((expected.argmax(1) == actual.argmax(1)).float().mean()) * len(images)
            total += len(images)
    return Comparison(file, total, difference, largest, same / total, of)


def to_torch_export(network: nn.Module, example: Tensor, file: Path) -> Network:
    """Export the network with ``torch.export``, and return the network as loaded from the file."""
    save_program(exported_program(network, example), file)
    loaded: Network = torch.export.load(file).module()
    return loaded


def to_safetensors(network: nn.Module, file: Path) -> Network:
    """Save the network's parameters and buffers, and return a copy of the network that has loaded the file."""
    from safetensors.torch import load_model, save_model

    save_model(network, str(file))
    loaded = copy.deepcopy(network)
    for tensor in loaded.state_dict().values():
        tensor.zero_()
    load_model(loaded, file)
    return loaded


def to_onnx(network: nn.Module, example: Tensor, file: Path) -> Network:
    """Export the network to ONNX, and return a function that runs the file with ONNX Runtime."""
    import onnxruntime

    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(
                network,
                (example,),
                file,
                dynamo=True,
                external_data=False,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            )
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"torch.onnx cannot export {name_of(network)}: {reason}; set another --format"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
