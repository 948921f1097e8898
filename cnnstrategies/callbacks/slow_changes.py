"""Find lasting changes of the ranks' step times, with their cause, in blocks of measured steps."""

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from cnnstrategies.callbacks.level import Evidence, Level, LevelEvent

STEPS = 7  # Number of steps in a block of a rank.
# Shortest time of a block in seconds. If steps are short, consecutive blocks are joined, so that no change of less than
# some seconds counts as lasting.
SHORTEST = 0.5
LEAST = 0.15  # Smallest change of the step time that is reported, as a fraction of the step time.
LEAST_SECONDS = 1e-3  # Smallest change of the step time that is reported.
LONG = 0.05  # An action counts as an occurrence if it takes at least this fraction of a usual step.
# Number of the longest of `STEPS` steps that do not count for the usual time of a step. A callback that takes long in a
# larger fraction of the steps is a part of the usual step.
DROPPED = 2
EACH_STEP = Evidence()
OCCURRENCES = Evidence(recent=4, returned=4, reference=(8, 18), spreads=6.0, outliers=0)
# Number of blocks without an occurrence after which a change of the occurrences has ended, as a multiple of the usual
# number of blocks between two occurrences.
ABSENT = 5
# Names of actions outside of the steps. Their time does not count for the step time.
VALIDATION, CHECKPOINT = "validation", "checkpoint"
OUTSIDE = (VALIDATION, CHECKPOINT)

# Parts of a step. ``compute``: forward, backward and update without waits. ``data``: waiting for the loader. ``rest``:
# between the steps, such as loggers. ``waited``: waiting for other ranks or servers.
Part = Literal["compute", "data", "rest", "waited"]
PARTS = ("step", *get_args(Part))


@dataclass(frozen=True)
class StepBlock:
    """Figures of a rank for some steps in a row.

    Attributes:
        number: Number of the block, from 0. All ranks count alike.
        first: Number of the first step.
        steps: Number of steps.
        step: Usual seconds of a step, without validation and checkpoints.
        compute: Usual seconds of a step in which the rank computes.
        data: Usual seconds of a step in which the rank waits for its data loader.
        rest: Usual seconds of a step in which the rank does something else; 0 if this is not known.
        waited: Usual seconds of a step in which the rank waits for other ranks or servers.
        occurrences: Number and usual seconds of the long runs of validation, checkpoints and callbacks. Keys are their
            names.
    """

    number: int
    first: int
    steps: int
    step: float
    compute: float
    data: float
    rest: float
    waited: float
    occurrences: Mapping[str, tuple[int, float]]

    def beside(self, name: str) -> float:
        """Return the mean seconds of a callback in a step."""
        count, seconds = self.occurrences.get(name, (0, 0.0))
        return count * seconds / self.steps


@dataclass(frozen=True)
class SlowChange:
    """A lasting change of the time of a step, or of an action that does not run in every step.

    Attributes:
        part: What takes longer: a part of a step, or ``beside`` for validation, checkpoints and callbacks.
        name: Name of the action if the part is ``beside``; otherwise empty.
        ranks: Ranks on which the part takes longer, first the rank with the largest growth.
        world: Number of ranks.
        first: Number of the first step with the change.
        before: Usual seconds of the part before the change, on the first of the ranks.
        after: Usual seconds of the part since the change, on the first of the ranks.
        step_before: Usual seconds of a step before the change.
        step_after: Usual seconds of a step since the change.
        in_each_step: Whether the part belongs to every step; otherwise it is an action that runs from time to time.
    """

    part: Part | Literal["beside"]
    name: str
    ranks: tuple[int, ...]
    world: int
    first: int
    before: float
    after: float
    step_before: float
    step_after: float
    in_each_step: bool = True


@dataclass(frozen=True)
class StepsEnded:
    """The end of a change.

    Attributes:
        change: The change.
        first: Number of the first step after the change.
        now: Usual seconds of a step now, or of the action.
    """

    change: SlowChange
    first: int
    now: float


