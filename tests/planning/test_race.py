"""Tests of `tune`'s race: rounds of measured times and the statistics that decide."""

import math
import random
import statistics

import pytest

from cnnstrategies.planning.tune.race import FEWEST_ROUNDS, Race, interval, p_value, signed_rank_ways

pytestmark = pytest.mark.light


def raced(speeds: dict[str, float], seed: int, noise: float = 0.03) -> Race:
    """Return a finished race on a machine whose speed drifts between 0.9 and 1.7 and whose steps vary."""
    draw = random.Random(seed)
    race = Race(list(speeds))
    number = 0
    while not race.over:
        drift = 1.3 + 0.4 * math.sin(number / 3)
        number += 1
        default = drift * math.exp(draw.gauss(0, noise))
        race.add(default, {name: drift / speeds[name] * math.exp(draw.gauss(0, noise)) for name in race.running})
    return race


def test_equal_settings_have_no_winner():
    mistaken = 0
    for seed in range(40):
        race = raced(dict.fromkeys("abcdefg", 1.0), seed)
        mistaken += any(verdict.outcome in ("faster", "slower") for verdict in race.verdicts.values())
    assert mistaken <= 1, f"{mistaken} of 40 races between equals had a winner or a loser"


def test_a_real_gain_is_detected_despite_drift_and_losers_leave_early():
    detected, rounds = 0, []
    for seed in range(20):
        race = raced({"fast": 1.3, "slow": 0.7, "same": 1.0}, seed)
        detected += race.verdicts["fast"].outcome == "faster" and race.verdicts["slow"].outcome == "behind"
        rounds.append(race.verdicts["slow"].rounds)
        little = raced({"same": 1.0, "little": 1.01}, seed).verdicts["little"]
        assert little.outcome in ("undecided", "no difference", "behind")
        assert 1.2 < race.verdicts["fast"].speed < 1.4
    assert detected == 20
    assert statistics.median(rounds) == FEWEST_ROUNDS


def test_the_confidence_interval_covers_the_median_at_its_nominal_rate():
    draw, held = random.Random(7), 0
    for _ in range(1000):
        low, _, high = interval([draw.gauss(0.5, 1) for _ in range(17)], 0.05)
        held += low <= 0.5 <= high
    assert 0.93 <= held / 1000 <= 0.975


def test_the_distribution_is_wilcoxons_signed_rank_distribution():
    """Critical values agree with published tables of the signed-rank statistic for 5 %, two-sided (n = 11: 10)."""
    for count, most in ((11, 10), (17, 34), (25, 89)):
        ways = signed_rank_ways(count)
        assert sum(ways) == 2**count
        assert 2 * sum(ways[: most + 1]) <= 0.05 * 2**count < 2 * sum(ways[: most + 2])
    assert p_value([1.0] * 11) == pytest.approx(2 / 2**11)
    assert p_value([0.1, -0.2, 0.3, -0.4]) > 0.5


def test_too_few_rounds_give_an_infinite_interval():
    low, _, high = interval([0.5, 0.6, 0.7], 0.05)
    assert (low, high) == (-math.inf, math.inf)
