"""What workers have of a server's slices, where they are sent the compressed changes of each common step.

A change is compressed from the difference of the values to what workers have, so what one leaves out is in the next:
error feedback on the way back (Tang et al., "DoubleSqueeze", ICML 2019). It adds up to what the workers have only where
they have what it was made from. So what workers have goes wherever the values go, to copies and to snapshots, and has a
lineage: another one where values jump, and where a server goes on from a snapshot or from first values, since the steps
that workers have seen may be made anew there, of others' pushes.

Where workers choose while they train, they say with each step whether they will want its change. If nobody does they
get the values, rounded, and these are what the next change is made from.
"""

import zlib
from collections.abc import Mapping
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
        self._rounded: set[int] = set()  # slices of which workers have the values
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
        self._rounded.discard(key)

    def jump(self, key: int, version: int, to: int) -> None:
        """A slice's version goes up without an update: what workers have of that version is not what is here."""
        lineage = zlib.crc32(f"{version} {to}".encode(), self.lineages[key])
        self.begin(key)
        self.lineages[key] = lineage

    def take_over(self, key: int, known: Tensor, lineage: int) -> None:
        """Go on where another server, or a snapshot, was."""
        self.known[key].copy_(known.view(self.known[key].shape))
        self.lineages[key] = lineage
        self._forget(key)

    def make(self, key: int, wanted: bool = True) -> memoryview:
        """The change that brings workers nearer to a slice's values, which have just had an update.

        Args:
            key: The slice.
            wanted: Whether a worker wants it; else it is empty.
        """
        if not wanted and self._whole is not None:
            self.apply(key, memoryview(b""), None)
            return memoryview(b"")
        difference = (self._values[key] - self.known[key]).view(-1)
        payload = compress(difference.float(), self.encoding, self._ratio)
        self.apply(key, payload, self.decoded(key, payload))
        return payload

    def decoded(self, key: int, payload: memoryview) -> Tensor | None:
        """A change as numbers; None if nobody has wanted it.

        Raises:
            InvalidMessageError: It does not fit the slice.
        """
        if not payload and self._whole is not None:
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
        else:
            assert self._whole is not None
            self.known[key].copy_(rounded(self._values[key], self._whole))
            self._rounded.add(key)

    def answer(self, key: int, mark: float, next_version: bool) -> tuple[Any, Encoding]:
        """What a worker is sent: the last change, or all where it lacks what that was made from.

        Args:
            key: The slice.
            mark: Of what the worker has; 0 for nothing.
            next_version: Whether the slice's version comes next after the one that it has.
        """
        last = self._last.get(key)
        if last is not None and next_version and mark == self.mark(key):
            return last, self.encoding
        return bytes(as_bytes(self.known[key])), Encoding.DENSE  # The original changes, maybe before it has been sent.

    def mark(self, key: int) -> float:
        """A slice's lineage as the weight of a message: 0 stands for none, and `ALONE` for values of none."""
        return float(self.lineages[key] + 2)

    def mark_of_values(self, key: int, encoding: Encoding) -> float:
        """The same for a slice's values that are sent in an encoding."""
        return self.mark(key) if key in self._rounded and encoding == self._whole else ALONE

    def are_asked_for(self, encoding: Encoding) -> bool:
        """Whether a pull asks for changes; `NOTHING` stands for what the specification says."""
        return encoding in CHANGES or (self._whole is None and encoding == Encoding.NOTHING)
