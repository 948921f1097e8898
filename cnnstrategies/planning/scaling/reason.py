"""A reason why more devices do not train faster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cnnstrategies.planning.candidates import Effect


@dataclass(frozen=True)
class Reason:
    """A reason why more devices do not train faster.

    Attributes:
        cause: The cause in a few words.
        evidence: Text with the measurements that show the cause.
        remedy: Advice to the user.
        gain: Predicted factor by which the remedy makes training faster.
        values: Values of the configuration that carry out the remedy. Keys are dotted keys of the configuration. Empty
            if no setting is a remedy.
        effect: Effect of the remedy on the training result.
    """

    cause: str
    evidence: str
    remedy: str
    gain: float
    values: Mapping[str, Any] = field(default_factory=dict)
    effect: Effect = Effect.NONE
