"""What the servers agree on about a common step."""

from dataclasses import dataclass
from typing import Any

from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.server.pushes import Who
from cnnstrategies.paramserver.specification import Options


@dataclass(frozen=True)
class Decision:
    """Who makes up a step, with which hyper-parameters, and the factor that clips it once it is known.

    One that takes a dead member's place has its number and another life: its push of this step will not come.
    """

    step: int
    members: tuple[int, ...]
    lives: tuple[int, ...]
    options: Options
    scale: float | None

    @property
    def who(self) -> list[Who]:
        """The members with their lives."""
        return list(zip(self.members, self.lives, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """This decision as what JSON can hold."""
        return dict(vars(self))  # Not `asdict`, which would copy the hyper-parameters at each step.

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Decision":
        """The inverse of :meth:`as_dict`.

        Raises:
            InvalidMessageError: It holds other hyper-parameters.
        """
        scale = values["scale"]
        options = values["options"]
        if not isinstance(options, list) or not all(isinstance(group, dict) for group in options):
            raise InvalidMessageError("hyper-parameters that are no list of objects")
        members = tuple(int(worker) for worker in values["members"])
        lives = tuple(int(life) for life in values["lives"])
        if len(lives) != len(members):
            raise InvalidMessageError("members without a life")
        return cls(int(values["step"]), members, lives, options, None if scale is None else float(scale))
