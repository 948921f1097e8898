"""Pretrained networks of torchvision with a new head, and the preprocessing that pretrained weights expect."""

import difflib
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights, list_models

from cnnstrategies.data.preprocessing import Preprocessing
from cnnstrategies.errors import ConfigurationError

TRAINED_WITH = "trained_with"
INTERPOLATIONS = ("bilinear", "bicubic")
FILES = (".pth", ".pt")


def pretrained(name: str, num_classes: int, weights: str = "DEFAULT", frozen: bool = False) -> nn.Module:
    """Return a network of torchvision with pretrained weights, for fine-tuning.

    The head is replaced by a new one, unless the pretrained head already has ``num_classes`` classes.

    Args:
        name: Name of the network in torchvision, such as ``resnet50``. For networks of timm use ``timm.create_model``.
        num_classes: Number of classes.
        weights: ``DEFAULT`` for torchvision's best weights, the name of other weights of torchvision, or the path of a
            file with a state dict (.pth, .pt). Weights of torchvision are downloaded when they are first used.
        frozen: Whether only the new head is trained. The running statistics of batch normalisation are still updated.

    Raises:
        ConfigurationError: The network or the weights do not exist, the weights cannot be downloaded or do not fit the
            network, or ``frozen`` is set although the head is not replaced.
    """
    if weights.endswith(FILES) and not Path(weights).is_file():
        raise ConfigurationError(
            f"no file {Path(weights).resolve()}: set model.init_args.network.init_args.weights to the path of a file "
            "with weights"
        )
    try:
        network, heads = _built(name, num_classes, weights)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"the weights of {name} cannot be downloaded ({reason}): download them on a machine with internet access, "
            "copy the file, and set weights to its path"
        ) from error
    setattr(network, TRAINED_WITH, _of_weights(name, weights))
    if frozen:
        if not heads:
            raise ConfigurationError(
                f"frozen=True leaves no layer to train, because the pretrained {name} already has {num_classes} "
                "classes and keeps its head: set frozen=False"
            )
        network.requires_grad_(False)
        for head in heads:
            head.requires_grad_(True)
    return network


def trained_with(
    network: nn.Module, builder: str = "", arguments: Mapping[str, Any] | None = None
) -> Preprocessing | None:
    """Return the preprocessing that a network's pretrained weights expect.

    The result is None if the network has no pretrained weights, or if their preprocessing is not known.

    Args:
        network: Network from :func:`pretrained`, timm or torchvision.
        builder: Import path of the function that has built the network.
        arguments: Arguments of the function ``builder``.
    """
    arguments = arguments or {}
    if arguments.get("pretrained") is True:
        return _of_cfg(network)
    if builder.startswith("torchvision.models.") and arguments.get("weights") is not None:
        return _of_weights(builder.rpartition(".")[2], arguments["weights"])
    known: Preprocessing | None = getattr(network, TRAINED_WITH, None)
    return known


def _of_cfg(network: nn.Module) -> Preprocessing | None:
    """Return the preprocessing that timm documents for a network's weights.

    The result is None if the network's ``pretrained_cfg`` does not define the preprocessing.
    """
    config: Mapping[str, Any] = getattr(network, "pretrained_cfg", {})
    if not {"input_size", "crop_pct", "mean", "std"} <= config.keys():
        return None
    size = int(config["input_size"][-1])
    return _known(size, int(size / config["crop_pct"]), config.get("interpolation"), config["mean"], config["std"])


def _of_weights(name: str, weights: Any) -> Preprocessing | None:
    """Return the preprocessing that torchvision documents for weights.

    For weights from a file, this is the preprocessing of torchvision's default weights.
    """
    if name not in list_models():
        return None
    if not isinstance(weights, Enum):
        names = get_model_weights(name).__members__
        weights = names.get(str(weights).rpartition(".")[2], names["DEFAULT"])
    transform = weights.value.transforms()
    # The transforms of segmentation networks, for example, do not crop, so the size of the images is not known.
    if not hasattr(transform, "crop_size"):
        return None
    return _known(
        transform.crop_size[0],
        transform.resize_size[0],
        transform.interpolation.value,
        transform.mean,
        transform.std,
    )


def _known(size: int, resize: int, interpolation: Any, mean: Iterable[float], std: Iterable[float]) -> Preprocessing:
    kind = interpolation if interpolation in INTERPOLATIONS else "bilinear"
    return Preprocessing(size, max(size, resize), kind, tuple(mean), tuple(std))


def _built(name: str, num_classes: int, weights: str) -> tuple[nn.Module, list[nn.Module]]:
    if name not in list_models():
        close = difflib.get_close_matches(name.removeprefix("timm/"), list_models(), n=1)
        raise ConfigurationError(
            f"no network {name!r} in torchvision; for networks of timm use timm.create_model with pretrained: true"
            + (f"; did you mean {close[0]!r}?" if close else "")
        )
    if weights.endswith(FILES):
        state = _state_dict(Path(weights))
        # The head is the last layer. Its weight has a row for each class, so the number of rows is the number of
        # classes of the network in the file.
        before = next((len(tensor) for tensor in reversed(list(state.values())) if tensor.ndim > 1), num_classes)
        network = get_model(name, weights=None, num_classes=before)
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigurationError(
                f"the weights in {weights} do not fit the network {name} ({reason}): correct `name` or `weights`"
            ) from error
    else:
        try:
            network = get_model(name, weights=weights)
        except (KeyError, AttributeError, ValueError) as error:
            raise ConfigurationError(
                f"torchvision has no weights {weights!r} for {name}: set weights to DEFAULT for the best weights"
            ) from error
        before = 1000
    return network, [] if before == num_classes else new_heads(network, before, num_classes)


def new_heads(network: nn.Module, before: int, num_classes: int) -> list[nn.Module]:
    """Replace a network's heads, including auxiliary heads, and return the new heads.

    All linear layers and 1 x 1 convolutions with ``before`` outputs count as heads.

    Args:
        network: The network, which is changed in place.
        before: Number of classes of the old heads.
        num_classes: Number of classes of the new heads.
    """
    heads: list[nn.Module] = []
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.out_features == before:
                heads.append(nn.Linear(child.in_features, num_classes, child.bias is not None))
            elif isinstance(child, nn.Conv2d) and child.out_channels == before and child.kernel_size == (1, 1):
                heads.append(nn.Conv2d(child.in_channels, num_classes, 1, bias=child.bias is not None))
            else:
                continue
            setattr(parent, name, heads[-1])
    return heads


def _state_dict(file: Path) -> Mapping[str, Tensor]:
    try:
        state: Mapping[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"{file} is not a file of weights ({reason}): set weights to another file") from error
    return state
