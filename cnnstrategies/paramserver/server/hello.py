"""What a worker says when it says hello: where it is, and what it has of this server."""

from typing import NamedTuple

from cnnstrategies.paramserver.fields import Fields
from cnnstrategies.paramserver.messages import NO_STEP, Header, unpack_keys


class Hello(NamedTuple):
    """The contents of a `HELLO`.

    Attributes:
        step: The step that it works on, or whose answers it waits for; None if it is no member.
        joins: Whether it takes part from now on.
        first: The step that it has begun with.
        given: Whether the parameters that it begins with have come.
        request: The step whose values are under way to it; None if none are.
        answered: The slices that it has had the step's answer for.
    """

    step: int | None
    joins: bool
    first: int
    given: bool
    request: int | None
    answered: frozenset[int]

    @classmethod
    def of(cls, header: Header, payload: memoryview) -> "Hello":
        """The one in a message.

        Raises:
            InvalidMessageError: There is none.
        """
        said = Fields.of(payload, header)
        return cls(
            None if header.step == NO_STEP else header.step,
            said.flag("joins"),
            said.integer("first"),
            said.flag("given"),
            None if said.values.get("request") is None else said.integer("request"),
            frozenset(unpack_keys(payload[header.meta :])),
        )
