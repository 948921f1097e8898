"""Values that the microbatches of one call of a divided network have stored in a rank's stage."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.batch_rows import BatchRows
from cnnstrategies.pipeline.combining import CombiningRule, StoredValues, gradient_of_part
from cnnstrategies.pipeline.mixing import ProbeResult
from cnnstrategies.pipeline.watched import StoredKey
from cnnstrategies.placed import Places


class MicrobatchTerms:
    """Values that the microbatches of a call have stored.

    Attributes:
        rows: The rows of the batch that each microbatch contains, also of microbatches of other replicas.
        stored: Stored values by microbatch. After :meth:`share` these are all microbatches with samples.
        before: Values from before the forwards.
        arguments: The stage's arguments by microbatch of this rank.
        keeps_arguments: Whether :meth:`add` keeps arguments, for a probe of the rules.
        first_verdict: Result of a probe of this rank's first microbatch; None before a probe.
    """

    def __init__(self, rows: BatchRows) -> None:
        self.rows = rows
        self.stored: dict[int, StoredValues] = {}
        self.before: dict[StoredKey, Any] = {}
        self.arguments: dict[int, tuple[Any, ...]] = {}
        self.keeps_arguments = True
        self.first_verdict: ProbeResult | None = None
        self._without_graph: set[int] = set()

    def add(
        self, microbatch: int, values: StoredValues, before: dict[StoredKey, Any], arguments: tuple[Any, ...]
    ) -> None:
        """Remember what a microbatch of this rank has stored.

        Args:
            microbatch: The microbatch.
            values: The stored values.
            before: Values from before the forward.
            arguments: Arguments of the stage.
        """
        self.stored[microbatch] = values
        self.before |= before
        if self.keeps_arguments:
            self.arguments[microbatch] = arguments

    @property
    def is_one_part(self) -> bool:
        """Whether only one microbatch has samples."""
        return sum(map(bool, self.rows.sizes)) < 2

    @property
    def first_key(self) -> StoredKey | None:
        """The first thing that a microbatch has stored; None if nothing is stored."""
        return next((key for values in self.stored.values() for key in values.keys), None)

    def share(self, places: Places, group: Sequence[int], device: torch.device, subject: str) -> None:
        """Get what the microbatches of the stage's other replicas have stored. All replicas must call this.

        Args:
            places: The rules of this rank.
            group: Ranks of the replicas.
            device: Device of this rank.
            subject: Words for the values in error messages.

        Raises:
            ConfigurationError: The replicas cannot get what a microbatch has stored.
        """
        if len(group) == 1:
            return
        for values in self.stored.values():
            values.check_sendable()
        stored = {microbatch: values.detached() for microbatch, values in self.stored.items() if values.keys}
        for others, before in places.exchange((stored, list(self.before.items())), group, subject):
            self.before = {**dict(before), **self.before}
            for microbatch, values in others.items():
                self.stored.setdefault(microbatch, values.attached(device))
        nothing = StoredValues.of({})
        for microbatch, size in enumerate(self.rows.sizes):
            if size:
                self.stored.setdefault(microbatch, nothing)

    def drop_graph(self, microbatch: int, device: torch.device) -> None:
        """Drop the graph of what a microbatch has stored. Its forward then has to run again for the backward."""
        self.stored[microbatch] = self.stored[microbatch].detached().attached(device)
        self._without_graph.add(microbatch)

    def drop_copies(self) -> None:
        """Drop the values of microbatches without a graph, because the values of the batch are known."""
        for microbatch in self._without_graph:
            self.stored[microbatch] = self.stored[microbatch]._replace(leaves=[])

    def roots(
        self,
        microbatch: int,
        gradients: Sequence[Tensor | None],
        rules: Sequence[tuple[int, CombiningRule]],
        keep: bool,
        second: StoredValues | None,
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return a microbatch's stored tensors with their gradients.

        Args:
            microbatch: The microbatch.
            gradients: The gradients of the batch's values.
            rules: For each gradient, the index of the microbatch's value and the rule by which it was combined.
            keep: Whether the tensors are needed again.
            second: What the microbatch's second forward has stored, if there was one.

        Raises:
            ConfigurationError: The second forward has stored other things than the first.
        """
        stored = self.stored[microbatch] if keep else self.stored.pop(microbatch)
        if second is not None and not second.has_form_of(stored) and any(start is not None for start in gradients):
            raise ConfigurationError(
                "a forward that ran again for the backward has stored something else in "
                f"{stored.first_difference(second)} than at first: let it store the same in each call, or set "
                "activation_checkpointing to never"
            )
        leaves = (stored if second is None else second).leaves
        tensors, starts = [], []
        for (index, rule), gradient in zip(rules, gradients, strict=True):
            if gradient is not None:
                tensors.append(leaves[index])
                starts.append(gradient_of_part(rule, gradient, self.rows, microbatch))
        return tensors, starts
