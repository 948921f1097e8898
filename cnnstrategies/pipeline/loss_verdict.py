"""Find out, in a backward, whether the gradients of a network's result are those of the declared loss."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.buffers import BATCH_NORMS
from cnnstrategies.pipeline.declared_loss import DeclaredLoss, LossOfCall
from cnnstrategies.pipeline.gradient_check import GradientComparison, GradientVerdict, Pairs, combine
from cnnstrategies.pipeline.interleaved_batch import InterleavedBatch
from cnnstrategies.pipeline.whole_batch import WholeBatch
from cnnstrategies.placed import Places
from cnnstrategies.runtime.generator_states import GeneratorStates


def judge(
    places: Places,
    last: tuple[int, ...],
    loss: LossOfCall,
    batch: WholeBatch,
    of_outputs: Sequence[Tensor | None],
    has_stored: bool,
    outputs: Sequence[Tensor],
) -> GradientVerdict:
    """Return the verdict of the last stage on a backward, on all ranks. All ranks must call this.

    If the verdict is read late, this reads which of the earlier verdicts have arrived.

    Args:
        places: The rules of this rank.
        last: Ranks of the last stage.
        loss: The declared loss of the call.
        batch: The call. If its backwards have not run yet, the gradients of the declared loss are computed here.
        of_outputs: The gradients that have arrived at the network's result.
        has_stored: Whether a value that a forward has stored has a gradient as well.
        outputs: The network's result, if the backwards have not run yet.

    Raises:
        ConfigurationError: The gradients of an earlier step were not those of the declared loss.
    """
    if not isinstance(batch, InterleavedBatch) and loss.is_used:
        loss.prepare()
    late = loss.declared.late if isinstance(batch, InterleavedBatch) else None
    comparison: GradientComparison | None = None  # A comparison that is read late.
    common: GradientVerdict | None = None
    failure = ""
    if places.rank in last:
        with places.local():
            if not isinstance(batch, InterleavedBatch):
                batch.started = _started(loss, batch, outputs)
            result = loss.compare(of_outputs, has_stored, lambda: _pairs(batch, of_outputs, batch.started))
            if isinstance(result, GradientVerdict):
                verdict = result
            elif late is None:
                verdict = result.read()
            else:
                comparison, verdict = result, GradientVerdict("assumed")
        # The codec sends plain tuples.
        received: list[Any] = places.exchange(
            (tuple(verdict), "" if late is None else late.failure()), last, "the declared loss"
        )
        common, failure = (
            combine([GradientVerdict(*values) for values, _ in received]),
            _first(text for _, text in received),
        )
    values, failure = places.tell(last, lambda: (tuple(common or ()), failure), "the declared loss")
    if failure:
        raise ConfigurationError(failure)
    verdict = GradientVerdict(*values)
    if late is None or verdict.kind != "assumed":
        return verdict
    late.is_settled = False
    with places.local():
        if comparison is not None:
            late.add(comparison, loss.declared.steps)
        return verdict._replace(factor=_shared_factor(places, last[0], comparison))


def settle_late(places: Places, last: tuple[int, ...], declared: DeclaredLoss | None) -> None:
    """Read all verdicts that have not been read yet. All ranks must call this, before weights are used elsewhere.

    Args:
        places: The rules of this rank.
        last: Ranks of the last stage.
        declared: The module's declared loss.

    Raises:
        ConfigurationError: The gradients of an earlier step were not those of the declared loss.
    """
    late = None if declared is None else declared.late
    if late is None or late.is_settled:
        return
    late.is_settled = True
    failure = ""
    if places.rank in last:
        failure = _first(places.exchange(late.failure(wait=True), last, "the declared loss"))
    if failure := places.tell(last, lambda: failure, "the declared loss"):
        raise ConfigurationError(failure)


def _first(texts: Iterable[str]) -> str:
    return next(filter(None, texts), "")


def _shared_factor(places: Places, source: int, comparison: GradientComparison | None) -> Tensor:
    """Return the factor of the gradients on this rank's device. No rank waits for its device.

    Args:
        places: The rules of this rank.
        source: Rank that has computed the factor.
        comparison: The comparison, on ranks of the last stage.
    """
    devices = places.devices
    assert devices is not None
    if comparison is None:
        factor = torch.empty((), dtype=torch.float64, device=devices.device)
    else:
        factor = comparison.factor.clone()
    devices.share(factor, source)
    return factor


def _pairs(
    batch: WholeBatch, of_outputs: Sequence[Tensor | None], started: Mapping[int, Sequence[Tensor | None]]
) -> Pairs:
    """Return the gradients that have arrived, and those of the declared loss, for this rank's microbatches."""
    pairs: list[tuple[Tensor | None, Tensor | None]] = []
    for index, whole in enumerate(of_outputs):
        parts = [started[microbatch][index] for microbatch in batch.microbatches]
        present = [part for part in parts if part is not None]
        rows = (
            [] if whole is None else [batch.rows.of_microbatch(whole, microbatch) for microbatch in batch.microbatches]
        )
        if batch.microbatches and len(present) in (0, len(parts)):
            pairs.append((torch.cat(rows) if rows else None, torch.cat(present) if present else None))
        elif batch.microbatches:
            pairs.append((None, torch.cat(present)))  # The microbatches have different results.
    return pairs


def _started(loss: LossOfCall, batch: WholeBatch, outputs: Sequence[Tensor]) -> dict[int, Sequence[Tensor | None]]:
    """Return the gradients of the declared loss for this rank's microbatches, by microbatch."""
    started: dict[int, Sequence[Tensor | None]] = {}
    if not loss.is_used:
        return started
    terms, device = batch.terms, outputs[0].device
    before = GeneratorStates.current(device)
    with batch.under_autocast(), _same_statistics(terms.watch.outside_network()):
        terms.watch.begin()
        for microbatch in batch.microbatches:
            rows_of = partial(batch.rows.of_microbatch, microbatch=microbatch)
            started[microbatch] = loss.gradients([*map(rows_of, outputs)], rows_of)
            terms.undo()
    if before.changed(GeneratorStates.current(device)):
        before.restore(device)
        loss.failure = "loss() draws random numbers"
    return started


@contextmanager
def _same_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context after which BatchNorm layers have the same running statistics as before."""
    layers = [module for module in modules if isinstance(module, BATCH_NORMS) and module.training]
    buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
    copies = [buffer.clone() for buffer in buffers]
    yield
    for buffer, copy in zip(buffers, copies, strict=True):
        buffer.copy_(copy)
