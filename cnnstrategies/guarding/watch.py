"""The checks of one rank: they collect values in each step, and compare them at each check."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from cnnstrategies._torch_private import norms_of
from cnnstrategies.guarding.agreement import ComparedValue, options_of, states_of
from cnnstrategies.guarding.batches import BatchRecords
from cnnstrategies.guarding.digests import digests
from cnnstrategies.guarding.findings import Finding, and_others
from cnnstrategies.guarding.forwards import ForwardRecords
from cnnstrategies.guarding.modes import Modes
from cnnstrategies.guarding.movement import Movement, MovementHistory, WeightState
from cnnstrategies.guarding.records import TURNS, StepRecords, TakenRecords
from cnnstrategies.guarding.series import RAISED, WARM_UP, ValueHistory, first_not_finite
from cnnstrategies.recording.steps import StepReader

Holders = tuple[int, ...] | None
# Texts of findings.
Texts = dict[str, Any]
LEFT: Texts = {
    "fault": "has been in evaluation mode since the last check, and was in training mode before",
    "cause": "eval() without train() after it, in a step or a hook",
    "remedy": "restore the mode after the evaluation, or set it in on_train_epoch_start",
}
NOT_FINITE: Texts = {
    "fault": "is not finite",
    "cause": "an overflow, a division by zero, a wrong sample or a memory error",
    "remedy": "lower the learning rate, clip gradients, and look at the batch and at divisions and logarithms",
}
SPIKE: Texts = {
    "cause": "a wrong batch, a memory error, or a learning rate that is too large",
    "remedy": "look at the batch of this step; clip gradients if it happens by design",
}
MOVES: dict[Movement, Texts] = {
    "stuck": {
        "fault": "has gradients, but does not change",
        "cause": "the optimizer has another copy of it, its steps are undone, or its precision rounds them away",
        "remedy": "create the optimizer after the network is complete, and keep weights in float32",
    },
    "not optimized": {
        "fault": "has gradients, but is in no optimizer",
        "cause": "it was created after the optimizer",
        "remedy": "give it to the optimizer, or set its requires_grad to False",
    },
    "without a gradient": {
        "fault": "has had no gradient since the last check",
        "cause": "the loss does not depend on it",
        "remedy": "use it in the loss, or set its requires_grad to False",
        "is_note": True,
    },
    "moved by an optimizer": {
        "fault": "is frozen, but the optimizer changes it",
        "cause": "it has kept an old gradient",
        "remedy": "set its grad to None when you freeze it",
    },
    "written": {
        "fault": "is frozen, and has changed",
        "cause": "code other than the optimizer has written it, or a memory error",
        "remedy": "continue from the last verified checkpoint, or update it in each step",
    },
}


@dataclass(frozen=True)
class WatchedRun:
    """A rank's place in the run, and what its strategy promises.

    Attributes:
        rank: This rank.
        holders: Function that returns the ranks that hold a tensor; None if all ranks hold it.
        sees_gradients: Whether gradients are in the parameters before an optimizer's step.
        reads_weights: Whether this rank may read the weights between two steps.
        replicas_agree: Whether ranks that hold the same weights have equal ones.
        counts_alike: Whether counters, such as those of batch normalisation, are equal.
        may_skip: Whether a gradient scaler skips steps whose gradients are not finite.
        compares_forwards: Whether all ranks call the same layers equally often in each step.
    """

    rank: int
    holders: Callable[[Tensor], Holders]
    sees_gradients: bool
    reads_weights: bool
    replicas_agree: bool
    counts_alike: bool
    may_skip: bool
    compares_forwards: bool = False

    def holds(self, tensor: Tensor) -> bool:
        """Whether this rank has the values of a tensor."""
        holders = self.holders(tensor)
        return holders is None or self.rank in holders


class TrainingWatch:
    """Checks of one rank.

    Args:
        module: The module that is trained.
        optimizers: Its optimizers.
        run: This rank's place in the run.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], run: WatchedRun) -> None:
        self._module, self._optimizers, self._run = module, optimizers, run
        self.records = StepRecords(module, run.holds, run.sees_gradients and run.reads_weights)
        self.modes = Modes(module)
        self.batches = BatchRecords(run.holds)
        self.forwards = ForwardRecords(module) if run.compares_forwards else None
        self._movements = MovementHistory()
        self._losses = ValueHistory(10.0)
        self._norms: dict[int, ValueHistory] = {}  # By turn.
        self._digests: dict[tuple[str, str], int] = {}
        self._lowest_rate = float("inf")
        self._trainable: set[str] = set()
        self._checked_at = 0

    def begin(self, step: int) -> None:
        """Record the weights before the first step."""
        self._checked_at = step
        self.check(step)

    @property
    def readers(self) -> list[StepReader]:
        """Readers of the run's steps, apart from those of batches."""
        return [self.modes, *([] if self.forwards is None else [self.forwards]), self.records]

    def _compared_values(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[ComparedValue]:
        """Yield all values of which checksums are computed, those that the ranks compare and the others."""
        yield from options_of(self._optimizers)
        for name, layer in self.modes.layers.items():
            yield ComparedValue("mode", f"mode of {name}", int(layer.training))
        if self.forwards is not None:
            yield from self.forwards.take()
        if not self._run.reads_weights:
            return
        optimized = self._optimized()
        for name, parameter in parameters.items():
            yield self._value("weight", name, parameter, (parameter,))
        for name, parameter in parameters.items():
            optimizer = optimized.get(id(parameter)) if self._run.sees_gradients else None
            if optimizer is not None and not isinstance(optimizer, ZeroRedundancyOptimizer):
                content = states_of(optimizer, parameter) if self._run.holds(parameter) else ()
                yield self._value("state", name, parameter, content)
        for name, buffer in self._module.named_buffers():
            # Integers in a buffer of several elements may be those of a rank's own samples, as in a memory of labels.
            is_counter = buffer.numel() == 1 and not buffer.is_floating_point()
            exact = is_counter and self._run.counts_alike
            yield self._value("buffer", name, buffer, (buffer,), exact)

    def _value(
        self, kind: str, name: str, tensor: Tensor, content: tuple[Tensor, ...], always: bool = True
    ) -> ComparedValue:
        holders = self._run.holders(tensor)
        held = content if holders is None or self._run.rank in holders else ()
        dense = tuple(part for part in held if part.layout is torch.strided and not part.is_meta)
        return ComparedValue(kind, name, dense, holders, always)  # type: ignore[arg-type]

    def _optimized(self) -> dict[int, Optimizer]:
        return {
            id(parameter): optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def check(self, step: int) -> tuple[list[ComparedValue], Tensor, list[Finding]]:
        """Check what has been recorded since the last check.

        Args:
            step: Number of steps of the run.

        Returns:
            The values that the ranks compare; for each of them its checksum and whether it has changed since the last
            check (values, 2); and the findings of this rank alone.
        """
        parameters = dict(self._module.named_parameters())
        values = list(self._compared_values(parameters))
        tensors = [part for value in values if not isinstance(value.content, int) for part in value.content]
        sums = iter(digests(tensors).tolist())
        rows: list[tuple[int, int]] = []
        before, self._digests = self._digests, {}
        for value in values:
            if isinstance(value.content, int):
                digest = value.content
            else:
                digest = (
                    hash(tuple(next(sums) for _ in value.content))
                    if len(value.content) > 1
                    else sum(next(sums) for _ in value.content)
                )
            self._digests[value.kind, value.name] = digest
            rows.append((digest, int(before.get((value.kind, value.name), digest) != digest)))
        findings = self._own_findings(step, parameters)
        self._checked_at = step
        if not self._run.replicas_agree:
            kept = [index for index, value in enumerate(values) if value.kind in ("option", "mode")]
            values, rows = [values[index] for index in kept], [rows[index] for index in kept]
        return values, torch.tensor(rows, dtype=torch.int64).reshape(-1, 2), findings

    def structure(self, values: Sequence[ComparedValue]) -> int:
        """Return a checksum of the names of values, which must be equal before the ranks exchange checksums."""
        return zlib.crc32(repr([(value.kind, value.name) for value in values]).encode())

    def _own_findings(self, step: int, parameters: Mapping[str, nn.Parameter]) -> list[Finding]:
        records, make = self.records.take(self._optimizers, parameters), partial(Finding, rank=self._run.rank)
        findings = [*self._finite(records, make), *self._spikes(records, make)]
        findings += self._moves(records, make, step, parameters)
        if step > self._checked_at and (left := self.modes.left_in_evaluation()):
            findings.append(make("modes", step=step, tensor=and_others(left), **LEFT))
        return findings

    def _finite(self, records: TakenRecords, make: Callable[..., Finding]) -> Iterator[Finding]:
        at = first_not_finite(records.norms(), self._run.may_skip)
        loss_at = first_not_finite(records.losses, self._run.may_skip)
        if loss_at is not None and (at is None or loss_at <= at):
            # Weights that are wrong before the loss is were made wrong by the step before.
            if wrong := records.wrong_weights:
                tensor = f"the gradient of {and_others(wrong[::-1])}"
                yield make("finite", step=max(1, loss_at - 1), tensor=tensor, **NOT_FINITE)
            else:
                yield make("finite", step=loss_at, tensor="the loss", **NOT_FINITE)
        elif at is not None:
            # The backward goes from the last layer to the first, so the last wrong gradient is the first in time.
            norms = records.at(at)
            wrong = [name for name, _ in self._module.named_parameters() if not norms.get(name, 0.0) < float("inf")]
            yield make("finite", step=at, tensor=f"the gradient of {and_others(wrong[::-1])}", **NOT_FINITE)

    def _spikes(self, records: TakenRecords, make: Callable[..., Finding]) -> Iterator[Finding]:
        lowest, highest = records.rates
        if highest > RAISED * min(self._lowest_rate, lowest) or records.trainable != self._trainable:
            # The rate has been raised or parameters were unfrozen, so values may grow by design.
            self._losses.reset()
            self._norms.clear()
            self._lowest_rate, self._trainable = lowest, records.trainable
        self._lowest_rate = min(self._lowest_rate, lowest)
        if spike := self._losses.first_spike(records.losses):
            fault = f"is {spike[1]:.1e} times its median so far"
            yield make("history", step=spike[0], tensor="the loss", fault=fault, **SPIKE)
        turns = sorted({each.turn for each in records.gradients})
        for turn in turns:
            self._norms.setdefault(turn, ValueHistory(100.0, WARM_UP if len(turns) == 1 else WARM_UP // TURNS))
        spikes = (self._norms[turn].first_spike(records.norms(turn)) for turn in turns)
        if spike := min(filter(None, [*spikes]), default=None):
            norms = records.at(spike[0])
            largest = max(norms, key=lambda name: norms[name])
            fault = f"raises the norm of all gradients to {spike[1]:.1e} times its median so far"
            yield make("history", step=spike[0], tensor=f"the gradient of {largest}", fault=fault, **SPIKE)

    def _moves(
        self, records: TakenRecords, make: Callable[..., Finding], step: int, parameters: Mapping[str, nn.Parameter]
    ) -> Iterator[Finding]:
        if not self._run.reads_weights:
            return
        optimized = self._optimized()
        held = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.is_floating_point() and self._run.holds(parameter)
        }
        norms = norms_of([parameter.detach() for parameter in held.values()]).tolist() if held else []
        states = {
            name: WeightState(
                self._digests["weight", name],
                norm,
                parameter.dtype,
                id(parameter) in optimized,
                parameter.grad is not None,
            )
            for (name, parameter), norm in zip(held.items(), norms, strict=True)
        }
        moved = self._movements.compare(states, records, step - self._checked_at, self._run.sees_gradients)
        for kind, names in moved.items():
            if names:
                yield make("moves", step=step, tensor=and_others(names), **MOVES[kind])
