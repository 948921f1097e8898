"""Which encodings a worker uses where the user leaves it to the run: those with which whole steps take the least time.

The time of steps says what the link and the processors make of an encoding, and needs no model of either. Encodings
form a ladder, from what is exact to what is smallest. Where halving the bytes gains nothing, the link is not what
takes the time, and nothing smaller is tried.
"""

import math
from collections.abc import Generator, Sequence
from statistics import median

from cnnstrategies.paramserver.compression import AUTO, auto_ladder
from cnnstrategies.paramserver.specification import PullCompression, PushCompression, Specification

Codecs = tuple[PushCompression, PullCompression]

WARM_UP = 3  # steps before anything is tried
PAIRS = 5  # steps with what is tried, at most, each beside one with what is used
GAIN = 0.95  # of the time: what is smaller must bring it below; what is more exact must only take no more
WORSE, BETTER = 1.5, 1.25  # times the time: when so much more, or for two steps so much less, needs no further pairs
SETTLED = 8  # steps whose median is the time that others are compared with
SLACK = math.log(1.1)  # by which steps differ all the time, until that was taken for a change
MOST_SLACK = math.log(1.5)
LARGEST = math.log(3)  # that one step counts: one alone is no change
THRESHOLD = 1.6  # two steps of three times the time, three of twice, six of one and a half times
WAIT, LONGEST_WAIT = 32, 1024  # steps between two rounds without a change
STEPS_PER_COST = 100  # between two rounds for each step's time that the first has cost: 1 %


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
    """Finds the rung of a ladder with which steps take the least time, and again when that time changes for good.

    A round compares the present rung with its neighbours, step by step in turns, and climbs while that gains. Rounds
    come when the time of steps has changed, twice if the first finds nothing, and now and then without a change: seldom
    where they find nothing, and so seldom that they cost 1 % at most. A change is found by two one-sided cumulative
    sums (Page, "Continuous Inspection Schemes", Biometrika 1954) of the logarithm of the time.

    Where all workers step together one alone gains nothing by another rung. So the first of them chooses, and the
    others use in each step what that one has used two steps before, since only even steps try something. The first try
    of a rung tells nothing then.

    Attributes:
        chosen: The rung that is used, but for the steps that try another one.
    """

    def __init__(self, levels: int, followed: bool = False) -> None:
        self.chosen = 0
        self._levels = levels
        self._followed = followed
        self._step = 0
        self._cost = 0.0  # seconds that the present round has cost
        self._heard: list[int] = []  # rungs of the first worker in the last two steps, while this one follows it
        self._course = self._run(WARM_UP, (1, -1))
        self._next = next(self._course)

    def next(self, step: int, seconds: float | None) -> int:
        """The rung of a step that begins, when the one before has taken so long; None where that says nothing."""
        self._step = step
        if self._heard:  # It is the first one now.
            self._heard.clear()
            self._course = self._run(0, ())
            self._next = next(self._course)
        elif seconds is not None:
            self._next = self._course.send(max(seconds, 1e-9))
        return self._next

    def follow(self, step: int, first: int | None) -> int:
        """The same of another worker; the first one has used a rung in the step before, None if that is not known."""
        heard = self._next if first is None else min(first, self._levels - 1)
        self._heard = [*self._heard, heard][-2:]
        self._next = self._heard[0]
        if step % 2 == 0:
            self.chosen = heard
        return self._next

    def _run(self, warm_up: int, directions: Sequence[int]) -> Generator[int, float]:
        """Gives the rung of the next step, and takes what that has taken; so do all below."""
        for _ in range(warm_up):
            yield self.chosen
        times = yield from self._climb([], directions)
        wait, slack = WAIT, SLACK
        while True:
            change, last = yield from self._watch(times, wait, slack)
            before, self._cost = self.chosen, 0.0
            directions = (-1, 1) if change < 0 else (1, -1)
            times = yield from self._climb([last] if change else [], directions)
            if change and self.chosen == before:  # A link that has just become slow still loses packets.
                times = yield from self._climb([(yield self.chosen)], directions)
            if self.chosen != before:
                wait, slack = WAIT, SLACK
            else:
                wait = min(2 * wait, LONGEST_WAIT)
                slack = min(2 * slack, MOST_SLACK) if change else slack
            while wait < STEPS_PER_COST * self._cost / median(times):
                wait *= 2

    def _watch(self, times: Sequence[float], wait: int, slack: float) -> Generator[int, float, tuple[int, float]]:
        """Wait for a change or the next round; 1 for slower, -1 for faster, 0 for none, and what the last step took."""
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
        """Move to where steps take the least time, in the first direction that gains; what they take there."""
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
        """What steps take with another rung; those between, with the present one, are added to `times`."""
        tried: list[float] = []
        spoiled = self._followed
        while len(tried) < PAIRS:
            while self._step % 2 or not times:
                times.append((yield self.chosen))
            if spoiled:
                yield level
                spoiled = False
                continue
            tried.append((yield level))
            if min(tried) > WORSE * median(times) or (len(tried) > 1 and BETTER * max(tried) < min(times)):
                break
        return tried
