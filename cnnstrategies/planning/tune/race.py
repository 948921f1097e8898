"""Which of several settings is faster, by rounds in which each runs once: statistics that stand the machine's noise.

The speed of a machine varies more than settings differ, but not much within a round; so what counts is a candidate's
time over the default's of the same round. Three looks at the growing number of rounds spend the probability of a
false verdict, 5 % over all candidates and looks. Who cannot be the fastest leaves before.

Sources: Hodges and Lehmann (1963), the estimate and its interval; Wilcoxon (1945), the signed-rank test that they
belong to, with its exact distribution; Holm (1979), several candidates; Lan and DeMets (1983), spending over looks.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["faster", "slower", "no difference", "undecided", "behind"]
MARGIN = math.log(1.02)  # Smaller differences are nobody's concern.
# Who is so much slower than the leader or the default in every one of so many rounds will not be the fastest; from some
# more rounds on, who is slower by an interval with this error. No claim is made, so none of the probability is spent.
BEHIND = math.log(1.05)
SOONEST, LATER = 4, 6
BEHIND_ERROR = 0.1


@dataclass(frozen=True)
class Look:
    """A moment at which verdicts may be given.

    Attributes:
        error: Probability of any false verdict that is spent here.
    """

    rounds: int
    error: float


LOOKS = (Look(11, 0.01), Look(17, 0.015), Look(25, 0.025))


@dataclass(frozen=True)
class RaceVerdict:
    """What is known of a candidate: its speed over the default's, and the ends of the interval for that."""

    outcome: Outcome
    speed: float
    low: float
    high: float
    rounds: int


@dataclass
class Race:
    """Candidates against a default, round by round.

    Attributes:
        running: Candidates that still take part; the slower ones, those behind another and those without a difference
            have left.
    """

    candidates: Sequence[str]
    looks: Sequence[Look] = LOOKS
    verdicts: dict[str, RaceVerdict] = field(default_factory=dict)
    _gains: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._gains = {name: [] for name in self.candidates}

    @property
    def running(self) -> list[str]:
        """Those that still take part."""
        left = ("slower", "no difference", "behind")
        return [name for name in self._gains if self.verdicts.get(name, _NOTHING).outcome not in left]

    @property
    def over(self) -> bool:
        """Whether more rounds would change nothing."""
        rounds = max((len(gains) for gains in self._gains.values()), default=0)
        undecided = any(self.verdicts.get(name, _NOTHING).outcome == "undecided" for name in self.running)
        return not self.running or rounds >= self.looks[-1].rounds or (bool(self.verdicts) and not undecided)

    def drop(self, name: str) -> None:
        """Forget a candidate that can run no more."""
        self._gains.pop(name, None)
        self.verdicts.pop(name, None)

    def add(self, default: float, times: Mapping[str, float]) -> None:
        """Enter a round: seconds per step of the default, and of the running candidates."""
        for name, seconds in times.items():
            self._gains[name].append(math.log(default / seconds))
        rounds = max((len(gains) for gains in self._gains.values()), default=0)
        for look in self.looks:
            if look.rounds == rounds:
                self.judge(look.error)
        if rounds >= SOONEST:
            self._leave_behind()

    def judge(self, error: float) -> None:
        """Give the running candidates their verdicts, with this probability of any false one."""
        running = self.running
        ordered = sorted(running, key=lambda name: p_value(self._gains[name]))
        left = len(self.candidates)
        for name in ordered:
            self.verdicts[name] = verdict(self._gains[name], error / left)
            if self.verdicts[name].outcome != "undecided":
                left -= 1  # Holm: what is decided leaves its share to the others.

    def _leave_behind(self) -> None:
        running = self.running
        if not running:
            return
        leader = max((self._gains[name] for name in running), key=statistics.median)
        rivals = (leader, [0.0] * len(leader))
        for name in running:
            own = self._gains[name]
            if any(_is_behind([two - one for one, two in zip(own, rival, strict=True)]) for rival in rivals):
                low, middle, high = (math.exp(one) for one in (min(own), statistics.median(own), max(own)))
                self.verdicts[name] = RaceVerdict("behind", middle, low, high, len(own))


def _is_behind(leads: Sequence[float]) -> bool:
    """Whether another's lead, by rounds, is one that will not be made up."""
    return min(leads) > BEHIND or (len(leads) >= LATER and interval(leads, BEHIND_ERROR)[0] > 0)


_NOTHING = RaceVerdict("undecided", 1.0, 0.0, math.inf, 0)


def verdict(gains: Sequence[float], error: float) -> RaceVerdict:
    """What is known from a candidate's rounds, logarithms of the default's time over its own."""
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
    """What several pairs of processes say together: the last one's outcome, their middle, and all that they allow."""
    middle = math.exp(statistics.mean(math.log(one.speed) for one in verdicts))
    low, high = min(one.low for one in verdicts), max(one.high for one in verdicts)
    return RaceVerdict(verdicts[-1].outcome, middle, low, high, sum(one.rounds for one in verdicts))


def interval(values: Sequence[float], error: float) -> tuple[float, float, float]:
    """Hodges and Lehmann's estimate of the middle of symmetric values, between the ends of its exact interval.

    Args:
        values: The sample.
        error: Probability that the interval misses the middle; the ends are infinite where the sample is too small.
    """
    means = sorted((one + other) / 2 for one, other in itertools.combinations_with_replacement(values, 2))
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
    """Wilcoxon's exact two-sided probability of values as far from 0 in the middle, if that were 0."""
    ranked = sorted(values, key=abs)
    positive = sum(rank for rank, value in enumerate(ranked, start=1) if value > 0)
    total = len(values) * (len(values) + 1) // 2
    tail = sum(signed_rank_ways(len(values))[: min(positive, total - positive) + 1])
    return min(1.0, 2.0 * float(tail) / float(2 ** len(values)))


@functools.cache
def signed_rank_ways(count: int) -> tuple[int, ...]:
    """In how many ways a subset of the ranks 1 to ``count`` has each sum."""
    ways = [1]
    for rank in range(1, count + 1):
        grown = ways + [0] * rank
        for total, number in enumerate(ways):
            grown[total + rank] += number
        ways = grown
    return tuple(ways)
