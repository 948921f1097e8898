"""What the servers agree on about a common step."""

from dataclasses import dataclass
from typing import Any

from cnnstrategies.paramserver.fields import Fields
from cnnstrategies.paramserver.messages import InvalidMessageError
from cnnstrategies.paramserver.option_checks import check_options
from cnnstrategies.paramserver.server.pushes import Who
from cnnstrategies.paramserver.specification import Options, Specification


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
    def of(cls, said: Fields, specification: Specification) -> "Decision":
        """The one that another server tells.

        Raises:
            InvalidMessageError: It is none of this run.
        """
        members, lives = said.integers("members"), said.integers("lives")
        if len(lives) != len(members):
            raise InvalidMessageError("members without a life")
        scale = None if said.values.get("scale") is None else said.real("scale")
        if scale is None and specification.clip_norm is None:
            raise InvalidMessageError("a step that waits for a factor although nothing is clipped")
        options = check_options(said.values.get("options"), specification.groups)
        return cls(said.integer("step"), members, lives, options, scale)
