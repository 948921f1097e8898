"""The slices that a server holds: values, versions and optimizers, and the values that workers hold of these slices.

In common steps, workers may pull *changes* instead of values. A change is the compressed difference between a slice's
values on the server and the values that workers hold. Compression leaves out a part of the difference. The workers'
values then lack this part, so the next difference contains it. This is error feedback for pulled values (Tang et al.,
"DoubleSqueeze", ICML 2019).

A worker may add a change only to the values from which the change was computed. Therefore the server keeps a copy of
the values that workers hold. This copy is called the slice's record. The primary sends the record to the backups
together with the slice's values.

Two records with the same version can differ: if a server starts again from initial values, it may repeat, with
different gradients, steps that workers have already seen. Therefore each record has a number, its lineage, and a server
that starts again uses a new lineage. In messages, the lineage plus 2 is the mark of the values. A worker's pull
contains the mark of the values that the worker holds. The reply contains the mark of the values that the worker holds
after the reply.

If workers choose encodings while they train, they announce with each step the encoding in which they will pull the new
values: as a change, rounded, or exact. If no worker will pull a change, but some workers will pull rounded values, the
rounded values replace the record. If all workers will pull exact values, the record is not updated, which saves time.
Workers that later pull a change then receive the exact values once, and changes after that.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
    """Return the encoding of changes, and the encoding of rounded values that workers may pull instead of changes.

    The second encoding is None if workers always pull changes. Call this only for a run in which workers pull changes.
    """
    if specification.pull_compression == AUTO:
        ladder = auto_ladder(specification.itemsize, pulls=True)
        (change,) = (compression.encoding for compression in ladder if compression.lossy)
        return change, [compression.encoding for compression in ladder if not compression.lossy][-1]
    return payload_compression(specification.pull_compression).encoding, None


class Changes:
    """The record of the values that workers hold, and the last change of each slice.

    Args:
        encoding: Encoding of the changes.
        ratio: Fraction of the elements that ``topk`` sends; it sends at least one element.
        values: By key: values of the slices, which updates modify in place.
        whole: Encoding of rounded values that workers may pull instead of changes; None if all pulls request changes.

    Attributes:
        known: By key: the slice's record, which is a copy of the values that workers hold.
        lineages: By key: lineage of the slice's record; see the module's docstring.
        behind: Keys of the slices whose record was not updated, because all workers hold the exact values.
    """

    def __init__(self, encoding: int, ratio: float, values: Mapping[int, Tensor], whole: int | None = None) -> None:
        self.encoding = encoding
        self.known = {key: value.clone() for key, value in values.items()}
        self.lineages = dict.fromkeys(values, 0)
        self.behind: set[int] = set()
        self._ratio = ratio
        self._values = values
        self._whole = whole
        # By key: the last change as a payload. A slice has no entry if no change was computed after its last update.
        self._last: dict[int, memoryview] = {}
        # By key: the rounded values as a payload. A slice has an entry only if workers hold its rounded values.
        self._rounded: dict[int, Any] = {}
        self._origin = 0  # lineage of the record of a slice that receives initial values

    def set_origin(self, since: int) -> None:
        """Change the lineages of all records. The server calls this when its process becomes a member of the run.

        Args:
            since: Number of the first view with this process. Initial values that arrive later have this lineage.
        """
        self._origin = since
        self.lineages = {
            key: zlib.crc32(str(since).encode(), lineage) if lineage else since
            for key, lineage in self.lineages.items()
        }

    def begin(self, key: int) -> None:
        """Replace a slice's record by the slice's exact values, which workers are going to receive."""
        self.known[key].copy_(self._values[key])
        self.lineages[key] = self._origin
        self._forget(key)

    def _forget(self, key: int) -> None:
        self._last.pop(key, None)
        self._rounded.pop(key, None)
        self.behind.discard(key)

    def take_over(self, key: int, known: Tensor, lineage: int, behind: bool) -> None:
        """Replace the record of a slice by the record in the primary's COPY message.

        Args:
            key: Key of the slice.
            known: Values that the workers hold, as a flat tensor.
            lineage: Lineage of these values.
            behind: Whether all workers hold the exact values instead of `known`.
        """
        self.known[key].copy_(known.view(self.known[key].shape))
        self.lineages[key] = lineage
        self._forget(key)
        if behind:
            self.behind.add(key)

    def make(self, key: int, pulled: Collection[int] = ()) -> memoryview:
        """Update a slice's record after an update of its values, and compute a change if a worker will pull one.

        Args:
            key: Key of the slice.
            pulled: Encodings in which workers will pull the new values, if workers choose encodings.

        Returns a payload for the backups, with which :meth:`apply` updates their records in the same way. The payload
        is one of these:

        - a change, if a worker will pull a change;
        - one byte with the number of an encoding, if the workers will hold the slice's values in this encoding;
        - empty, if all workers will pull exact values, so that the record is not updated.
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
        """Return the difference that a change encodes. The caller adds it to the slice's record.

        Args:
            key: Key of the slice.
            payload: Payload from :meth:`make`, possibly received from the primary.

        Returns the difference as a flat tensor. Returns None if the payload is not a change.

        Raises:
            InvalidMessageError: The payload does not have the length of a change of this slice.
        """
        if self._whole is not None and payload in (b"", bytes([Encoding.DENSE]), bytes([self._whole])):
            return None
        known = self.known[key]
        check_length(len(payload), self.encoding, known.numel(), known.dtype)
        return decode(payload, self.encoding, known.numel(), known.dtype)

    def apply(self, key: int, payload: memoryview, difference: Tensor | None) -> None:
        """Update a slice's record after an update of its values.

        Args:
            key: Key of the slice.
            payload: Payload from :meth:`make`.
            difference: Result of :meth:`decoded` for the payload.
        """
        self._forget(key)
        if difference is not None:
            self.known[key].view(-1).add_(difference)
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
        """Return the reply to a pull: the payload, its encoding, and the mark of the values that the worker then holds.

        The payload depends on the values that the worker holds, and on its request:

        - If the last change was computed from the values that the worker holds, the payload is this change. This is so
          even if the worker requested values, because all workers must hold the same values after the step.
        - If the worker holds different values and requested a change, the payload is the values that the other workers
          hold.
        - If the worker holds different values and requested values, the method returns None, and the caller sends the
          slice's values.

        Args:
            key: Key of the slice.
            mark: Mark of the values that the worker holds; 0 for no mark.
            next_version: Whether the current version is exactly the version that the worker needs; False if the current
                version is later.
            asked: Encoding in the worker's PULL message; `NOTHING` for the specification's encoding.
        """
        last = self._last.get(key)
        if last is not None and next_version and mark == self.mark(key):
            return last, self.encoding, mark
        lossy = PAYLOADS[asked].lossy if asked != Encoding.NOTHING else self._whole is None
        if not lossy:
            return None
        if key in self.behind:
            return bytes(as_bytes(self._values[key])), Encoding.DENSE, ALONE
        # `bytes` copies the values, because the next step may change `known` before the message is sent.
        return bytes(as_bytes(self.known[key])), Encoding.DENSE, self.mark(key)

    def mark(self, key: int) -> float:
        """Return the mark of the values in a slice's record, which identifies them in messages: the lineage plus 2.

        The numbers 0 and 1 have other meanings: 0 stands for no mark, and 1 is `ALONE`.
        """
        return float(self.lineages[key] + 2)

    def encoded_values(self, key: int, encoding: int) -> Any:
        """Return a slice's values in a rounded encoding as a payload, if the slice's record consists of these values.

        Otherwise return None. The caller then rounds the slice's values for this reply only, and the worker cannot add
        the next change to these values.
        """
        return self._rounded.get(key) if encoding == self._whole else None


