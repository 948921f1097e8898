"""The slices that a server holds: values, versions, optimizers, whose updates are in them, what workers have of them.

Workers may be sent the compressed changes of each common step. A change is compressed from the difference of the values
to what workers have, so what one leaves out is in the next: error feedback on the way back (Tang et al.,
"DoubleSqueeze", ICML 2019). It adds up to what the workers have only where they have what it was made from. So what
workers have goes wherever the values go, to copies, and has a lineage: another one where a server goes on from first
values, since the steps that workers have seen may be made anew there, of others' pushes.

Where workers choose while they train, they say with each step how they will pull what comes of it. If nobody wants
changes they get the values, rounded, and these are what the next change is made from. Where all want the exact values
what workers have is not kept up: the first that wants a change then gets all.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cnnstrategies.paramserver.compression import (
    AUTO,
    PAYLOADS,
    as_bytes,
    auto_ladder,
    check_length,
    decode,
    payload_compression,
)
from cnnstrategies.paramserver.messages import ALONE, Encoding, InvalidMessageError
from cnnstrategies.paramserver.optimizer_state import SliceState
from cnnstrategies.paramserver.optimizers import FusedOptimizer, load_optimizer
from cnnstrategies.paramserver.slicing import Slice
from cnnstrategies.paramserver.specification import Options, Specification


def encodings(specification: Specification) -> tuple[int, int | None]:
    """That of changes, and that in which workers pull values where they do not want them; None if they always do."""
    if specification.pull_compression == AUTO:
        ladder = auto_ladder(specification.itemsize, pulls=True)
        (change,) = (compression.encoding for compression in ladder if compression.lossy)
        return change, [compression.encoding for compression in ladder if not compression.lossy][-1]
    return payload_compression(specification.pull_compression).encoding, None


class Changes:
    """What the workers have of some slices, and the last change of each.

    Args:
        ratio: Share of the elements that ``topk`` sends; at least one.
        whole: In which workers pull values where they do not want changes; None if they always do.

    Attributes:
        known: What workers have of each slice that have had all changes up to its version.
        lineages: Tells values apart that have the same version and another history.
        behind: The slices of which workers have the exact values; `known` is older there, and nobody has it any more.
    """

    def __init__(self, encoding: int, ratio: float, values: Mapping[int, Tensor], whole: int | None = None) -> None:
        self.encoding = encoding
        self.known = {key: value.clone() for key, value in values.items()}
        self.lineages = dict.fromkeys(values, 0)
        self.behind: set[int] = set()
        self._ratio = ratio
        self._values = values
        self._whole = whole
        self._last: dict[int, memoryview] = {}
        self._rounded: dict[int, Any] = {}  # payloads of the values that workers have, in that encoding
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
        self.behind.discard(key)

    def take_over(self, key: int, known: Tensor, lineage: int, behind: bool) -> None:
        """Go on where another server was."""
        self.known[key].copy_(known.view(self.known[key].shape))
        self.lineages[key] = lineage
        self._forget(key)
        if behind:
            self.behind.add(key)

    def make(self, key: int, pulled: Collection[int] = ()) -> memoryview:
        """The change that brings workers nearer to a slice's values, which have just had an update.

        `pulled` is how workers will pull what comes of that, where they may choose. A copy must be told what is
        returned: the change, or the encoding of the values that workers will have, or nothing.
        """
        wanted = self._whole is None or self.encoding in pulled
        if wanted and key not in self.behind:
            difference = (self._values[key] - self.known[key]).view(-1)
            change = PAYLOADS[self.encoding].encode(difference.float(), self._ratio)
            payload = memoryview(change).cast("B")
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
            known, compression = self.known[key], PAYLOADS[payload[0]]
            encoded = compression.encode_values(self._values[key])
            values = compression.decode(memoryview(encoded).cast("B"), known.numel(), known.dtype)
            known.copy_(values.view(known.shape))
            if payload[0] == self._whole:
                self._rounded[key] = encoded
        else:
            self.behind.add(key)

    def answer(
        self, key: int, mark: float, next_version: bool, asked: int = Encoding.NOTHING
    ) -> tuple[Any, int, float] | None:
        """What a worker is sent: the last change, or all where it lacks what that was made from.

        Who wants values gets the change, too, if it can: in a step in which others want it all have the same.

        It has something with a mark, 0 for nothing, of the version before or of another, and asks for an encoding,
        `NOTHING` for what the specification says. With encoding and mark; None for the values as it asks for them.
        """
        last = self._last.get(key)
        if last is not None and next_version and mark == self.mark(key):
            return last, self.encoding, mark
        lossy = PAYLOADS[asked].lossy if asked != Encoding.NOTHING else self._whole is None
        if not lossy:
            return None
        if key in self.behind:
            return bytes(as_bytes(self._values[key])), Encoding.DENSE, ALONE
        # The original changes, maybe before it has been sent.
        return bytes(as_bytes(self.known[key])), Encoding.DENSE, self.mark(key)

    def mark(self, key: int) -> float:
        """A slice's lineage as the weight of a message: 0 stands for none, and `ALONE` for values of none."""
        return float(self.lineages[key] + 2)

    def encoded_values(self, key: int, encoding: int) -> Any:
        """Return a slice's values as a payload if the next change is made from them in this encoding; None if not."""
        return self._rounded.get(key) if encoding == self._whole else None