class SlowSteps:
    """State machine that finds lasting changes in the blocks of all ranks, which make each step together."""

    def __init__(self) -> None:
        self._steps = Level(EACH_STEP)
        self._usual = 0.0  # Usual seconds of a step so far.
        self._blocks: deque[Sequence[StepBlock]] = deque(maxlen=self._steps.values.maxlen)
        self._short: list[Sequence[StepBlock]] = []  # Blocks that are too short.
        self._changes: list[SlowChange] = []
        self._actions: dict[str, _Occurrences] = {}
        self._loaders: list[_Loader] = []

    def add(self, blocks: Sequence[StepBlock]) -> Iterator[SlowChange | StepsEnded]:
        """Add the blocks of all ranks with one number, and yield the changes that they show.

        Args:
            blocks: One block of each rank, in rank order.
        """
        self._short.append(blocks)
        if sum(each[0].step * each[0].steps for each in self._short) >= SHORTEST:
            joined = [join(of_rank) for of_rank in zip(*self._short, strict=True)]
            self._short.clear()
            yield from self._add(joined)

    def _add(self, blocks: Sequence[StepBlock]) -> Iterator[SlowChange | StepsEnded]:
        value = statistics.median_low([block.step for block in blocks])
        self._blocks.append(blocks)
        self._usual = usual = self._steps.usual or self._usual
        event = self._steps.add(value, max(LEAST * usual, LEAST_SECONDS))
        if event is LevelEvent.RETURN:
            first = self._blocks[-EACH_STEP.returned][0].first
            yield StepsEnded(self._changes.pop(), first, statistics.median(self._steps.values))
        elif event is LevelEvent.RISE:
            before, after = self._steps.rises[-1]
            earlier, recent = [*self._blocks][: -EACH_STEP.recent], [*self._blocks][-EACH_STEP.recent :]
            change = _change_of_steps(earlier, recent, before, after)
            self._changes.append(change)
            yield change
        if event is not None:
            self._blocks = deque([*self._blocks][-EACH_STEP.recent :], self._blocks.maxlen)
        self._loaders = self._loaders or [_Loader(rank) for rank in range(len(blocks))]
        for loader in self._loaders:
            yield from loader.add(blocks, usual, is_slow=bool(self._changes))
        known = {change.name for change in self._changes}
        names = {name for block in blocks for name in block.occurrences} | self._actions.keys()
        for name in sorted(names - known):
            yield from self._actions.setdefault(name, _Occurrences(name)).add(blocks, usual)


class _Loader:
    """Data loader of a rank whose samples other ranks take over if it becomes slow, as with ``ddp_balanced``.

    Then the rank waits longer for its loader and computes less, and a step may take about as long as before.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._level = Level(EACH_STEP)
        self._blocks: deque[StepBlock] = deque(maxlen=self._level.values.maxlen)
        self._computed = self._step = 0.0  # Usual seconds of computing and of a step before the last rise.
        self._first = 0  # Number of the first step of this rise.
        self._change: SlowChange | None = None

    def add(self, blocks: Sequence[StepBlock], usual: float, is_slow: bool) -> Iterator[SlowChange | StepsEnded]:
        """Add the blocks of all ranks, and yield the changes that they show; see `SlowSteps.add`.

        Args:
            blocks: One block of each rank, in rank order.
            usual: Usual seconds of a step.
            is_slow: Whether a change of the step time is reported, which names the cause.
        """
        self._blocks.append(blocks[self._rank])
        earlier, recent = [*self._blocks][: -EACH_STEP.recent], [*self._blocks][-EACH_STEP.recent :]
        event = self._level.add(blocks[self._rank].data, max(LEAST * usual, LEAST_SECONDS))
        if event is LevelEvent.RISE:
            self._computed = statistics.median(block.compute for block in earlier)
            self._step, self._first = usual, recent[0].first
        elif event is LevelEvent.RETURN and self._change is not None:
            change, self._change = self._change, None
            yield StepsEnded(change, recent[0].first, statistics.median(block.step for block in recent))
        if self._level.rises and self._change is None and not is_slow:
            before, after = self._level.rises[-1]
            computed = statistics.median(block.compute for block in recent)
            if self._computed - computed > (after - before) / 2:
                step = statistics.median(block.step for block in recent)
                ranks = (self._rank,)
                self._change = SlowChange("data", "", ranks, len(blocks), self._first, before, after, self._step, step)
                yield self._change


class _Occurrences:
    """Occurrences of an action that does not run in every step.

    Args:
        name: Name of the action.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._level = Level(OCCURRENCES)
        self._numbers: deque[tuple[int, int]] = deque(maxlen=OCCURRENCES.recent + 1)  # Of blocks and first steps.
        self._changes: list[SlowChange] = []

    def add(self, blocks: Sequence[StepBlock], usual: float) -> Iterator[SlowChange | StepsEnded]:
        """Add the blocks of all ranks, and yield the changes that they show; see `SlowSteps.add`."""
        number, first = blocks[0].number, blocks[0].first
        times = [block.occurrences.get(self._name, (0, 0.0)) for block in blocks]
        count, seconds = max(times, key=lambda each: each[1])
        if not count:
            if self._changes and self._gap and number - self._numbers[-1][0] > ABSENT * self._gap:
                change = self._changes.pop()
                self._level = Level(OCCURRENCES)
                yield StepsEnded(change, first, 0.0)
            return
        if count * STEPS > DROPPED * blocks[0].steps and self._name not in OUTSIDE:
            return  # Its time is a part of every step.
        self._numbers.append((number, first))
        ranks = [rank for rank, (_, each) in enumerate(times) if each > seconds / 2]
        ranks.sort(key=lambda rank: -times[rank][1])
        event = self._level.add(seconds, max(LEAST * usual * blocks[0].steps * self._gap, self._level.usual))
        if event is LevelEvent.RISE:
            before, after = self._level.rises[-1]
            at = self._numbers[-OCCURRENCES.recent][1]
            change = SlowChange(
                "beside", self._name, tuple(ranks), len(blocks), at, before, after, usual, usual, in_each_step=False
            )
            self._changes.append(change)
            yield change
        elif event is LevelEvent.RETURN:
            at = self._numbers[-OCCURRENCES.returned][1]
            yield StepsEnded(self._changes.pop(), at, statistics.median(self._level.values))

    @property
    def _gap(self) -> float:
        """Mean number of blocks between the last occurrences."""
        numbers = [number for number, _ in self._numbers]
        return (numbers[-1] - numbers[0]) / (len(numbers) - 1) if len(numbers) > 1 else 0.0


