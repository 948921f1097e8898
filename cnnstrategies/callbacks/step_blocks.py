"""Blocks of measured steps of a rank, and their messages to rank 0."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cnnstrategies.callbacks.host_clock import COMPUTE
from cnnstrategies.callbacks.slow_changes import LONG, OUTSIDE, PARTS, STEPS, StepBlock, usual_of
from cnnstrategies.recording.actions import CALLBACK
from cnnstrategies.recording.clock import DATA, OTHER, WAITED, PartClock
from cnnstrategies.runtime.records import parsed, printable
from cnnstrategies.runtime.stopwatch import Measured

LONGEST, LARGEST = 100, 2.0**53  # Most characters of an action's name, and first number that is too large.
MOST_NAMES = 50  # Largest number of actions in a block.


class StepBlocks:
    """Blocks of a rank's steps.

    Args:
        clock: Clock of the host.
        take: Function that returns the device's times of the steps that have ended since its last call; None if the
            host's times are those of the device.
    """

    def __init__(self, clock: PartClock, take: Callable[[], list[Measured]] | None) -> None:
        self._clock = clock
        self._take = take
        self._before: dict[str, float] = {}
        self._number = 0
        self._first = 0
        self._usual = float("inf")  # Usual seconds of a step of the last block.
        self._steps: dict[str, list[float]] = {name: [] for name in PARTS}
        self._long: dict[str, list[float]] = {}

    def discard(self) -> None:
        """Discard the time since the last step."""
        self._clock.read()
        self._before = dict(self._clock.seconds)

    def end_step(self, step: int) -> StepBlock | None:
        """Count the time since the last step as a step. Return a block if it is complete.

        Args:
            step: Number of the step.
        """
        before = self._before
        self.discard()
        times = {name: seconds - before.get(name, 0.0) for name, seconds in self._before.items()}
        if not self._steps["step"]:
            self._first = step
        self._steps["step"].append(sum(times.values()) - sum(times.get(name, 0.0) for name in OUTSIDE))
        self._steps[DATA].append(times.get(DATA, 0.0))
        if self._take is None:
            for name, part in (("compute", COMPUTE), ("rest", OTHER), ("waited", WAITED)):
                self._steps[name].append(times.get(part, 0.0))
        else:
            beside = sum(seconds for name, seconds in times.items() if name.startswith(CALLBACK))
            for measured in self._take():
                self._steps[COMPUTE].append(max(0.0, measured.own - beside))
                self._steps[WAITED].append(measured.waited)
        for name, seconds in times.items():
            if seconds > LONG * self._usual and (name in OUTSIDE or name.startswith(CALLBACK)):
                self._long.setdefault(printable(name.removeprefix(CALLBACK), LONGEST), []).append(seconds)
        return self._block() if len(self._steps["step"]) == STEPS else None

    def _block(self) -> StepBlock:
        usual = {name: usual_of(times) if times else 0.0 for name, times in self._steps.items()}
        names = sorted(self._long)[:MOST_NAMES]
        occurrences = {name: (len(self._long[name]), statistics.median(self._long[name])) for name in names}
        block = StepBlock(self._number, self._first, STEPS, **usual, occurrences=occurrences)
        self._number += 1
        self._usual = usual["step"]
        self._long.clear()
        for times in self._steps.values():
            times.clear()
        return block


def encode(blocks: Sequence[StepBlock]) -> str:
    """Return blocks as JSON."""
    return json.dumps([asdict(block) for block in blocks])


def decode(content: bytes) -> list[StepBlock]:
    """Return the blocks from the JSON that another rank has written.

    Raises:
        ValueError: The content is not the JSON of blocks.
    """
    values = parsed(content)
    if not isinstance(values, list):
        raise ValueError("the JSON is not a list of blocks")
    return [_checked(value) for value in values]


def _checked(value: Any) -> StepBlock:
    if not isinstance(value, dict) or value.keys() != StepBlock.__annotations__.keys():
        raise ValueError("the values do not have the names of the fields of a block")
    occurrences: Mapping[Any, Any] = value.pop("occurrences")
    if not isinstance(occurrences, dict) or len(occurrences) > MOST_NAMES:
        raise ValueError("occurrences are not a dictionary, or too many")
    pairs = {name: tuple(pair) if isinstance(pair, list) else () for name, pair in occurrences.items()}
    if any(len(name) > LONGEST or not name.isprintable() or len(pair) != 2 for name, pair in pairs.items()):
        raise ValueError("an occurrence is not a pair, or has a long name")
    numbers = [value["number"], value["first"], value["steps"], *(pair[0] for pair in pairs.values())]
    seconds = [*(value[name] for name in PARTS), *(pair[1] for pair in pairs.values())]
    if any(type(number) is not int for number in numbers) or any(type(each) not in (int, float) for each in seconds):
        raise ValueError("a field has another type")
    if not all(0 <= number < LARGEST for number in (*numbers, *seconds)) or not value["steps"]:
        raise ValueError("a number is out of range")
    return StepBlock(**value, occurrences=pairs)
