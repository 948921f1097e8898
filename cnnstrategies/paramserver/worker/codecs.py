"""Choice of the encodings under ``compression: auto``: the encodings with which a training step takes the least time.

The worker measures the time of whole steps. This time includes the work of encoding on the CPU and the transfer over
the network, so no cost model of the CPU or the network is needed. The list of encodings is called the ladder: the most
exact encoding comes first, and the encoding with the smallest payloads comes last. If an encoding with half the bytes
does not make steps faster, the network is not the bottleneck, and smaller encodings are not tried.
"""

import math
from collections.abc import Generator, Sequence
from statistics import median

from cnnstrategies.paramserver.compression import AUTO, auto_ladder
from cnnstrategies.paramserver.specification import PullCompression, PushCompression, Specification

Codecs = tuple[PushCompression, PullCompression]

WARM_UP = 3  # number of steps before the first trial
PAIRS = 5  # largest number of trial steps of a level; the steps between them use the current level for comparison
# A smaller encoding is chosen if it reduces the time of a step to less than this fraction of the current time. A more
# exact encoding is chosen if it saves any time.
GAIN = 0.95
# A trial of a level ends early if even its fastest step took more than WORSE times the median time of the current
# level. It also ends early, after two or more trial steps, if even its slowest step was more than BETTER times as fast
# as the fastest step of the current level.
WORSE, BETTER = 1.5, 1.25
SETTLED = 8  # number of steps whose median time is the reference with which later steps are compared
# Normal variation of a step's time: the natural logarithm of its ratio to the median time. If the time has changed, but
# the search leaves the level unchanged, the variation that counts as normal is doubled, up to MOST_SLACK.
SLACK = math.log(1.1)
MOST_SLACK = math.log(1.5)
# Limit on the deviation of one step: the logarithm of its time divided by the reference time. With this limit, one slow
# step does not count as a change of the time.
LARGEST = math.log(3)
# The time of a step counts as changed if the cumulative sum of the deviations exceeds this limit: after two steps that
# take 3 times the reference time, three steps that take 2 times, or six steps that take 1.5 times the reference time.
THRESHOLD = 1.6
# Smallest and largest number of steps between two search rounds, as long as the time of a step does not change.
WAIT, LONGEST_WAIT = 32, 1024
# If the trials of a round have delayed training by the time of n steps, the next round begins at least 100 n steps
# later, so that rounds cost at most 1 % of the training time.
STEPS_PER_COST = 100