def join(blocks: Sequence[StepBlock]) -> StepBlock:
    """Return one block for the steps of consecutive blocks of a rank."""
    if len(blocks) == 1:
        return blocks[0]
    names = {name for block in blocks for name in block.occurrences}
    each = {name: [block.occurrences[name] for block in blocks if name in block.occurrences] for name in names}
    occurrences = {
        name: (sum(count for count, _ in pairs), statistics.median(seconds for _, seconds in pairs))
        for name, pairs in each.items()
    }
    parts = {part: statistics.median(getattr(block, part) for block in blocks) for part in PARTS}
    steps = sum(block.steps for block in blocks)
    return StepBlock(blocks[0].number, blocks[0].first, steps, **parts, occurrences=occurrences)


def usual_of(seconds: Sequence[float]) -> float:
    """Return the usual one of the times of a block's steps: their mean without the longest times."""
    kept = sorted(seconds)[: max(1, len(seconds) - DROPPED)]
    return statistics.fmean(kept)


def _change_of_steps(
    earlier: Sequence[Sequence[StepBlock]], recent: Sequence[Sequence[StepBlock]], before: float, after: float
) -> SlowChange:
    """Return the change of a step's time with its cause: the part of a rank's own time that has grown most.

    If no rank's own time has grown by half of the step's growth, messages between the ranks take longer.

    Args:
        earlier: Blocks of all ranks before the change.
        recent: Blocks of all ranks since the change.
        before: Seconds of a step before the change.
        after: Seconds of a step since the change.
    """
    world, first = len(recent[0]), recent[0][0].first

    def usual(blocks: Sequence[Sequence[StepBlock]], rank: int, part: str) -> float:
        in_part = part in StepBlock.__annotations__
        return statistics.median(
            getattr(each[rank], part) if in_part else each[rank].beside(part.removeprefix("beside ")) for each in blocks
        )

    callbacks = {name for each in recent for block in each for name in block.occurrences if name not in OUTSIDE}
    growths = {
        (part, rank): usual(recent, rank, part) - usual(earlier, rank, part)
        for part in ("compute", "data", "rest", *sorted(f"beside {name}" for name in callbacks))
        for rank in range(world)
    }
    part, rank = max(growths, key=lambda key: growths[key])
    waits = [usual(recent, rank, "waited") - usual(earlier, rank, "waited") for rank in range(world)]
    if growths[part, rank] < (after - before) / 2 and max(waits) > growths[part, rank]:
        part, rank = "waited", waits.index(max(waits))
        others = [other for other in range(world) if other != rank]
    else:
        others = [other for other in range(world) if other != rank and growths[part, other] > growths[part, rank] / 2]
    kind, _, name = part.partition(" ")
    return SlowChange(
        kind,  # type: ignore[arg-type]
        name,
        (rank, *others),
        world,
        first,
        usual(earlier, rank, part),
        usual(recent, rank, part),
        before,
        after,
    )
