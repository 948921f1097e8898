"""Seeds that are mixed from neighbouring numbers are all different. Ranks with the same batch have the same seed."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from cnnstrategies import ImageClassifier
from cnnstrategies.runtime.seeds import mixed_seed, restores_random_numbers, seed_all
from cnnstrategies.strategies.protocol import StrategyFacts


def test_every_tuple_has_a_seed_of_its_own_and_always_the_same():
    seeds = {mixed_seed(seed, step, rank) for seed in range(5) for step in range(100) for rank in range(4)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
    # The value must never change: a resumed run draws the numbers that the uninterrupted run would have drawn.
    assert mixed_seed(1, 2, 3) == 733464669408481064


class Pipeline(StrategyFacts):
    root_device = torch.device("cpu")
    has_global_batches = True


class TwoParts(StrategyFacts):
    root_device = torch.device("cpu")
    ranks_per_batch = 2


class Replicas(StrategyFacts):
    root_device = torch.device("cpu")


@pytest.mark.parametrize(
    ("strategy", "equal_to"),
    [(Replicas(), [0, 1, 2, 3]), (Pipeline(), [0, 0, 0, 0]), (TwoParts(), [0, 0, 1, 1])],
    ids=["each rank has a batch", "one batch", "two ranks have a batch"],
)
def test_ranks_draw_the_numbers_of_their_batch(monkeypatch, strategy, equal_to):
    """The numbers of the first batch are those of one device, and those of the second batch are a second rank's."""
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    module = ImageClassifier(nn.Linear(2, 2), 2)

    def drawn(strategy, rank):
        loops = SimpleNamespace(epoch_loop=SimpleNamespace(total_batch_idx=4))
        vars(module)["_trainer"] = SimpleNamespace(training=True, global_rank=rank, fit_loop=loops, strategy=strategy)
        module.on_before_batch_transfer(None, 0)
        return torch.rand(()).item()

    expected = [drawn(Replicas(), rank) for rank in range(4)]
    assert len(set(expected)) == 4
    assert [drawn(strategy, rank) for rank in range(4)] == [expected[number] for number in equal_to]


def test_random_numbers_are_restored_after_an_exception_as_well():
    def drawn():
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def draw_and_fail():
        with restores_random_numbers():
            seed_all(7)
            drawn()
            raise KeyError("wrong index")

    seed_all(3)
    expected = drawn()
    seed_all(3)
    with pytest.raises(KeyError, match="wrong index"):
        draw_and_fail()
    assert drawn() == expected
