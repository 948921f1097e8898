"""Parameters that a forward sets, as layers do that compute their first parameters from the first batch."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class NotedParameters:
    """The parameters of a stage with copies of their values.

    Args:
        modules: The modules that the stage calls, by name, with their submodules.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        parameters = {
            f"{path}.{name}": p for path, module in modules.items() for name, p in module.named_parameters("", False)
        }
        self._parameters = {name: p for name, p in parameters.items() if not p.is_meta}
        self._values = {name: p.detach().clone() for name, p in self._parameters.items()}

    def changed(self) -> list[str]:
        """Return the names of parameters whose values have changed."""
        parameters = self._parameters.items()
        return [
            name for name, p in parameters if not torch.equal(p.detach().nan_to_num(), self._values[name].nan_to_num())
        ]

    def restore(self) -> None:
        """Give the parameters the noted values again."""
        with torch.no_grad():
            for name in self.changed():
                self._parameters[name].copy_(self._values[name])

    def tensors(self) -> list[Tensor]:
        """Return the parameters, without gradients, as tensors that share their storage."""
        return [parameter.detach() for parameter in self._parameters.values()]
