"""The slices that a server holds: their values, versions and optimizers, the updates in them, and what workers have.

Workers may receive the compressed change of each common step. A change is compressed from the difference between the
values and what workers have, so whatever one change leaves out is part of the next: error feedback on the way back
(Tang et al., "DoubleSqueeze", ICML 2019). Changes add up correctly only for a worker that has the values from which the
change was made. What workers have therefore goes wherever the values go, also to copies, and has a lineage. The lineage
changes where a server restarts from first values, because the steps that workers have seen may be made again there,
from other pushes.

Where workers choose encodings while they train, they announce with each step how they will pull its result. If no
worker wants changes, the workers get rounded values, and the next change is made from these. If all workers want the
exact values, the record of what workers have is not kept up to date: the first worker that wants a change then gets the
whole values.
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
    """Return the encoding of changes, and the encoding in which workers pull values if they do not want changes.

    The second encoding is None if workers always pull changes.
    """
    if specification.pull_compression == AUTO:
        ladder = auto_ladder(specification.itemsize, pulls=True)
        (change,) = (compression.encoding for compression in ladder if compression.lossy)
        return change, [compression.encoding for compression in ladder if not compression.lossy][-1]
    return payload_compression(specification.pull_compression).encoding, None


class Changes:
    """Workers' values of some slices, and the last change of each slice.

    Args:
        encoding: Encoding of the changes.
        ratio: Share of the elements that ``topk`` sends; it sends at least one element.
        values: The slices' values by key.
        whole: Encoding in which workers pull values if they do not want changes; None if they always pull changes.

    Attributes:
        known: By key, the values of workers that have had all changes up to the slice's version.
        lineages: By key, a number that distinguishes values with the same version and another history.
        behind: Keys of the slices of which workers have the exact values. `known` is older there, and no worker has it.
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
        self._rounded: dict[int, Any] = {}  # payloads of the values that workers have, in the encoding `whole`
        self._origin = 0

    def set_origin(self, since: int) -> None:
        """Give values that are here, and first values that arrive later, the lineage of a server that came with a view.

        Args:
            since: Number of the server's first view.
        """
        self._origin = since
        self.lineages = {
            key: zlib.crc32(str(since).encode(), lineage) if lineage else since
            for key, lineage in self.lineages.items()
        }

    def begin(self, key: int) -> None:
        """Note that workers get a slice's exact values."""
        self.known[key].copy_(self._values[key])
        self.lineages[key] = self._origin
        self._forget(key)

    def _forget(self, key: int) -> None:
        self._last.pop(key, None)
        self._rounded.pop(key, None)
        self.behind.discard(key)

    def take_over(self, key: int, known: Tensor, lineage: int, behind: bool) -> None:
        """Replace the record of a slice by another server's record."""
        self.known[key].copy_(known.view(self.known[key].shape))
        self.lineages[key] = lineage
        self._forget(key)
        if behind:
            self.behind.add(key)

    def make(self, key: int, pulled: Collection[int] = ()) -> memoryview:
        """Return the change that brings workers closer to a slice's values, which have just had an update.

        Copies must receive what this method returns: the change, or one byte with the encoding of the values that
        workers will have, or nothing.

        Args:
            key: Key of the slice.
            pulled: Encodings in which workers will pull the result, where they may choose.
        """
        wanted = self._whole is None or self.encoding in pulled
        if wanted and key not in self.behind:
            difference = (self._values[key] - self.known[key]).view(-1)
            change = PAYLOADS[self.encoding].encode(difference.float(), self._ratio)
            payload = memoryview(change).cast("B")
        elif wanted:
            payload = memoryview(bytes([Encoding.DENSE]))
        else:
            payload = memoryview(bytes(encoding for encoding in pulled if encoding == self._whole))
        self.apply(key, payload, self.decoded(key, payload))
        return payload

    def decoded(self, key: int, payload: memoryview) -> Tensor | None:
        """Return a change as numbers; None if the payload of :meth:`make` holds no change."""
        if self._whole is not None and payload in (b"", bytes([Encoding.DENSE]), bytes([self._whole])):
            return None
        known = self.known[key]
        check_length(len(payload), self.encoding, known.numel(), known.dtype)
        return decode(payload, self.encoding, known.numel(), known.dtype)

    def apply(self, key: int, payload: memoryview, change: Tensor | None) -> None:
        """Record what workers will have: a change that is added, or values, which have already had the update."""
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
        """Return a pull's answer, its encoding and its mark; None if the worker gets the values as requested.

        The answer is the last change, or the whole values if the worker lacks those from which the change was made. A
        worker that asked for values also gets the change if the change fits: if some workers want the change of a step,
        all workers have the same values after it.

        Args:
            key: Key of the slice.
            mark: Mark of the worker's values; 0 for none.
            next_version: Whether the worker needs exactly the version after its own.
            asked: Encoding that the worker asked for; `NOTHING` for the specification's encoding.
        """
        last = self._last.get(key)
        if last is not None and next_version and mark == self.mark(key):
            return last, self.encoding, mark
        lossy = PAYLOADS[asked].lossy if asked != Encoding.NOTHING else self._whole is None
        if not lossy:
            return None
        if key in self.behind:
            return bytes(as_bytes(self._values[key])), Encoding.DENSE, ALONE
        # A copy, because `known` may change before the message leaves.
        return bytes(as_bytes(self.known[key])), Encoding.DENSE, self.mark(key)

    def mark(self, key: int) -> float:
        """Return a slice's lineage as the weight of a message; it is above 0 (no mark) and `ALONE` (no lineage)."""
        return float(self.lineages[key] + 2)

    def encoded_values(self, key: int, encoding: int) -> Any:
        """Return a slice's values as a payload if the next change is made from them in this encoding; None if not."""
        return self._rounded.get(key) if encoding == self._whole else None


