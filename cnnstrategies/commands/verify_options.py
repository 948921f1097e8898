"""What ``cnnstrategies verify`` takes beside a configuration."""

from dataclasses import dataclass


@dataclass
class VerifyOptions:
    """How much is trained.

    Attributes:
        steps: Optimizer steps of each run.
    """

    steps: int = 8
