"""The choice of encodings under ``compression: auto``: the encodings with which whole steps take the least time.

The measured time of steps contains the effect of an encoding on both the link and the processors, and needs no model of
either. The encodings form a ladder, from the exact one to the smallest. If half the bytes save no time, the link is not
the bottleneck, and no smaller encoding is tried.
"""

import math
from collections.abc import Generator, Sequence
from statistics import median

from cnnstrategies.paramserver.compression import AUTO, auto_ladder
from cnnstrategies.paramserver.specification import PullCompression, PushCompression, Specification

Codecs = tuple[PushCompression, PullCompression]

WARM_UP = 3  # steps before the first trial
PAIRS = 5  # most steps with the encodings on trial; each is paired with a step with the present encodings
GAIN = 0.95  # A smaller encoding must bring a step below this part of its time; a more exact one must not be slower.
# A trial ends early if a step takes WORSE times as long, or if two steps are BETTER times as fast.
WORSE, BETTER = 1.5, 1.25
SETTLED = 8  # steps whose median is the time with which later steps are compared
SLACK = math.log(1.1)  # usual variation of a step's time; it grows after a false alarm
MOST_SLACK = math.log(1.5)
LARGEST = math.log(3)  # most that a single step counts, so that one step alone is not a change
THRESHOLD = 1.6  # reached by two steps of three times the time, three of twice, or six of one and a half times
WAIT, LONGEST_WAIT = 32, 1024  # steps between two rounds without a change
# Steps until the next round for each step's time that the last round has cost: rounds cost at most 1 %.
STEPS_PER_COST = 100


def ladder(specification: Specification) -> list[Codecs]:
    """Return the pairs of compressions, of pushes and of pulls, to choose from: from the most exact to the smallest.

    An option that is not ``auto`` keeps its value on all levels.
    """
    pushes, pulls = [specification.compression], [specification.pull_compression]
    if pushes == [AUTO]:
        pushes = [compression.name for compression in auto_ladder(specification.itemsize)]
    if pulls == [AUTO]:
        changes = specification.pulls_changes
        pulls = [compression.name for compression in auto_ladder(specification.itemsize, pulls=True, lossy=changes)]
    count = max(len(pushes), len(pulls))
    return [(pushes[min(level, len(pushes) - 1)], pulls[min(level, len(pulls) - 1)]) for level in range(count)]


