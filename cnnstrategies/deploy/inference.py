"""Search for the submodule of a LightningModule that maps images to logits, for prediction, export and quantisation."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.logits import main_logits
from cnnstrategies.models.own_forward import has_own_forward, own_forward


def network_of(module: LightningModule, purpose: str) -> nn.Module:
    """Return a network that maps images to logits: the module's ``forward`` if it defines one, or else its ``network``.

    Args:
        module: Any LightningModule. This package's own modules have an attribute ``network``.
        purpose: Name of the command that needs the network, for the error message.

    Raises:
        ConfigurationError: The module has neither a ``forward`` nor an attribute ``network``.
    """
    if has_own_forward(module):
        return own_forward(module)
    network = getattr(module, "network", None)
    if isinstance(network, nn.Module):
        return network
    raise ConfigurationError(
        f"{purpose}: {type(module).__name__} has no forward that maps images to logits: define one, for example "
        "`def forward(self, images): return self.model(images)`"
    )


def images_of(batch: Any, purpose: str) -> Tensor:
    """Return the images (N, C, H, W) of a batch: the batch itself, or the first element of a tuple or list.

    Args:
        batch: Batch of a user's loader, such as ``(images, targets)`` or ``(images, targets, indices)``.
        purpose: Name of the command that needs the images, for the error message.

    Raises:
        ConfigurationError: The batch does not begin with a tensor of images.
    """
    images = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if isinstance(images, list):
        raise ConfigurationError(
            f"{purpose}: the images of a batch are a list, as detectors take them, but {purpose} needs a network whose "
            "images are one tensor (N, C, H, W): use it for the backbone alone, with a module and loaders of its own"
        )
    if not isinstance(images, Tensor):
        kind = type(batch).__name__ if images is batch else f"{type(batch).__name__} of {type(images).__name__}"
        raise ConfigurationError(
            f"{purpose}: a batch of the data module is a {kind}, but must begin with the images: let the loaders yield "
            "(images, targets)"
        )
    return images


class PredictsImages:
    """Default ``predict_step`` for a module that does not define this method.

    Call the object with a batch ``(images, indices)``. It returns the samples' indices and the probabilities of the
    classes. The module's ``forward`` must return logits (N, classes) or probabilities (N, classes). Probabilities are
    returned unchanged.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module

    def __call__(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        """Predict a batch, with the same result as :meth:`~cnnstrategies.ImageClassifier.predict_step`."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            parts = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"the type {type(batch).__name__}"
            raise ConfigurationError(
                f"predict: a batch of the data module has {parts}, but (images, indices) is needed: let the loader of "
                f"predict_dataloader yield it, or define a predict_step in {type(self._module).__name__}"
            )
        images, indices = batch
        logits = main_logits(self._module(images))
        if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(images) or logits.shape[1] < 2:
            result = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigurationError(
                f"predict: for {len(images)} images the forward of {type(self._module).__name__} returned {result}, "
                "but logits of shape (N, classes) are needed: define a predict_step that returns 'index' (N,) and "
                "'probabilities' (N, classes)"
            )
        return {"index": indices, "probabilities": _as_probabilities(logits.float())}

    # Lightning reads the names of `predict_step`'s parameters from the attribute `__code__` of a function. An object of
    # this class is not a function, so the class copies the attribute from its method.
    __code__ = __call__.__code__


def _as_probabilities(logits: Tensor) -> Tensor:
    sums = logits.sum(dim=1)
    if bool((logits >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4):
        return logits  # The module has already applied a softmax.
    return logits.softmax(dim=1)


def give_predict_step(module: LightningModule) -> None:
    """Add a default ``predict_step`` to a module that does not define this method."""
    if not is_overridden("predict_step", module, LightningModule):
        network_of(module, "predict")
        module.predict_step = PredictsImages(module)  # type: ignore[method-assign]  # for this object
