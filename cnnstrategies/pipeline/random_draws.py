"""Random numbers that a divided network draws: seeds of microbatches, and the generators' states after a call."""

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch

from cnnstrategies.pipeline.transport import Pending, Transport
from cnnstrategies.runtime.generator_states import GeneratorStates, generator_of

CONTENT = "the states of the random number generators"  # for error messages


def seed_all(seed: int, device: torch.device) -> None:
    """Set all generators to states that follow from a seed of 64 bits."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    generator = generator_of(device)
    if generator is not None:
        generator.manual_seed(seed)


@lru_cache(maxsize=256)
def _first_numbers(seed: int) -> tuple[float, float]:
    """Return the first numbers that Python's and NumPy's generators draw after a seed. The generators change.

    As long as a program draws nothing, each step has the seeds of the step before.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return random.random(), np.random.random()


class SeededGenerators:
    """Generators that have been seeded, and that can tell which of them has been drawn from since.

    Args:
        seed: Seed of 64 bits.
        device: Device of this rank.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        # The next numbers show whether somebody has drawn. Reading the states of the generators takes longer.
        self._next = _first_numbers(seed)
        seed_all(seed, device)
        generator = generator_of(device)
        self._generators = {"cpu": torch.default_generator} | ({} if generator is None else {"device": generator})
        self._states = {name: generator.get_state() for name, generator in self._generators.items()}

    def drawn(self) -> set[str]:
        """Return the names of the generators that have been drawn from. Call this once, because it draws as well."""
        changed = {"python": random.random() != self._next[0], "numpy": np.random.random() != self._next[1]}
        for name, state in self._states.items():
            changed[name] = not torch.equal(state, self._generators[name].get_state())
        return {name for name, has_changed in changed.items() if has_changed}


def advance(names: Iterable[str], device: torch.device) -> None:
    """Draw a number from each of the named generators.

    After a call in which a stage has drawn, all ranks do this, so that their generators have equal states, and the next
    call has other seeds.

    Args:
        names: Names as in :class:`GeneratorStates`.
        device: Device of this rank.
    """
    names = set(names)
    if "cpu" in names:
        torch.rand(())
    if "python" in names:
        random.random()
    if "numpy" in names:
        np.random.random()
    generator = generator_of(device)
    if "device" in names and generator is not None:
        torch.rand((), device=device)


class PassedStates:
    """The generators' states that stages pass on to each other, if they draw in order, as one device does.

    Args:
        transport: Connections of this rank.
        in_order: Whether the stages draw in order.
        step: 1 if each stage passes the states on to the next one, and -1 for the previous one.

    Attributes:
        in_order: Whether the stages draw in order.
        drawn: Names of the generators from which this rank's microbatches have drawn, as in `GeneratorStates`.
        after: In the stage that draws last, the generators' states after its draws, if the stages draw in order.
    """

    def __init__(self, transport: Transport, in_order: bool, step: int) -> None:
        self.in_order, self._step = in_order, step
        self.drawn: set[str] = set()
        self.after: GeneratorStates | None = None
        self._transport, self._device = transport, transport.device
        self._stage, self._last = transport.place.stage, transport.placement.stages - 1
        self._before = GeneratorStates.current(self._device)
        self._sends: list[Pending] = []

    def _start(self, microbatch: int) -> GeneratorStates:
        """Set the generators to the states with which this stage begins, and return the states."""
        source = self._stage - self._step
        states = self._before
        if 0 <= source <= self._last:
            states = self._transport.receive_object(self._transport.placement.rank_of(source, microbatch), CONTENT)
        states.restore(self._device)
        return states

    def pass_on(self, microbatch: int) -> None:
        """Pass the generators' states on, or keep them in the stage that draws last, if the stages draw in order.

        Call this after the microbatch's work, and after the message with its results or gradients. The receiver needs
        the header that this method may send.
        """
        if not self.in_order:
            return
        states, target = GeneratorStates.current(self._device), self._stage + self._step
        if 0 <= target <= self._last:
            rank = self._transport.placement.rank_of(target, microbatch)
            self._sends += self._transport.send_object(states, rank, CONTENT)
        else:
            self.after = states

    def wait(self) -> None:
        """Wait until the other stage has received the states."""
        for send in self._sends:
            send.wait()


class Draws(PassedStates):
    """The random draws of one rank in the forwards of one call of a divided network.

    Each microbatch of each stage draws from a seed of its own. The seed follows from the generators' states at the
    call, which are equal on all ranks, from the stage and from the microbatch. So no two microbatches get equal
    numbers, and it does not matter which rank runs a microbatch. The numbers are not those that one device would draw
    for the whole batch.

    If the batch is one microbatch, the stages can draw in order instead, and then draw the numbers that one device
    would draw.

    Args:
        transport: Connections of this rank.
        in_order: Whether the stages draw in order.
        salt: Number that also enters the seeds.
        known: Names of the generators from which a stage has drawn in earlier calls, as all ranks know.
    """

    def __init__(self, transport: Transport, in_order: bool, salt: int, known: Collection[str] = ()) -> None:
        super().__init__(transport, in_order, step=1)
        self._seed = b"" if in_order else self._before.digest(known) + f"{self._stage}:{salt}".encode()
        self._starts: dict[int, GeneratorStates] = {}  # By microbatch, if the stages draw in order.
        self._drawing: set[int] = set()  # Microbatches whose forwards have drawn.

    @contextmanager
    def microbatch(self, microbatch: int) -> Iterator[None]:
        """Return a context for the first forward of a microbatch."""
        if self.in_order:
            start = self._starts[microbatch] = self._start(microbatch)
            yield
            drawn = start.changed(GeneratorStates.current(self._device))
        else:
            generators = SeededGenerators(_seed_of(self._seed, microbatch), self._device)
            yield
            drawn = generators.drawn()
        self.drawn |= drawn
        if drawn:
            self._drawing.add(microbatch)

    @contextmanager
    def again(self, microbatch: int) -> Iterator[None]:
        """Return a context in which a forward draws the numbers that the microbatch's first forward has drawn.

        Afterwards the generators continue where they were.
        """
        if microbatch not in self._drawing:
            yield
            return
        present = GeneratorStates.current(self._device)
        if self.in_order:
            self._starts[microbatch].restore(self._device)
        else:
            seed_all(_seed_of(self._seed, microbatch), self._device)
        try:
            yield
        finally:
            present.restore(self._device)

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """Return a context in which the generators have the states at the call."""
        present = GeneratorStates.current(self._device)
        self._before.restore(self._device)
        try:
            yield
        finally:
            present.restore(self._device)

    def finish(self) -> None:
        """Restore the states at the call."""
        self._before.restore(self._device)


class BackwardDraws(PassedStates):
    """The random draws of one rank in the backwards of one call: in hooks, or in autograd functions of the user.

    If the batch is one microbatch, the stages draw in order, from the last to the first, and so draw the numbers that
    one device would draw. Otherwise each microbatch of each stage draws from a seed of its own, once a backward of this
    form has drawn.

    Args:
        transport: Connections of this rank.
        is_one_microbatch: Whether the batch is one microbatch.
        has_drawn: Whether backwards of this form have drawn; None before the first one.
    """

    def __init__(self, transport: Transport, is_one_microbatch: bool, has_drawn: bool | None) -> None:
        super().__init__(transport, is_one_microbatch and has_drawn is not False, step=-1)
        self._is_seeded = not is_one_microbatch and bool(has_drawn)

    @contextmanager
    def microbatch(self, microbatch: int) -> Iterator[None]:
        """Return a context for the backward of a microbatch."""
        if not self.in_order and not self._is_seeded:
            yield
            return
        if self.in_order:
            start = self._start(microbatch)
        else:
            seed = self._before.digest(("python", "numpy")) + f"backward:{self._stage}".encode()
            seed_all(_seed_of(seed, microbatch), self._device)
            start = GeneratorStates.current(self._device)
        yield
        self.drawn |= start.changed(GeneratorStates.current(self._device))

    def finish(self) -> None:
        """Restore the states at the start of the backwards, which are equal on all ranks."""
        is_watched = self.in_order or self._is_seeded
        if not is_watched:
            self.drawn = self._before.changed(GeneratorStates.current(self._device))
        if self.drawn or is_watched:
            self._before.restore(self._device)
        self.wait()


def _seed_of(seed: bytes, microbatch: int) -> int:
    """Return the seed of a microbatch, of 63 bits."""
    digest = hashlib.blake2b(seed + f":{microbatch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