Who = tuple[int, int]
"""Id and incarnation of a worker."""


def check_absent(absent: int, slice_: Slice) -> None:
    """Refuse parts that a slice does not have."""
    if not 0 <= absent < (1 << len(slice_.parts)) - 1 and absent:
        raise InvalidMessageError("parts that its slice does not have")


class Store:
    """The slices of one server, as primary or backup. All memory for values is allocated here, at the start.

    Attributes:
        slices: The same by key.
        values: Each slice's values, in the same memory for ever.
        memory: The same as bytes.
        versions: How many updates each slice has had; -1 before its first value. In sync and local the number of
            steps.
        seen: For each slice the last step of each worker (id, incarnation) that was applied to it.
        decided: In common steps, who makes up the last one that is decided, as a message says it. It goes wherever the
            values go: nobody who has what came of a decision may lack it.
        changes: What workers have of the values, if they are sent changes.
    """

    def __init__(self, specification: Specification, slices: Iterable[Slice]) -> None:
        self.slices = {slice_.key: slice_ for slice_ in slices}
        self.values = {key: torch.zeros(slice_.shape, dtype=slice_.dtype) for key, slice_ in self.slices.items()}
        self.memory = {key: as_bytes(value) for key, value in self.values.items()}
        self.versions = dict.fromkeys(self.slices, -1)
        self.seen: dict[int, dict[Who, int]] = {key: {} for key in self.slices}
        self.decided: dict[str, Any] | None = None
        self.changes: Changes | None = None
        if specification.pulls_changes:
            encoding, whole = encodings(specification)
            self.changes = Changes(encoding, specification.compression_ratio, self.values, whole)
        group_of = {index: number for number, group in enumerate(specification.groups) for index in group.parameters}
        self._group = {key: group_of[slice_.parts[0].parameter] for key, slice_ in self.slices.items()}
        self._parts = {
            key: [nn.Parameter(part, part.is_floating_point()) for part in slice_.views(self.values[key])]
            for key, slice_ in self.slices.items()
        }
        kind = load_optimizer(specification.optimizer)
        self._optimizers = {
            key: FusedOptimizer(kind, parts, specification.groups[self._group[key]].options)
            for key, parts in self._parts.items()
        }

    def put(self, key: int, value: Tensor, version: int) -> None:
        """Replace a slice's values."""
        self.values[key].copy_(value.view(self.values[key].shape))
        self.versions[key] = version
        if self.changes is not None:
            self.changes.begin(key)

    def apply(self, key: int, update: Tensor | None, options: Options, absent: int = 0) -> None:
        """One update of a slice.

        By its gradient, which in mode local is the mean difference; None leaves the values alone. So are those of the
        parts that have no gradient, `absent`, as bits.
        """
        self.versions[key] += 1
        if update is not None:
            parts = zip(self._parts[key], self.slices[key].views(update), strict=True)
            gradients = [own for place, own in enumerate(parts) if not absent >> place & 1]
            self._optimizers[key].step(gradients, options[self._group[key]])

    def state(self, key: int) -> SliceState:
        """A slice's optimizer state."""
        state = self._optimizers[key].optimizer.state
        return [dict(state.get(part, {})) for part in self._parts[key]]

    def set_state(self, key: int, state: SliceState) -> None:
        """Replace a slice's optimizer state."""
        kept = self._optimizers[key].optimizer.state
        for part, own in zip(self._parts[key], state, strict=True):
            kept.pop(part, None)
            if own:
                kept[part] = own
