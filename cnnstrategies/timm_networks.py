"""Pretrained networks of timm, by the names that timm gives to its pretrained configurations."""

from importlib.util import find_spec
from typing import Any

from torch import nn

from cnnstrategies.errors import ConfigurationError

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
