"""When a worker of mode ``local`` takes part in an outer step, and with which parameters.

Streaming DiLoCo (Douillard et al. 2025): fragments of the parameters are exchanged in turn, spread over `sync_every`
own steps, so that the link has to carry less at a time.
"""

from collections.abc import Sequence


class OuterSteps:
    """Counts a worker's own steps.

    Args:
        every: Own steps in which each fragment is exchanged once.
        fragments: Each one's parameters.
        overlap: Own steps that are made while an exchange is on its way.
        made: What the others have counted, as :attr:`made` tells it, for one that comes later.

    Attributes:
        fragments: Each one's parameters.
        overlap: Own steps that are made while an exchange is on its way.
        made: Own steps since the first fragment's turn began, then those since each fragment was last exchanged.
    """

    def __init__(
        self,
        every: int,
        fragments: Sequence[Sequence[int]],
        overlap: int = 0,
        made: Sequence[int] = (),
    ) -> None:
        self.fragments = fragments
        self.overlap = overlap
        self.made = list(made) or [0] * (1 + len(fragments))
        self._every = every
        self._samples = [0] * len(fragments)

    def stepped(self, samples: int) -> int | None:
        """An own step was made.

        Args:
            samples: On which it was made.

        Returns:
            The fragment whose turn it is.
        """
        self.made = [count + 1 for count in self.made]
        self._samples = [count + samples for count in self._samples]
        step, count = self.made[0], len(self.fragments)
        before, now = ((one * count) // self._every for one in (step - 1, step))
        if step >= self._every:
            self.made[0] = 0
        return now - 1 if now > before else None

    def left(self) -> list[int]:
        """The fragments that own steps have changed since they were last exchanged."""
        return [number for number, count in enumerate(self.made[1:]) if count]

    def exchanged(self, fragments: Sequence[int]) -> int:
        """Some fragments are exchanged; on how many samples their own steps were made."""
        samples = max(self._samples[number] for number in fragments)
        for number in fragments:
            self._samples[number] = self.made[1 + number] = 0
        if len(fragments) == len(self.fragments):
            self.made[0] = 0
        return samples
