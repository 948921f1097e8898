"""States of the random generators that a loader may use: torch's for the CPU, Python's, and NumPy's global one."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Return the generators' states by name, as values that the codec can encode."""
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}


def changed_states(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return those states of ``now`` that differ from the states of the same generators in ``before``."""
    equal = {
        "torch": torch.equal(before["torch"], now["torch"]),
        "python": before["python"] == now["python"],
        "numpy": before["numpy"][2:] == now["numpy"][2:] and np.array_equal(before["numpy"][1], now["numpy"][1]),
    }
    return {name: state for name, state in now.items() if not equal[name]}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the states of some generators, by name."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
