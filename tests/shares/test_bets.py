"""Decisions about shares in virtual time: real differences are found, and at most two bets are lost."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean as mean

import pytest

from cnnstrategies.shares.bets import PATIENCE, Bets, Block, ShareDecision
from cnnstrategies.shares.dealing import deal
from cnnstrategies.shares.proposals import Proposal, proposal

pytestmark = pytest.mark.light
BLOCK = 4  # Steps of a block.
STEPS = 200

# Function of the step, the ranks' numbers of samples and a random generator. It returns the segments of a step. All
# ranks wait for each other at the end of a segment. A segment has the seconds of each rank.
Segments = Callable[[int, Sequence[int], random.Random], list[list[float]]]


@dataclass
class Run:
    """A training in virtual time: its total seconds, its last shares, and its decisions with their steps."""

    seconds: float = 0.0
    counts: tuple[int, ...] = ()
    bets: Bets = field(default_factory=Bets)
    decisions: list[tuple[int, ShareDecision]] = field(default_factory=list)


def run(segments: Segments, samples: int, seed: int, measured: bool = True, ranks: int = 2) -> Run:
    """Train with equal shares at first.

    New shares come two steps after a decision. The first two steps with new shares are not measured.
    """
    rng, done, skipped = random.Random(seed), Run(counts=deal(samples, [1] * ranks)), 3
    steps: list[tuple[float, list[float]]] = []
    changes: dict[int, Sequence[float]] = {}
    for step in range(STEPS):
        if step in changes:
            done.counts, skipped, steps = deal(samples, changes.pop(step)), 2, []
        parts = segments(step, done.counts, rng)
        seconds = 0.005 + sum(map(max, parts))
        done.seconds += seconds
        if skipped or changes or not measured:
            skipped = max(0, skipped - 1)
            continue
        steps.append((seconds, [sum(of_rank) for of_rank in zip(*parts, strict=True)]))
        if len(steps) < BLOCK:
            continue
        counts = done.counts
        owns = [mean(seconds[rank] for _, seconds in steps) / counts[rank] for rank in range(ranks)]
        block, steps = Block(mean(seconds for seconds, _ in steps), (tuple(owns),)), []
        decision = done.bets.decide(block, counts, lambda units, time, counts=counts: proposal(counts, units[0], time))
        if decision != ShareDecision():
            done.decisions.append((step, decision))
        if decision.shares is not None:
            changes[step + 2] = decision.shares
    return done


def computing(*seconds: float, noise: float = 0.05) -> Segments:
    """Return steps in which each rank computes for so many seconds per sample."""

    def segments(step: int, counts: Sequence[int], rng: random.Random) -> list[list[float]]:
        pairs = zip(counts, seconds, strict=True)
        return [[count * second * max(0.2, rng.gauss(1, noise)) for count, second in pairs]]

    return segments


def small_batches(step: int, counts: Sequence[int], rng: random.Random) -> list[list[float]]:
    return [[(0.004 + 0.0005 * count) * max(0.2, rng.gauss(1, 0.2)) for count in counts]]


def drifting(step: int, counts: Sequence[int], rng: random.Random) -> list[list[float]]:
    return [[(1 + 0.3 * math.sin(step / 20)) * seconds for seconds in computing(0.001, 0.001)(step, counts, rng)[0]]]


def drifting_apart(step: int, counts: Sequence[int], rng: random.Random) -> list[list[float]]:
    owns = computing(0.001, 0.001)(step, counts, rng)[0]
    return [[(1 + 0.2 * math.sin(step / period)) * seconds for seconds, period in zip(owns, (9, 14), strict=True)]]


def saving(step: int, counts: Sequence[int], rng: random.Random) -> list[list[float]]:
    """Rank 0 saves a checkpoint in every fifth step."""
    owns = computing(0.001, 0.001)(step, counts, rng)[0]
    return [[owns[0] + 0.1 * (step % 5 == 4), owns[1]]]


def launching(step: int, counts: Sequence[int], rng: random.Random) -> list[list[float]]:
    """A step's time does not depend on the number of samples."""
    return computing(0.01, 0.02)(step, [1, 1], rng)


def loading_first(step: int, counts: Sequence[int], rng: random.Random) -> list[list[float]]:
    """Rank 0 has a slow loader. The ranks wait for each other before they compute, so that shares do not help."""
    return [[0.0005 * counts[0], 0.0], *computing(0.001, 0.001)(step, counts, rng)]


def bursts(step: int, counts: Sequence[int], rng: random.Random) -> list[list[float]]:
    """Rank 0 has a slow loader with four workers, whose four batches come together."""
    owns = computing(0.001, 0.001)(step, counts, rng)[0]
    return [[owns[0] + 0.012 * counts[0] * (step % 4 == 3), owns[1]]]


def with_callback(step: int, counts: Sequence[int], rng: random.Random) -> list[list[float]]:
    """Rank 0 has a callback that takes 50 ms for any number of samples."""
    owns = computing(0.001, 0.001)(step, counts, rng)[0]
    return [[owns[0] + 0.05, owns[1]]]


