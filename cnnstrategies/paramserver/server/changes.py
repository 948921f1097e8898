"""What workers have of a server's slices, where they are sent the compressed changes of each common step.

A change is compressed from the difference of the values to what workers have, so what one leaves out is in the next:
error feedback on the way back (Tang et al., "DoubleSqueeze", ICML 2019). It adds up to what the workers have only where
they have what it was made from. So what workers have goes wherever the values go, to copies, and has a
lineage: another one where a server goes on from first values, since the steps that workers have seen may be made anew
there, of others' pushes.

Where workers choose while they train, they say with each step how they will pull what comes of it. If nobody wants
changes they get the values, rounded, and these are what the next change is made from. Where all want the exact values
what workers have is not kept up: the first that wants a change then gets all.
"""

import zlib
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from cnnstrategies.paramserver.compression import CHANGES, ENCODINGS, as_bytes, check_length, compress, decode, rounded
from cnnstrategies.paramserver.messages import ALONE, Encoding
from cnnstrategies.paramserver.specification import Specification


def encodings(specification: Specification) -> tuple[Encoding, Encoding | None]:
    """That of changes, and that in which workers pull values where they do not want them; None if they always do."""
    if specification.pull_compression == "auto":
        return Encoding.ONEBIT, ENCODINGS[specification.half]
    return ENCODINGS[specification.pull_compression], None


class Changes:
    """What the workers have of some slices, and the last change of each.

    Args:
        encoding: Of the changes.
        ratio: Share of the elements that ``topk`` sends; at least one.
        values: The slices' values.
        whole: In which workers pull values where they do not want changes; None if they always do.

    Attributes:
        encoding: Of the changes.
        known: What workers have of each slice that have had all changes up to its version.
        lineages: Tells values apart that have the same version and another history.
    """

    def __init__(
        self, encoding: Encoding, ratio: float, values: Mapping[int, Tensor], whole: Encoding | None = None
    ) -> None:
        self.encoding = encoding
        self.known = {key: value.clone() for key, value in values.items()}
        self.lineages = dict.fromkeys(values, 0)
        self._ratio = ratio
        self._values = values
        self._whole = whole
        self._last: dict[int, memoryview] = {}
        self._rounded: dict[int, Tensor] = {}  # values that workers have, in that encoding
        self._behind: set[int] = set()  # slices of which workers have the exact values, and `known` are older ones
        self._origin = 0

    def begin_with(self, since: int) -> None:
        """Values that are here, and first values that come, are those of a server that came with a view."""
        self._origin = since
        self.lineages = {
            key: zlib.crc32(str(since).encode(), lineage) if lineage else since
            for key, lineage in self.lineages.items()
        }

    def begin(self, key: int) -> None:
        """Workers get a slice's values as they are."""
        self.known[key].copy_(self._values[key])
        self.lineages[key] = self._origin
        self._forget(key)

    def _forget(self, key: int) -> None:
        self._last.pop(key, None)
        self._rounded.pop(key, None)
        self._behind.discard(key)

    @property
    def behind(self) -> list[int]:
        """The slices of which workers have other values than :attr:`known`, which nobody has any more."""
        return sorted(self._behind)

    def take_over(self, key: int, known: Tensor, lineage: int, behind: bool) -> None:
        """Go on where another server was."""
        self.known[key].copy_(known.view(self.known[key].shape))
        self.lineages[key] = lineage
        self._forget(key)
        if behind:
            self._behind.add(key)

    def make(self, key: int, pulled: Collection[Encoding] = ()) -> memoryview:
        """The change that brings workers nearer to a slice's values, which have just had an update.

        Args:
            key: The slice.
            pulled: How workers will pull what comes of that, where they may choose.

        Returns:
            What a copy must be told: the change, or the encoding of the values that workers will have, or nothing.
        """
        wanted = self._whole is None or self.encoding in pulled
        if wanted and key not in self._behind:
            difference = (self._values[key] - self.known[key]).view(-1)
            payload = compress(difference.float(), self.encoding, self._ratio)
        elif wanted:
            payload = memoryview(bytes([Encoding.DENSE]))
        else:
            payload = memoryview(bytes(one for one in pulled if one == self._whole))
        self.apply(key, payload, self.decoded(key, payload))
        return payload

    def decoded(self, key: int, payload: memoryview) -> Tensor | None:
        """A change as numbers; None if nobody has wanted one."""
        if self._whole is not None and payload in (b"", bytes([Encoding.DENSE]), bytes([self._whole])):
            return None
        known = self.known[key]
        check_length(len(payload), self.encoding, known.numel(), known.dtype)
        return decode(payload, self.encoding, known.numel(), known.dtype)

    def apply(self, key: int, payload: memoryview, change: Tensor | None) -> None:
        """Workers will have a change, or the values, which have had the update."""
        self._forget(key)
        if change is not None:
            self.known[key].view(-1).add_(change)
            self._last[key] = payload
        elif payload:
            values = rounded(self._values[key], Encoding(payload[0]))
            self.known[key].copy_(values)
            if payload[0] == self._whole:
                self._rounded[key] = values
        else:
            self._behind.add(key)

    def answer(
        self, key: int, mark: float, next_version: bool, asked: Encoding = Encoding.NOTHING
    ) -> tuple[Any, Encoding, float] | None:
        """What a worker is sent: the last change, or all where it lacks what that was made from.

        Who wants values gets the change, too, if it can: in a step in which others want it all have the same.

        Args:
            key: The slice.
            mark: Of what the worker has; 0 for nothing.
            next_version: Whether the slice's version comes next after the one that it has.
            asked: The encoding that it asks for; `NOTHING` for what the specification says.

        Returns:
            With its encoding and mark; None if it is to be sent the values as it asks for them.
        """
        last = self._last.get(key)
        if last is not None and next_version and mark == self.mark(key):
            return last, self.encoding, mark
        if asked not in CHANGES and not (self._whole is None and asked == Encoding.NOTHING):
            return None
        if key in self._behind:
            return bytes(as_bytes(self._values[key])), Encoding.DENSE, ALONE
        # The original changes, maybe before it has been sent.
        return bytes(as_bytes(self.known[key])), Encoding.DENSE, self.mark(key)

    def mark(self, key: int) -> float:
        """A slice's lineage as the weight of a message: 0 stands for none, and `ALONE` for values of none."""
        return float(self.lineages[key] + 2)

    def mark_of_values(self, key: int, encoding: Encoding) -> float:
        """The same for a slice's values that are sent in an encoding."""
        return ALONE if self.values(key, encoding) is None else self.mark(key)

    def values(self, key: int, encoding: Encoding) -> Tensor | None:
        """A slice's values in an encoding if that is what the next change is made from."""
        return self._rounded.get(key) if encoding == self._whole else None