MemberKey = tuple[int, int]
"""The id and the incarnation of a worker."""


def check_absent(absent: int, slice_: Slice) -> None:
    """Check that parts without gradient, given as bits, are parts of the slice, and not all of its parts.

    Raises:
        InvalidMessageError: The bits stand for other parts, or for all parts.
    """
    if not 0 <= absent < (1 << len(slice_.parts)) - 1 and absent:
        raise InvalidMessageError("parts that the slice does not have")


class Store:
    """The slices of one server, as primary or backup. All memory for values is allocated here, at the start.

    Attributes:
        slices: The slices by key.
        values: Each slice's values, which stay in the same memory.
        memory: The same memory as bytes.
        versions: Number of updates of each slice; -1 before its first value. In sync and local it is the number of
            steps.
        seen: By key, the last step of each worker that was applied to the slice.
        decided: In common steps, the last decision in the form of a message. It goes wherever the values go: a server
            that holds a decision's result must also hold the decision.
        changes: What workers have of the values, if they receive changes.
    """

    def __init__(self, specification: Specification, slices: Iterable[Slice]) -> None:
        self.slices = {slice_.key: slice_ for slice_ in slices}
        self.values = {key: torch.zeros(slice_.shape, dtype=slice_.dtype) for key, slice_ in self.slices.items()}
        self.memory = {key: as_bytes(value) for key, value in self.values.items()}
        self.versions = dict.fromkeys(self.slices, -1)
        self.seen: dict[int, dict[MemberKey, int]] = {key: {} for key in self.slices}
        self.decided: dict[str, Any] | None = None
        self.changes: Changes | None = None
        if specification.pulls_changes:
            encoding, whole = encodings(specification)
            self.changes = Changes(encoding, specification.topk_density, self.values, whole)
        group_of = {index: number for number, group in enumerate(specification.groups) for index in group.parameters}
        self._group = {key: group_of[slice_.parts[0].parameter] for key, slice_ in self.slices.items()}
        self._parts = {
            key: [nn.Parameter(part, part.is_floating_point()) for part in slice_.views(self.values[key])]
            for key, slice_ in self.slices.items()
        }
        optimizer_class = load_optimizer(specification.optimizer)
        self._optimizers = {
            key: FusedOptimizer(optimizer_class, parts, specification.groups[self._group[key]].options)
            for key, parts in self._parts.items()
        }

    def put(self, key: int, value: Tensor, version: int) -> None:
        """Replace a slice's values."""
        self.values[key].copy_(value.view(self.values[key].shape))
        self.versions[key] = version
        if self.changes is not None:
            self.changes.begin(key)

    def apply(self, key: int, update: Tensor | None, options: Options, absent: int = 0) -> None:
        """Update a slice with its optimizer.

        Args:
            key: Key of the slice.
            update: Gradient of the slice, in mode local the mean difference; None leaves the values alone.
            options: Hyper-parameters of each parameter group.
            absent: Parts of the slice without gradient, as bits; their values stay as they are.
        """
        self.versions[key] += 1
        if update is not None:
            parts = zip(self._parts[key], self.slices[key].views(update), strict=True)
            gradients = [pair for index, pair in enumerate(parts) if not absent >> index & 1]
            self._optimizers[key].step(gradients, options[self._group[key]])

    def state(self, key: int) -> SliceState:
        """Return a slice's optimizer state."""
        state = self._optimizers[key].optimizer.state
        return [dict(state.get(part, {})) for part in self._parts[key]]

    def set_state(self, key: int, state: SliceState) -> None:
        """Replace a slice's optimizer state."""
        kept = self._optimizers[key].optimizer.state
        for part, part_state in zip(self._parts[key], state, strict=True):
            kept.pop(part, None)
            if part_state:
                kept[part] = part_state