@pytest.mark.parametrize(
    ("segments", "samples", "least", "bets"),
    [
        (computing(0.001, 0.001, noise=0.03), 64, 0.99, 0.1),
        (computing(0.001, 0.001, noise=0.3), 64, 0.98, 0.2),
        (small_batches, 8, 0.98, 0.2),
        (drifting, 64, 0.99, 0.2),
        (drifting_apart, 64, 0.9, None),
        (saving, 64, 0.9, None),
        (launching, 64, 0.97, None),
        (loading_first, 64, 0.97, None),
    ],
)
def test_measured_shares_are_not_slower_where_equal_shares_are_best(
    segments: Segments, samples: int, least: float, bets: float | None
) -> None:
    """Noise alone is almost never worth a bet. Where predictions are wrong, at most two bets are lost."""
    runs = [run(segments, samples, seed) for seed in range(6)]
    equal = [run(segments, samples, seed, measured=False) for seed in range(6)]
    speeds = [other.seconds / of.seconds for other, of in zip(equal, runs, strict=True)]
    assert min(speeds) > least, speeds
    assert mean(speeds) > 0.97, speeds
    assert all(of.bets.lost <= PATIENCE for of in runs)
    if bets is not None:
        assert mean(sum(decision.predicted is not None for _, decision in of.decisions) for of in runs) <= bets


@pytest.mark.parametrize(
    ("segments", "speed", "shares"),
    [
        (computing(0.001, 0.002), 1.3, (43, 21)),
        (computing(0.001, 0.002, noise=0.2), 1.2, (43, 21)),
        (computing(0.001, 0.004), 2.0, (51, 13)),
        (bursts, 1.45, (13, 51)),
        (with_callback, 1.25, (7, 57)),
    ],
)
def test_a_real_difference_is_found(segments: Segments, speed: float, shares: tuple[int, int]) -> None:
    for seed in range(6):
        balanced, equal = run(segments, 64, seed), run(segments, 64, seed, measured=False)
        assert equal.seconds / balanced.seconds > speed
        assert balanced.counts == pytest.approx(shares, abs=6)
        assert balanced.decisions[0][0] < 30, "the first bet begins soon"


def test_a_rank_that_slows_down_later_loses_samples_and_gets_them_back() -> None:
    def segments(step: int, counts: Sequence[int], rng: random.Random) -> list[list[float]]:
        return computing(0.001, 0.003 if 60 <= step < 150 else 0.001)(step, counts, rng)

    for seed in range(6):
        done = run(segments, 64, seed)
        bets = [decision.shares for step, decision in done.decisions if step < 150 and decision.predicted is not None]
        assert any(shares[0] > 44 for shares in bets if shares), "48 of 64 samples are best"
        assert done.counts == pytest.approx((32, 32), abs=6)


class Script:
    """Bets on blocks whose times a test sets. Each proposal is for shares 3 and 1."""

    def __init__(self, gain: float = 0.5) -> None:
        self.bets, self.gain = Bets(), gain

    def __call__(self, *steps: float) -> list[ShareDecision]:
        units = ((0.01, 0.03),)
        return [
            self.bets.decide(Block(step, units), (32, 32), lambda units, step: Proposal((48.0, 16.0), self.gain))
            for step in steps
        ]


def test_a_bet_is_won_if_steps_are_faster_by_more_than_the_noise() -> None:
    script = Script()
    assert script(1.0, 1.02) == [ShareDecision(), ShareDecision((48.0, 16.0), predicted=0.5)]
    script.gain = 0.0
    first, second = script(0.6, 0.61)
    assert first == ShareDecision(), "one block may be an accident"
    assert (second.shares, second.won, script.bets.lost) == (None, True, 0)
    assert second.gain == pytest.approx(1.01 / 0.605 - 1)


def test_after_two_lost_bets_the_shares_stay_also_in_a_resumed_run() -> None:
    script = Script()
    for lost in (1, 2):
        assert script(1.0, 1.01)[-1].predicted == 0.5
        state = script.bets.state_dict()
        script.bets = Bets()
        script.bets.load_state_dict(state)
        ended = script(*[1.2] * 3)
        assert [decision.shares for decision in ended if decision.gain is not None] == [(32, 32)]
        assert script.bets.lost == lost
        script.bets.forget()
    assert script.bets.is_over
    assert script(1.0, 1.0, 1.0) == [ShareDecision()] * 3


def test_a_bet_without_a_measurable_gain_is_lost() -> None:
    script = Script()
    script(1.0, 1.02)
    *open_decisions, end = script(*[1.0, 1.02] * 4)
    assert set(open_decisions) == {ShareDecision()}
    assert end.shares == (32, 32)
    assert not end.won


def test_a_gain_below_the_noise_is_no_reason_for_a_bet() -> None:
    script = Script(gain=0.1)
    assert all(decision == ShareDecision() for decision in script(*[1.0, 1.3] * 6))


def test_a_rank_that_joins_decides_like_the_others() -> None:
    """The ranks' decisions would differ without the times and the open bet of the others."""
    script, rng = Script(), random.Random(3)
    for _ in range(40):
        state = script.bets.state_dict()
        joined = Script()
        joined.bets.load_state_dict(state)
        step = rng.choice([1.0, 1.01, 0.7, 1.3])
        assert joined(step) == script(step)
        assert joined.bets.state_dict() == script.bets.state_dict()
