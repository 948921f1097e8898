"""Several optimizers of a module, such as those of a GAN's two networks, which the servers hold as one.

Each parameter group of a specification names its optimizer's class. In a step of one of the optimizers, workers push
gradients of its parameters only, so the servers leave all other parameters and their states as they are.
"""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError


class JoinedOptimizers(Optimizer):
    """The parameter groups of several optimizers, one optimizer after the other. It makes no steps.

    Args:
        members: The optimizers.

    Raises:
        ConfigurationError: A parameter is in several optimizers.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        # The base class would make groups of its own. The groups here are those of the members.
        self.members = list(members)
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        twice = len(held) - len({id(parameter) for parameter in held})
        if twice:
            raise ConfigurationError(
                f"{twice} parameters are in several of the {len(self.members)} optimizers, but servers keep one state "
                "of each parameter: give each parameter to one optimizer, or use strategy ddp"
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of all members."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The members' default hyperparameters, by name."""
        return {name: value for member in self.members for name, value in member.defaults.items()}

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the states of all members as the state dict of one optimizer."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for member in self.members:
            first = sum(len(group["params"]) for group in groups)
            saved = member.state_dict()
            state |= {first + position: values for position, values in saved["state"].items()}
            groups += [
                {**group, "params": [first + position for position in group["params"]]}
                for group in saved["param_groups"]
            ]
        return {"state": state, "param_groups": groups}


def joined(optimizers: Sequence[Optimizer]) -> Optimizer:
    """Return the only optimizer, or several optimizers as one."""
    return optimizers[0] if len(optimizers) == 1 else JoinedOptimizers(optimizers)


def members_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an object from :func:`joined` consists of."""
    return optimizer.members if isinstance(optimizer, JoinedOptimizers) else [optimizer]