def ladder(specification: Specification) -> list[Codecs]:
    """Return the candidates for the compressions of pushes and pulls: first the most exact, last the smallest payloads.

    Each candidate is a pair: the compression of pushes, and the compression of pulls. An option that is not ``auto``
    has the same value in all pairs.
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
    """Search for the level with which a step takes the least time. A level is an index in the ladder of encodings.

    The search consists of rounds. In a round, even steps use a neighbouring level as a trial, and odd steps use the
    current level. If the trial steps are faster, the neighbouring level becomes the current level, and the round tries
    the next level. Otherwise the round ends.

    A round begins when the time of a step has changed, and otherwise at intervals. If a round after a change leaves the
    level unchanged, a second round follows at once. The interval grows while rounds leave the level unchanged, so that
    rounds cost at most 1 % of the training time. Two one-sided cumulative sums of the logarithm of the step time detect
    a change (Page, "Continuous Inspection Schemes", Biometrika 1954).

    In modes with common steps, a step is only faster when all workers change the level. Therefore the first worker,
    which is the live worker with the lowest id, chooses the level for all workers. The other workers use the level that
    the first worker used two steps earlier. In the first trial step of each level, they still use the old level, so the
    first worker ignores the time of this step. From the second trial step on, all workers use the tried level.

    Args:
        levels: Number of levels.
        followed: Whether other workers follow this worker's choice.

    Attributes:
        chosen: The current level. Trial steps may use a different level.
    """

    def __init__(self, levels: int, followed: bool = False) -> None:
        self.chosen = 0
        self._levels = levels
        self._followed = followed
        self._step = 0
        self._cost = 0.0  # seconds by which the trials of the current round have delayed training
        # Levels that the first worker used in the last two steps; empty while this worker is the first worker.
        self._levels_of_first: list[int] = []
        self._search = self._run(WARM_UP, (1, -1))
        self._next = next(self._search)

    def next(self, step: int, seconds: float | None) -> int:
        """Return the level of the ladder for the step that begins. Call this in a worker that chooses the level itself.

        Args:
            step: Number of the step.
            seconds: Time of the previous step; None if this time includes other work than training, such as validation.
        """
        self._step = step
        if self._levels_of_first:  # This worker has just become the first worker, so it now measures steps itself.
            self._levels_of_first.clear()
            self._search = self._run(0, ())
            self._next = next(self._search)
        elif seconds is not None:
            self._next = self._search.send(max(seconds, 1e-9))
        return self._next

    def follow(self, step: int, first: int | None) -> int:
        """Return the level of the ladder for the step that begins. Call this in a worker that follows the first worker.

        Args:
            step: Number of the step.
            first: Level that the first worker used in the previous step; None if the level is not known.
        """
        level = self._next if first is None else min(first, self._levels - 1)
        self._levels_of_first = [*self._levels_of_first, level][-2:]
        self._next = self._levels_of_first[0]
        if step % 2 == 0:
            self.chosen = level
        return self._next

    # Each of the generators below yields the level for the next step, and then receives the seconds that the step took.

    def _run(self, warm_up: int, directions: Sequence[int]) -> Generator[int, float]:
        """Search for the best level. Then search again when the time of steps has changed, and otherwise at intervals.

        Args:
            warm_up: Number of steps before the first search.
            directions: Directions of the first search; see :meth:`_climb`.
        """
        for _ in range(warm_up):
            yield self.chosen
        times = yield from self._climb([], directions)
        wait, slack = WAIT, SLACK
        while True:
            change, last = yield from self._watch(times, wait, slack)
            before, self._cost = self.chosen, 0.0
            directions = (-1, 1) if change < 0 else (1, -1)
            times = yield from self._climb([last] if change else [], directions)
            # A connection that has just become slow loses packets. This may have distorted the times of the trial
            # steps, so search again.
            if change and self.chosen == before:
                times = yield from self._climb([(yield self.chosen)], directions)
            if self.chosen != before:
                wait, slack = WAIT, SLACK
            else:
                wait = min(2 * wait, LONGEST_WAIT)
                slack = min(2 * slack, MOST_SLACK) if change else slack
            while wait < STEPS_PER_COST * self._cost / median(times):
                wait *= 2

    def _watch(self, times: Sequence[float], wait: int, slack: float) -> Generator[int, float, tuple[int, float]]:
        """Use the chosen level until the time of a step has changed, or for `wait` steps if it does not change.

        Args:
            times: Times of earlier steps at the chosen level, in seconds.
            wait: Number of steps between two rounds.
            slack: Normal variation of a step's time: the natural logarithm of its ratio to the median time.

        Returns:
            A pair. The first number is 1 if steps have become slower, -1 if steps have become faster, and 0 if their
            time has not changed. The second number is the time of the last step, in seconds.
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
        """Carry out one round: move from level to level in one direction, as long as each move makes steps faster.

        If the first move in a direction does not make steps faster, try the next direction.

        Args:
            times: Times of earlier steps at the current level, in seconds. This method adds the times of more steps.
            directions: Directions in the order of trial: 1 for smaller encodings, -1 for more exact encodings.

        Returns:
            Times of at least two steps at the chosen level, in seconds.
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
        """Use `level` in even steps as a trial, and return the time of each trial step in seconds.

        The odd steps use the current level. The time of each odd step is added to `times`.
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
