"""Stored values of a whole batch: a stage combines its microbatches' values, and all ranks get those of all stages."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.combining import CombiningRule, check_sendable, combine
from cnnstrategies.pipeline.microbatch_terms import MicrobatchTerms
from cnnstrategies.pipeline.stored_watch import StoredWatch
from cnnstrategies.pipeline.tensor_headers import TensorHeader, TensorSpec, pack
from cnnstrategies.pipeline.watched import StoredKey
from cnnstrategies.placed import Places

NOTHING = pack((), False)[0]  # Header of a stage that stores nothing.


class CombinedTerms(NamedTuple):
    """Values that a stage has stored for the whole batch.

    Attributes:
        header: For each key its kind, its path, whether the forward has added to the value, and the value. Tensors are
            described.
        tensors: The tensors.
        roots: For each tensor with a gradient, the index of the microbatches' value and its rule.
        changed: Tensors of the stage that the forwards have changed in place, with the values of the whole batch.
    """

    header: TensorHeader
    tensors: list[Tensor]
    roots: list[tuple[int, CombiningRule]]
    changed: list[tuple[Tensor, Tensor]]


def combine_terms(
    terms: MicrobatchTerms, rules: Sequence[CombiningRule], watch: StoredWatch, places: Places
) -> CombinedTerms:
    """Combine what the microbatches of a stage have stored.

    Args:
        terms: What all microbatches have stored.
        rules: A rule for each stored value.
        watch: Finds the tensors that forwards have changed in place.
        places: The rules of this rank.

    Raises:
        ConfigurationError: Other ranks cannot get a value.
    """
    order = sorted(terms.stored)
    samples = [terms.rows.sizes[microbatch] for microbatch in order]
    values = terms.stored[order[0]]
    columns = list(zip(*(terms.stored[microbatch].leaves for microbatch in order), strict=True))
    needs: list[bool] = []
    leaves: list[Any] = []
    with torch.no_grad():
        for rule, column, before in zip(rules, columns, values.leaves_of(terms.before), strict=True):
            leaf = combine(rule, column, samples, before)
            leaf = terms.rows.in_order(leaf) if rule.kind == "rows" else leaf
            needs.append(any(isinstance(part, Tensor) and part.requires_grad for part in column))
            # A tensor with a storage of its own can have a place of its own.
            leaves.append(leaf.clone().requires_grad_(needs[-1]) if isinstance(leaf, Tensor) else leaf)
    entries = []
    changed: list[tuple[Tensor, Tensor]] = []
    roots: list[tuple[int, CombiningRule]] = []
    indices = values.by_key(range(len(leaves)))
    for key, tree, of_key in zip(values.keys, values.trees, indices, strict=True):
        value = tree_unflatten([leaves[index] for index in of_key], tree)
        check_sendable(key, [leaves[index] for index in of_key])
        if key.kind == "values" and not any(needs[index] for index in of_key):
            tensor = watch.find(key.path)
            if places.place_of(tensor) is not None:
                # The tensor lives on this stage's ranks, like the network's buffers.
                changed.append((tensor, value))
                continue
        accumulates = rules[of_key[0]].accumulates if len(of_key) == 1 else False
        entries.append((key.kind, key.path, accumulates, value))
        roots += [(index, rules[index]) for index in of_key if needs[index]]
    header, tensors = pack((entries,), False) if entries else (NOTHING, [])
    return CombinedTerms(header, tensors, roots, changed)


class BatchTerms:
    """Stored values of a batch, of all stages. All ranks have this object, and call its methods together.

    A stored tensor lives on the ranks of its stage. Other ranks have a foreign tensor in the same attribute.

    Args:
        headers: The header of each stage, see `CombinedTerms`; empty if no stage stores anything.
        tensors: The tensors of this rank's stage.
        places: The rules of this rank.
        ranks: For each stage, the ranks of its replicas.
        device: Device of this rank.
    """

    def __init__(
        self,
        headers: Sequence[TensorHeader],
        tensors: Sequence[Tensor],
        places: Places,
        ranks: Sequence[tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self._headers, self._tensors, self._places = headers, tensors, places
        self._ranks, self._device = ranks, device

    def outputs(self) -> list[Tensor]:
        """Return the stored tensors of all stages that have a gradient: placed tensors, or foreign ones."""
        return [tensor for stage in range(len(self._headers)) for tensor, needed in self._placed(stage) if needed]

    def own_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Bring the gradients of :meth:`outputs` to their stages, and return those of this rank's stage."""
        remaining = iter(gradients)
        result: list[Tensor | None] = []
        for header, ranks in zip(self._headers, self._ranks, strict=False):
            count = sum(spec.needs_gradient for spec in header.tensors)
            of_stage = [next(remaining) for _ in range(count)]
            present = [gradient for gradient in of_stage if gradient is not None]
            brought = self._places.bring_all(present, ranks, "gradients of stored values")
            if self._places.rank in ranks:
                result = [None if gradient is None else brought.get(id(gradient), gradient) for gradient in of_stage]
        return result

    def store(self, outputs: Sequence[Tensor], watch: StoredWatch) -> None:
        """Store all stages' values in the attributes of this rank's modules.

        Args:
            outputs: The tensors of :meth:`outputs`, as results of the network's autograd function.
            watch: The watch over these attributes.

        Raises:
            ConfigurationError: Forwards in several stages change the same value.
        """
        remaining = iter(outputs)
        before: dict[tuple[Any, ...], Any] = {}
        for key, accumulates, stored in self._entries(remaining):
            # A value outside of the module may be a cache, which the forwards of other stages use.
            value = self._with_copies(stored) if key.is_outside else stored
            if key.kind in ("set", "values"):
                present = watch.value(key)
                if key.path in before and accumulates is not False:
                    # An earlier stage has changed the same value.
                    if accumulates is None:
                        raise ConfigurationError(
                            f"forwards in several stages change {key}, and each of them uses the value that it "
                            "finds: store the value of each module in an attribute of its own"
                        )
                    value = present + (value - (before[key.path] or 0))
                before.setdefault(key.path, present)
            watch.put(key, value)

    def _entries(self, outputs: Iterator[Tensor]) -> Iterator[tuple[StoredKey, bool | None, Any]]:
        """Yield the keys of all stages, whether the forward has added to the value, and the values."""
        for stage, header in enumerate(self._headers):
            if header.leaves:
                tensors = [next(outputs) if needed else tensor for tensor, needed in self._placed(stage)]
                (entries,) = header.unpack(tensors)
                for kind, path, accumulates, value in entries:
                    yield StoredKey(kind, path), accumulates, value

    def _with_copies(self, value: Any) -> Any:
        """Return a value of which all ranks have copies, except for tensors with a gradient."""
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and not leaf.requires_grad]
        copies = self._places.all_everywhere(leaves, "a stored value")
        return tree_map(lambda leaf: copies.get(id(leaf), leaf), value)

    def _placed(self, stage: int) -> list[tuple[Tensor, bool]]:
        """Return the stored tensors of a stage, foreign on other ranks, and whether each has a gradient."""
        places, ranks, specs = self._places, self._ranks[stage], self._headers[stage].tensors
        if places.rank in ranks:
            tensors = [places.mark(tensor.detach(), ranks, "a stored value") for tensor in self._tensors]
        else:
            tensors = foreign_tensors(places, specs, ranks, "a stored value", self._device)
        return [(tensor, spec.needs_gradient) for tensor, spec in zip(tensors, specs, strict=True)]


def foreign_tensors(
    places: Places, specs: Sequence[TensorSpec], ranks: tuple[int, ...], label: str, device: torch.device
) -> list[Tensor]:
    """Return foreign tensors of the forms that other ranks have described.

    Args:
        places: The rules of this rank.
        specs: The forms.
        ranks: Ranks that have the tensors.
        label: Name of the tensors.
        device: Device of this rank.
    """
    with places.local():
        shapes = [spec.empty(torch.device("meta")) for spec in specs]
        return [places.foreign_like(shape, ranks, label, device) for shape in shapes]