Update = tuple[Tensor | None, int]
"""A slice's gradient, and bits that mark its parts without a gradient. The gradient is None if no part has one."""

MemberKey = tuple[int, int]
"""The id and the incarnation of a worker, which together identify the worker's process."""


def check_absent(absent: int, slice_: Slice) -> None:
    """Check `absent`, whose bits say which parts of a slice have no gradient.

    Args:
        absent: Bit i is set if part i of the slice has no gradient.
        slice_: The slice. If none of its parts has a gradient, the push must have the encoding `NOTHING` instead.

    Raises:
        InvalidMessageError: A bit stands for a part that the slice does not have, or the bits of all parts are set.
    """
    if not 0 <= absent < (1 << len(slice_.parts)) - 1 and absent:
        raise InvalidMessageError("the bits that mark parts without a gradient do not fit the slice")


class Store:
    """Values and optimizers of the slices that one server holds, as primary or backup.

    All tensors of values are allocated at the start, and later updates happen in place.

    Attributes:
        slices: By key: the slices.
        values: By key: the slice's values.
        memory: By key: the bytes of the slice's values, as a memoryview that shares the storage of the values.
        versions: By key: number of updates of the slice; -1 before its initial values arrive. In common steps, the
            version is the number of steps that are applied.
        seen: By key, then by worker: the last step whose gradient from the worker was applied to the slice.
        decided: In common steps: the last decision, as a dictionary for messages. Every message with an update or a
            copy contains the decision, because a server that has the result of a step must also have the decision about
            the step.
        changes: The records of the values that workers hold; None in a run in which workers do not pull changes.
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
        kinds = [load_optimizer(path) for path in specification.optimizers]
        self._joint = self._joint_optimizer(specification, kinds[0]) if specification.is_joint else None
        self._optimizers = {
            key: self._joint
            or FusedOptimizer(kinds[self._group[key]], [(parts, specification.groups[self._group[key]].options)])
            for key, parts in self._parts.items()
        }

    def _joint_optimizer(self, specification: Specification, optimizer_class: type[Optimizer]) -> FusedOptimizer | None:
        """Return the optimizer of all parameters. Return None on a server that does not hold the parameters.

        An optimizer that makes the steps of all parameters together needs whole tensors, so each parameter is a slice.
        """
        whole = {slice_.parts[0].parameter: self._parts[key][0] for key, slice_ in self.slices.items()}
        if not whole:
            return None
        groups = specification.groups
        return FusedOptimizer(
            optimizer_class, [([whole[index] for index in group.parameters], group.options) for group in groups]
        )

    def put(self, key: int, value: Tensor, version: int) -> None:
        """Replace a slice's values by its initial values or by the values in a COPY message, and set its version."""
        self.values[key].copy_(value.view(self.values[key].shape))
        self.versions[key] = version
        if self.changes is not None:
            self.changes.begin(key)

    def apply(self, key: int, update: Tensor | None, options: Options, absent: int = 0) -> None:
        """Make a step of a slice's optimizer, and raise the slice's version by one.

        Args:
            key: Key of the slice.
            update: Gradient of the slice, or in mode local the mean of the workers' differences. With None the version
                is raised without a step.
            options: Hyperparameters of each parameter group.
            absent: Bit i is set if part i of the slice has no gradient, so that its values stay the same.
        """
        self.versions[key] += 1
        if update is not None:
            parts = zip(self._parts[key], update.view(-1).split_with_sizes(self.slices[key].sizes), strict=True)
            gradients = [pair for index, pair in enumerate(parts) if not absent >> index & 1]
            self._optimizers[key].step(gradients, [options[self._group[key]]])

    def apply_all(self, updates: Mapping[int, Update], options: Options) -> None:
        """Make a step of some slices, or one step of all slices if the optimizer makes their steps together.

        Args:
            updates: Updates by key; see :meth:`apply`.
            options: Hyperparameters of each parameter group.
        """
        if self._joint is None:
            for key, (update, absent) in updates.items():
                self.apply(key, update, options, absent)
            return
        for key in updates:
            self.versions[key] += 1
        # Each parameter is a slice, so a parameter without a gradient has no update.
        pairs = [(key, update) for key, (update, _) in updates.items() if update is not None]
        self._joint.step([(self._parts[key][0], update) for key, update in pairs], options)

    def state(self, key: int) -> SliceState:
        """Return the optimizer's state for each part of a slice, in the order of the parts."""
        state = self._optimizers[key].optimizer.state
        return [dict(state.get(part, {})) for part in self._parts[key]]

    def set_state(self, key: int, state: SliceState) -> None:
        """Replace the optimizer's state for each part of a slice.

        Args:
            key: Key of the slice.
            state: By part: the new state, as :meth:`state` returns it.
        """
        kept = self._optimizers[key].optimizer.state
        for part, part_state in zip(self._parts[key], state, strict=True):
            kept.pop(part, None)
            if part_state:
                kept[part] = part_state
