"""Statistics to find settings that are faster than the default. Each candidate and the default run once in each round.

The speed of a machine changes over time, often by more than the settings differ, but it hardly changes within a round.
Therefore a candidate's time is compared with the default's time in the same round. Verdicts are given in two interim
analyses, after 11 and 17 rounds, and in a final analysis after 25 rounds. The probability of at least one false
verdict, over all candidates and analyses, is 5 %. A candidate leaves the race early if it is unlikely to become the
fastest.

Sources: Hodges and Lehmann (1963) for the estimate and its interval; Wilcoxon (1945) for the signed-rank test, whose
exact distribution gives the interval; Holm (1979) for the correction for several candidates; Lan and DeMets (1983) for
dividing the error probability among the analyses.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["faster", "slower", "no difference", "undecided", "behind"]
# Logarithm of the smallest ratio of two speeds that counts as a difference. The verdict is "no difference" if the whole
# confidence interval of the ratio lies between 1 / 1.02 and 1.02.
MARGIN = math.log(1.02)
# A candidate is compared with two rivals: the default, and the candidate that is fastest so far. The candidate gets the
# verdict "behind" in one of two cases. First, after at least `FEWEST_ROUNDS` rounds, it was slower than a rival by more
# than 5 % in every round. Second, after at least `INTERVAL_ROUNDS` rounds, a confidence interval with the error
# probability `BEHIND_ERROR` shows that it is slower than a rival. The verdict "behind" only ends the candidate's
# measurement and is not a statistical statement, so it does not count towards the analyses' error probability.
BEHIND = math.log(1.05)
FEWEST_ROUNDS, INTERVAL_ROUNDS = 4, 6
BEHIND_ERROR = 0.1


@dataclass(frozen=True)
class Analysis:
    """An interim or final analysis, in which verdicts on the candidates are given.

    Attributes:
        rounds: Number of rounds after which the analysis takes place.
        error: Probability of at least one false verdict in this analysis.
    """

    rounds: int
    error: float


ANALYSES = (Analysis(11, 0.01), Analysis(17, 0.015), Analysis(25, 0.025))


@dataclass(frozen=True)
class RaceVerdict:
    """The result of comparing a candidate's speed with the default's speed.

    Attributes:
        outcome: Whether the candidate is ``faster`` or ``slower`` than the default, or shows ``no difference``. With
            ``undecided``, more rounds are needed. With ``behind``, the measurement of the candidate ended early,
            because the candidate is unlikely to become the fastest.
        speed: Estimated speed of the candidate as a multiple of the default's speed.
        low: Lower end of the confidence interval of the speed.
        high: Upper end of the confidence interval of the speed.
        rounds: Number of rounds that were measured for this result.
    """

    outcome: Outcome
    speed: float
    low: float
    high: float
    rounds: int


@dataclass
class Race:
    """Candidates that are compared with a default, round by round.

    Args:
        candidates: Names of the candidates.
        analyses: Interim analyses and the final analysis, in order of their numbers of rounds.

    Attributes:
        verdicts: Latest verdicts. Keys are the names of the candidates that have a verdict.
    """

    candidates: Sequence[str]
    analyses: Sequence[Analysis] = ANALYSES
    verdicts: dict[str, RaceVerdict] = field(default_factory=dict)
    _gains: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._gains = {name: [] for name in self.candidates}

    @property
    def running(self) -> list[str]:
        """Names of the candidates that still take part.

        A candidate leaves with the verdict "slower", "no difference" or "behind".
        """
        left = ("slower", "no difference", "behind")
        return [name for name in self._gains if self.verdicts.get(name, _NOTHING).outcome not in left]

    @property
    def over(self) -> bool:
        """Whether the race has ended.

        The race ends when no candidate takes part any more, when the final analysis has taken place, or when no
        candidate is undecided after an analysis.
        """
        rounds = max((len(gains) for gains in self._gains.values()), default=0)
        undecided = any(self.verdicts.get(name, _NOTHING).outcome == "undecided" for name in self.running)
        return not self.running or rounds >= self.analyses[-1].rounds or (bool(self.verdicts) and not undecided)

    def drop(self, name: str) -> None:
        """Remove a candidate that has failed, with its times and its verdict."""
        self._gains.pop(name, None)
        self.verdicts.pop(name, None)

    def add(self, default: float, times: Mapping[str, float]) -> None:
        """Add the times of a round, and give verdicts if an analysis takes place after this round.

        Args:
            default: Seconds per step of the default.
            times: Seconds per step of the running candidates. Keys are the candidates' names.
        """
        for name, seconds in times.items():
            self._gains[name].append(math.log(default / seconds))
        rounds = max((len(gains) for gains in self._gains.values()), default=0)
        for analysis in self.analyses:
            if analysis.rounds == rounds:
                self.judge(analysis.error)
        if rounds >= FEWEST_ROUNDS:
            self._find_candidates_behind()

    def judge(self, error: float) -> None:
        """Give verdicts to the running candidates.

        Args:
            error: Probability of at least one false verdict.
        """
        running = self.running
        ordered = sorted(running, key=lambda name: p_value(self._gains[name]))
        left = len(self.candidates)
        for name in ordered:
            self.verdicts[name] = verdict(self._gains[name], error / left)
            if self.verdicts[name].outcome != "undecided":
                # Holm's procedure: after each decided candidate, the error probability is divided by a smaller number.
                left -= 1

    def _find_candidates_behind(self) -> None:
        """Give the verdict "behind" to running candidates that are unlikely to become the fastest."""
        running = self.running
        if not running:
            return
        leader = max((self._gains[name] for name in running), key=statistics.median)
        rivals = (leader, [0.0] * len(leader))
        for name in running:
            gains = self._gains[name]
            if any(
                _is_behind([rival_gain - gain for gain, rival_gain in zip(gains, rival, strict=True)])
                for rival in rivals
            ):
                low, middle, high = (math.exp(gain) for gain in (min(gains), statistics.median(gains), max(gains)))
                self.verdicts[name] = RaceVerdict("behind", middle, low, high, len(gains))


def _is_behind(leads: Sequence[float]) -> bool:
    """Whether a candidate is so much slower than a rival that its measurement can end.

    Args:
        leads: For each round, the logarithm of the rival's speed divided by the candidate's speed.
    """
    return min(leads) > BEHIND or (len(leads) >= INTERVAL_ROUNDS and interval(leads, BEHIND_ERROR)[0] > 0)


_NOTHING = RaceVerdict("undecided", 1.0, 0.0, math.inf, 0)


def verdict(gains: Sequence[float], error: float) -> RaceVerdict:
    """Return the verdict on a candidate.

    Args:
        gains: Logarithm of the default's time divided by the candidate's time, in each round.
        error: Largest probability that the interval does not contain the true speed.
    """
    low, middle, high = interval(gains, error)
    outcome: Outcome = "undecided"
    if low > MARGIN:
        outcome = "faster"
    elif high < -MARGIN:
        outcome = "slower"
    elif low > -MARGIN and high < MARGIN:
        outcome = "no difference"
    return RaceVerdict(outcome, math.exp(middle), math.exp(low), math.exp(high), len(gains))


def combined(verdicts: Sequence[RaceVerdict]) -> RaceVerdict:
    """Combine the verdicts of several pairs of processes into one. Each pair ran the same candidate and the default.

    The outcome is the outcome of the last pair. The speed is the geometric mean of the pairs' speeds. The interval
    extends from the lowest to the highest end of the pairs' intervals.
    """
    middle = math.exp(statistics.mean(math.log(verdict.speed) for verdict in verdicts))
    low, high = min(verdict.low for verdict in verdicts), max(verdict.high for verdict in verdicts)
    return RaceVerdict(verdicts[-1].outcome, middle, low, high, sum(verdict.rounds for verdict in verdicts))


def interval(values: Sequence[float], error: float) -> tuple[float, float, float]:
    """Return Hodges and Lehmann's estimate of a symmetric distribution's centre, with its exact confidence interval.

    Args:
        values: Independent values from the distribution.
        error: Largest probability that the interval does not contain the centre.

    Returns:
        The lower end, the estimate and the upper end. The ends are infinite if there are too few values.
    """
    means = sorted((value + other) / 2 for value, other in itertools.combinations_with_replacement(values, 2))
    ways = signed_rank_ways(len(values))
    below, left_out = 0, 0
    while left_out < len(ways) and 2 * (below + ways[left_out]) <= error * 2 ** len(values):
        below += ways[left_out]
        left_out += 1
    middle = statistics.median(means)
    if not left_out:
        return -math.inf, middle, math.inf
    return means[left_out - 1], middle, means[-left_out]


def p_value(values: Sequence[float]) -> float:
    """Return the exact two-sided p-value of Wilcoxon's signed-rank test.

    The null hypothesis is that the distribution of the values is symmetric around 0.
    """
    ranked = sorted(values, key=abs)
    positive = sum(rank for rank, value in enumerate(ranked, start=1) if value > 0)
    total = len(values) * (len(values) + 1) // 2
    tail = sum(signed_rank_ways(len(values))[: min(positive, total - positive) + 1])
    return min(1.0, 2.0 * float(tail) / float(2 ** len(values)))


@functools.cache
def signed_rank_ways(count: int) -> tuple[int, ...]:
    """Return the distribution of the signed-rank statistic for ``count`` values.

    The element at index s is the number of subsets of the numbers from 1 to ``count`` whose sum is s.
    """
    ways = [1]
    for rank in range(1, count + 1):
        grown = ways + [0] * rank
        for total, number in enumerate(ways):
            grown[total + rank] += number
        ways = grown
    return tuple(ways)
