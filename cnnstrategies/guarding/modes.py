"""Search for layers that stay in evaluation mode although the user has set them to training mode."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from cnnstrategies.recording.steps import StepReader

SWITCHED = (_BatchNorm, _DropoutNd)  # Layers that compute something else in evaluation mode.


class Modes(StepReader):
    """Modes of the layers of a module, as they are at several points of each step.

    A layer that has been in training mode may be set to evaluation mode on purpose at the start of an epoch, or be
    switched in each step, as the discriminator of a GAN. It is not on purpose if the layer changes at another time, and
    is then in evaluation mode at all points of all steps until the next check.

    Args:
        module: The module that is trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self.layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, SWITCHED)}
        self._reference: dict[str, bool] = {}  # Modes that the user has set; empty before the first batch.
        self._at_epoch: dict[str, bool] = {}
        self._trained: set[str] = set()  # Names of the layers that were in training mode since the last check.

    def _now(self) -> dict[str, bool]:
        return {name: layer.training for name, layer in self.layers.items()}

    def begin_epoch(self) -> None:
        """Record the modes before the hooks of an epoch's start."""
        self._at_epoch = self._now()

    @override
    def begin_batch(self, batch: Any, index: int) -> None:
        """Record the modes before a batch. After the hooks of an epoch's start they are what the user has set."""
        if not self._reference:
            self._reference = self._now()
        elif self._at_epoch:
            changed = {name: mode for name, mode in self._now().items() if mode != self._at_epoch.get(name, mode)}
            self._reference |= changed
        self._at_epoch = {}
        self._observe()

    @override
    def before_backward(self, loss: Any) -> None:
        self._observe()

    @override
    def end_batch(self, loss: Any) -> None:
        self._observe()

    def _observe(self) -> None:
        """Record which layers are in training mode now."""
        if len(self._trained) < len(self.layers):
            self._trained.update(name for name, layer in self.layers.items() if layer.training)

    def left_in_evaluation(self) -> list[str]:
        """Return the layers that should be in training mode, but have not been since the last call.

        A layer whose parameters are all frozen is left out, because it is usually in evaluation mode on purpose.
        """
        wrong = [
            name
            for name, layer in self.layers.items()
            if self._reference.get(name, False) and name not in self._trained and not _is_frozen(layer)
        ]
        self._trained = set()
        return wrong


def _is_frozen(layer: nn.Module) -> bool:
    parameters = list(layer.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
