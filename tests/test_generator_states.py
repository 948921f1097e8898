"""Tests of the states of random generators."""

import itertools
import random

import numpy as np
import pytest
import torch

from cnnstrategies.runtime.generator_states import GeneratorStates

pytestmark = pytest.mark.light
CPU = torch.device("cpu")
DRAWS = {
    "nothing": lambda: None,
    "a number": np.random.random,
    "a normal number, so that the next one is stored": np.random.randn,
    "the stored normal number": np.random.randn,
    "nothing again": lambda: None,
    "a seed": lambda: np.random.seed(3),
    "a permutation": lambda: np.random.permutation(1000),
}


def test_states_change_with_each_draw() -> None:
    before = GeneratorStates.current(CPU)
    try:
        np.random.seed(1)
        states = []
        for draw in DRAWS.values():
            draw()
            states.append(GeneratorStates.current(CPU))
            name, words, *rest = np.random.get_state()
            assert (states[-1].numpy[0], *states[-1].numpy[2:]) == (name, *rest)
            assert np.array_equal(states[-1].numpy[1], words)
        changes = [bool(former.changed(later)) for former, later in itertools.pairwise(states)]
        assert changes == [not name.startswith("nothing") for name in DRAWS][1:]
        states[1].restore(CPU)
        again = [np.random.randn(), np.random.randn()]
        states[1].restore(CPU)
        assert not states[1].changed(GeneratorStates.current(CPU))
        assert [np.random.randn(), np.random.randn()] == again
        random.random()
        assert states[1].changed(GeneratorStates.current(CPU)) == {"python", "numpy"}
    finally:
        before.restore(CPU)
