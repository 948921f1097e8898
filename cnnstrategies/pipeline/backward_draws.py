"""Random numbers that backwards of a divided network draw, in hooks of modules or in autograd functions of the user."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from cnnstrategies.pipeline.random_draws import CONTENT, GeneratorStates, seed_all
from cnnstrategies.pipeline.transport import Pending, Transport


class BackwardDraws:
    """The random draws of one rank in the backwards of one call of a divided network.

    If the batch is one microbatch, the stages draw in order, from the last to the first, and so draw the numbers that
    one device would draw. Otherwise each microbatch of each stage draws from a seed of its own, once a backward of this
    form has drawn.

    Args:
        transport: Connections of this rank.
        is_one_microbatch: Whether the batch is one microbatch.
        has_drawn: Whether backwards of this form have drawn; None before the first one.

    Attributes:
        in_order: Whether the stages draw in order.
        drawn: Names of the generators from which this rank's backwards have drawn, as in `GeneratorStates`, after
            :meth:`finish`.
        after: In the first stage, the generators' states after the backward, if the stages draw in order.
    """

    def __init__(self, transport: Transport, is_one_microbatch: bool, has_drawn: bool | None) -> None:
        self.in_order = is_one_microbatch and has_drawn is not False
        self.drawn: set[str] = set()
        self.after: GeneratorStates | None = None
        self._is_seeded = not is_one_microbatch and bool(has_drawn)
        self._transport, self._stage = transport, transport.place.stage
        self._before = GeneratorStates.current(transport.device)
        self._sends: list[Pending] = []

    @contextmanager
    def microbatch(self, microbatch: int) -> Iterator[None]:
        """Return a context for the backward of a microbatch."""
        device, placement = self._transport.device, self._transport.placement
        start = self._before
        if self.in_order and self._stage < placement.stages - 1:
            start = self._transport.receive_object(placement.rank_of(self._stage + 1, microbatch), CONTENT)
            start.restore(device)
        elif self._is_seeded:
            text = self._before.digest(("python", "numpy")) + f"backward:{self._stage}:{microbatch}".encode()
            seed_all(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1, device)
            start = GeneratorStates.current(device)
        yield
        self.drawn |= start.changed(GeneratorStates.current(device)) if self.in_order or self._is_seeded else set()

    def pass_on(self, microbatch: int) -> None:
        """Send the generators' states to the previous stage, or keep them in stage 0, if the stages draw in order.

        Call this after the backward of the microbatch and after :meth:`Channels.send_backward`.
        """
        if not self.in_order:
            return
        states = GeneratorStates.current(self._transport.device)
        if self._stage == 0:
            self.after = states
        else:
            target = self._transport.placement.rank_of(self._stage - 1, microbatch)
            self._sends += self._transport.send_object(states, target, CONTENT)

    def finish(self) -> None:
        """Restore the states at the start of the backwards, which are equal on all ranks."""
        device = self._transport.device
        if not self.in_order and not self._is_seeded:
            self.drawn = self._before.changed(GeneratorStates.current(device))
        if self.drawn or self.in_order or self._is_seeded:
            self._before.restore(device)
        for send in self._sends:
            send.wait()
