"""Pretrained networks of torchvision and timm with a new head, and the preprocessing that pretrained weights expect."""

import difflib
import inspect
import warnings
from collections.abc import Iterable, Mapping
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchvision.models import get_model, get_model_builder, get_model_weights, list_models

from cnnstrategies.data.preprocessing import Preprocessing
from cnnstrategies.errors import ConfigurationError

TRAINED_WITH = "trained_with"
INTERPOLATIONS = ("bilinear", "bicubic")
FILES = (".pth", ".pt")


def pretrained(name: str, num_classes: int, weights: str = "DEFAULT", frozen: bool = False) -> nn.Module:
    """Return a network of torchvision or timm with pretrained weights, for fine-tuning.

    The head is replaced by a new one, unless the pretrained head already has ``num_classes`` classes.

    Args:
        name: Name of the network in torchvision, such as ``resnet50``, or in timm. A name may include timm's name of
            the weights, as in ``vit_base_patch16_224.augreg_in21k``. A name without weights that both packages know is
            torchvision's.
        num_classes: Number of classes.
        weights: ``DEFAULT`` for the best weights, the name of other weights of torchvision or timm, or the path of a
            file with a state dict of torchvision's network (.pth, .pt). Weights are downloaded when they are first
            used.
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
    setattr(network, TRAINED_WITH, _of_weights(name, weights) or _of_cfg(network))
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
        if (built := timm_network(name, num_classes, weights)) is not None:
            return built
        others = timm_names()
        close = difflib.get_close_matches(name, [*list_models(), *others], n=1)
        raise ConfigurationError(
            f"no network {name!r} in torchvision"
            + (" or timm" if others else "; for networks of timm, pip install timm")
            + (f"; did you mean {close[0]!r}?" if close else "; correct `name`")
        )
    wanted = without_values(name, num_classes)
    if weights.endswith(FILES):
        state = _state_dict(Path(weights))
        shapes = {key: tensor.shape for key, tensor in wanted.state_dict().items()}
        # The number of classes of the network in the file.
        before = next(
            (len(old) for key, old in state.items() if old.ndim and shapes.get(key, old.shape) != old.shape),
            num_classes,
        )
        network = get_model(name, weights=None, num_classes=before, **_options(name, weights_backbone=None))
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
    return network, new_heads(network, wanted, num_classes, name)


class _WithoutValues(TorchFunctionMode):
    """Mode in which layers get their parameters on the device ``meta``, which takes neither time nor memory.

    Under ``torch.device("meta")`` the constructors of some networks fail, because they compute widths with tensors.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = {"device": "meta"} if function is torch.empty else {}
        return function(*args, **{**(kwargs or {}), **device})


def without_values(name: str, num_classes: int) -> nn.Module:
    """Return a network of torchvision for a number of classes, whose layers have shapes but no values.

    Raises:
        ConfigurationError: The network does not classify images or pixels.
    """
    try:
        with _WithoutValues(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # GoogLeNet warns that its random values will change.
            options = _options(name, weights_backbone=None, aux_loss=True)
            network: nn.Module = get_model(name, weights=None, num_classes=num_classes, **options)
    except (TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(
            f"{name} cannot be built for {num_classes} classes ({reason}): choose a network that classifies images"
        ) from error
    return network


def _options(name: str, **options: Any) -> dict[str, Any]:
    """Return the options that the function which builds a network accepts."""
    parameters = inspect.signature(get_model_builder(name)).parameters
    return {key: value for key, value in options.items() if key in parameters}


def new_heads(network: nn.Module, wanted: nn.Module, num_classes: int, name: str) -> list[nn.Module]:
    """Replace a network's heads, including auxiliary heads, and return the new heads.

    The heads are the layers whose shapes depend on the number of classes. Their widths do not identify them, because
    other layers may have as many outputs as there are classes.

    Args:
        network: The network, which is changed in place.
        wanted: The same network, built for the new number of classes.
        num_classes: Number of classes of the new heads.
        name: Name of the network, for the error message.

    Raises:
        ConfigurationError: A layer depends on the number of classes, but its outputs are not the classes.
    """
    shapes = {key: parameter.shape for key, parameter in wanted.named_parameters()}
    changed = [key for key, parameter in network.named_parameters() if parameter.shape != shapes.get(key)]
    heads: list[nn.Module] = []
    for path in dict.fromkeys(key.rpartition(".")[0] for key in changed):
        old = network.get_submodule(path)
        outputs = tuple(shapes.get(f"{path}.weight", ()))[:1]
        head: nn.Module
        if isinstance(old, nn.Linear) and outputs == (num_classes,):
            head = nn.Linear(old.in_features, num_classes, old.bias is not None)
        elif isinstance(old, nn.Conv2d) and old.kernel_size == (1, 1) and outputs == (num_classes,):
            head = nn.Conv2d(old.in_channels, num_classes, 1, bias=old.bias is not None)
        else:
            raise ConfigurationError(
                f"{name}: the outputs of {path} depend on the number of classes, but are not the classes: choose a "
                "network that classifies images"
            )
        network.set_submodule(path, head)
        heads.append(head)
    return heads


def _state_dict(file: Path) -> Mapping[str, Tensor]:
    try:
        state: Mapping[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(f"{file} is not a file of weights ({reason}): set weights to another file") from error
    return state


DEFAULT = "DEFAULT"


def timm_names() -> list[str]:
    """Return the names of timm's networks; none if timm is not installed."""
    if find_spec("timm") is None:
        return []
    import timm

    names: list[str] = timm.list_models()
    return names


def timm_network(name: str, num_classes: int, weights: str) -> tuple[nn.Module, list[nn.Module]] | None:
    """Return a network of timm with pretrained weights, and its new heads.

    The list of new heads is empty if the pretrained head already has ``num_classes`` classes. The result is None if
    timm is not installed or does not know the network.

    Args:
        name: Name of the network, such as ``vit_base_patch16_224``, or of a pretrained configuration, such as
            ``vit_base_patch16_224.augreg_in21k``.
        num_classes: Number of classes.
        weights: ``DEFAULT`` for the network's best weights or the weights in ``name``, or else the tag of other
            weights, such as ``augreg_in21k``.

    Raises:
        ConfigurationError: timm does not have the weights, or they cannot be downloaded.
    """
    architecture, _, tag = name.partition(".")
    if architecture not in timm_names():
        return None
    import timm

    if tag and weights != DEFAULT:
        raise ConfigurationError(f"name={name} and weights={weights} both name weights: leave weights out")
    if weights != DEFAULT:
        tag = weights
    known = [full.partition(".")[2] for full in timm.list_pretrained(f"{architecture}.*")]
    if not known or (tag and tag not in known):
        raise ConfigurationError(
            f"timm has no weights {tag or DEFAULT!r} for {architecture}: "
            + (f"set weights to one of {', '.join(known)}" if known else "choose a network of timm.list_pretrained()")
        )
    network: Any
    try:
        network = timm.create_model(
            f"{architecture}.{tag}" if tag else architecture, pretrained=True, num_classes=num_classes
        )
    except OSError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigurationError(
            f"the weights of {name} cannot be downloaded ({reason}): build the network on a machine with internet "
            "access, and copy the folder ~/.cache/huggingface"
        ) from error
    if network.pretrained_cfg["num_classes"] == num_classes:
        return network, []
    head = network.get_classifier()
    return network, list(head) if isinstance(head, tuple) else [head]