class CodecChooser:
    """Search for the level of a ladder with which steps take the least time, repeated when that time changes for good.

    A round compares the present level with its neighbours, in alternating steps, and moves on while a move saves time.
    A round begins when the time of steps has changed (a second one follows if the first changes nothing), and now and
    then without a change. Rounds without a change become rarer as long as they change nothing, and cost at most 1 % of
    the time. A change is detected by two one-sided cumulative sums (Page, "Continuous Inspection Schemes", Biometrika
    1954) of the logarithm of the time.

    If all workers step together, a single worker gains nothing by another level. The first worker chooses then; in each
    step the others use the level that the first worker used two steps before, which works because only even steps try
    a level. The first step that tries a level is ignored then, because the other workers do not use the level yet.

    Args:
        levels: Number of levels.
        followed: Whether other workers follow this worker's choice.

    Attributes:
        chosen: The present level. Single steps may try another level.
    """

    def __init__(self, levels: int, followed: bool = False) -> None:
        self.chosen = 0
        self._levels = levels
        self._followed = followed
        self._step = 0
        self._cost = 0.0  # seconds that the present round has cost
        self._levels_of_first: list[int] = []  # the first worker's levels in the last two steps, while this one follows
        self._search = self._run(WARM_UP, (1, -1))
        self._next = next(self._search)

    def next(self, step: int, seconds: float | None) -> int:
        """Return the level of a step that begins; for the first worker.

        Args:
            step: Number of the step.
            seconds: Time of the step before; None if that time does not count.
        """
        self._step = step
        if self._levels_of_first:  # This worker followed another one, and is the first one now.
            self._levels_of_first.clear()
            self._search = self._run(0, ())
            self._next = next(self._search)
        elif seconds is not None:
            self._next = self._search.send(max(seconds, 1e-9))
        return self._next

    def follow(self, step: int, first: int | None) -> int:
        """Return the level of a step that begins; for the workers that follow the first one.

        Args:
            step: Number of the step.
            first: Level of the first worker in the step before; None if it is not known.
        """
        level = self._next if first is None else min(first, self._levels - 1)
        self._levels_of_first = [*self._levels_of_first, level][-2:]
        self._next = self._levels_of_first[0]
        if step % 2 == 0:
            self.chosen = level
        return self._next

    # The generators below yield the level of the next step, and receive the seconds that the step has taken.

    def _run(self, warm_up: int, directions: Sequence[int]) -> Generator[int, float]:
        """Search for the best level in these directions, then watch the time and search again, without end."""
        for _ in range(warm_up):
            yield self.chosen
        times = yield from self._climb([], directions)
        wait, slack = WAIT, SLACK
        while True:
            change, last = yield from self._watch(times, wait, slack)
            before, self._cost = self.chosen, 0.0
            directions = (-1, 1) if change < 0 else (1, -1)
            times = yield from self._climb([last] if change else [], directions)
            if change and self.chosen == before:  # Try again: a link that has just become slow still loses packets.
                times = yield from self._climb([(yield self.chosen)], directions)
            if self.chosen != before:
                wait, slack = WAIT, SLACK
            else:
                wait = min(2 * wait, LONGEST_WAIT)
                slack = min(2 * slack, MOST_SLACK) if change else slack
            while wait < STEPS_PER_COST * self._cost / median(times):
                wait *= 2

    def _watch(self, times: Sequence[float], wait: int, slack: float) -> Generator[int, float, tuple[int, float]]:
        """Wait until the time of steps changes or the next round is due.

        Returns:
            1 if steps have become slower, -1 if faster, 0 if the round was due; and the seconds of the last step.
        """
        settled = list(times)
        slower = faster = 0.0
        count = 0
        while True:
            seconds = yield self.chosen
            count += 1
            deviation = min(LARGEST, max(-LARGEST, math.log(seconds / median(settled))))
            slower = max(0.0, slower + deviation - slack)
            faster = max(0.0, faster - deviation - slack)
            if max(slower, faster) > THRESHOLD:
                return (1 if slower > faster else -1), seconds
            if len(settled) < SETTLED:
                settled.append(seconds)
            if count >= SETTLED and self._step % wait == 0:
                return 0, seconds

    def _climb(self, times: list[float], directions: Sequence[int]) -> Generator[int, float, list[float]]:
        """Move to the level with the shortest steps, in the first direction that saves time.

        Args:
            times: Seconds of steps at the present level.
            directions: Directions to try: 1 towards smaller encodings, -1 towards more exact ones.

        Returns:
            Seconds of steps at the chosen level; at least two.
        """
        before = self.chosen
        for direction in directions:
            while 0 <= self.chosen + direction < self._levels:
                tried = yield from self._try(self.chosen + direction, times)
                if median(tried) >= median(times) * (GAIN if direction > 0 else 1):
                    self._cost += sum(max(0.0, seconds - median(times)) for seconds in tried)
                    break
                self.chosen, times = self.chosen + direction, tried
            if self.chosen != before:
                break
        while len(times) < 2:
            times.append((yield self.chosen))
        return times

    def _try(self, level: int, times: list[float]) -> Generator[int, float, list[float]]:
        """Try another level in even steps, and return the seconds of these steps.

        The seconds of the odd steps between, which use the present level, are added to `times`.
        """
        tried: list[float] = []
        ignore_next = self._followed
        while len(tried) < PAIRS:
            while self._step % 2 or not times:
                times.append((yield self.chosen))
            if ignore_next:
                yield level
                ignore_next = False
                continue
            tried.append((yield level))
            if min(tried) > WORSE * median(times) or (len(tried) > 1 and BETTER * max(tried) < min(times)):
                break
        return tried
