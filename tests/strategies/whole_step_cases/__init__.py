"""Programs as users write them. Training must be the same on one device and under a strategy that divides the network.

Each file has one kind of case. `CASES` has all of them by name.
"""

from tests.strategies.whole_step_cases import (  # noqa: F401  # Each import registers cases.
    backwards,
    comparing,
    containers,
    declared,
    evaluating,
    finetuning,
    gradients,
    hooks,
    in_training,
    optimization,
    outside,
    own_objects,
    reading,
    refused,
    special_layers,
    stored,
    teachers,
    torch_utilities,
    trainer_options,
    views,
)
from tests.strategies.whole_step_cases.base import CASES, Case

__all__ = ["CASES", "Case"]
