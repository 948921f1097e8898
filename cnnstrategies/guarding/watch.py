"""The checks of one rank: they collect values in each step, and compare them at each check."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from cnnstrategies._torch_private import norms_of
from cnnstrategies.guarding.agreement import ComparedValue, options_of, states_of
from cnnstrategies.guarding.batches import BatchRecords
from cnnstrategies.guarding.digests import digests
from cnnstrategies.guarding.findings import Finding, and_others
from cnnstrategies.guarding.modes import Modes
from cnnstrategies.guarding.movement import MovementHistory, WeightState
from cnnstrategies.guarding.records import StepRecords, TakenRecords
from cnnstrategies.guarding.series import RAISED, ValueHistory, first_not_finite

Holders = tuple[int, ...] | None


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
    """

    rank: int
    holders: Callable[[Tensor], Holders]
    sees_gradients: bool
    reads_weights: bool
    replicas_agree: bool
    counts_alike: bool
    may_skip: bool

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
        self.records = StepRecords(module, run.holds)
        self.modes = Modes(module)
        self.batches = BatchRecords(run.holds)
        self._movements = MovementHistory()
        self._losses, self._norms = ValueHistory(10.0), ValueHistory(100.0)
        self._digests: dict[tuple[str, str], int] = {}
        self._lowest_rate = float("inf")
        self._trainable: set[str] = set()
        self._checked_at = 0

    def begin(self, step: int) -> None:
        """Record the weights before the first step."""
        self._checked_at = step
        self.check(step)

    def observe(self) -> None:
        """Record modes and requirements of gradients, which code may change within a step."""
        self.records.observe()
        self.modes.observe()

    def compared_values(self) -> Iterator[ComparedValue]:
        """Yield all values of which checksums are computed, those that the ranks compare and the others."""
        yield from options_of(self._optimizers)
        for name, layer in self.modes.layers.items():
            yield ComparedValue("mode", f"mode of {name}", int(layer.training))
        if not self._run.reads_weights:
            return
        optimized = self._optimized()
        for name, parameter in self._module.named_parameters():
            yield self._value("weight", name, parameter, (parameter,))
        for name, parameter in self._module.named_parameters():
            optimizer = optimized.get(id(parameter)) if self._run.sees_gradients else None
            if optimizer is not None and not isinstance(optimizer, ZeroRedundancyOptimizer):
                content = states_of(optimizer, parameter) if self._run.holds(parameter) else ()
                yield self._value("state", name, parameter, content)
        for name, buffer in self._module.named_buffers():
            exact = not buffer.is_floating_point() and self._run.counts_alike
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
        values = list(self.compared_values())
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
        findings = self._own_findings(step)
        self._checked_at = step
        if not self._run.replicas_agree:
            kept = [index for index, value in enumerate(values) if value.kind in ("option", "mode")]
            values, rows = [values[index] for index in kept], [rows[index] for index in kept]
        return values, torch.tensor(rows, dtype=torch.int64).reshape(-1, 2), findings

    def structure(self, values: Sequence[ComparedValue]) -> int:
        """Return a checksum of the names of values, which must be equal before the ranks exchange checksums."""
        return zlib.crc32(repr([(value.kind, value.name) for value in values]).encode())

    def _own_findings(self, step: int) -> list[Finding]:
        records = self.records.take(group for optimizer in self._optimizers for group in optimizer.param_groups)
        findings = [*self._finite(records), *self._spikes(records), *self._moves(records, step)]
        left = self.modes.left_in_evaluation() if step > self._checked_at else []
        if left:
            findings.append(
                Finding(
                    "modes",
                    self._run.rank,
                    step,
                    and_others(left),
                    "has been in evaluation mode since the last check, and was in training mode before",
                    "eval() without train() after it, in a step or a hook",
                    "restore the mode after the evaluation, or set it in on_train_epoch_start",
                )
            )
        return findings

    def _finite(self, records: TakenRecords) -> Iterator[Finding]:
        rank, skips = self._run.rank, self._run.may_skip
        at = first_not_finite(records.norms(), skips)
        loss_at = first_not_finite(records.losses, skips)
        advice = "lower the learning rate, clip gradients, and look at the batch and at divisions and logarithms"
        if loss_at is not None and (at is None or loss_at <= at):
            yield Finding(
                "finite",
                rank,
                loss_at,
                "the loss",
                "is not finite",
                "an overflow, a division by zero or a wrong sample in the forward pass",
                advice,
            )
        elif at is not None:
            names = [
                name
                for name in self._ordered(records)
                for s, norm in zip(records.parameters[name].steps, records.parameters[name].norms, strict=True)
                if s == at and not norm < float("inf")
            ]
            yield Finding(
                "finite",
                rank,
                at,
                f"the gradient of {and_others(names[::-1])}",
                "is not finite",
                "an overflow or a division by zero in the backward pass, or a memory error",
                advice,
            )

    def _ordered(self, records: TakenRecords) -> list[str]:
        return [name for name, _ in self._module.named_parameters() if name in records.parameters]

    def _spikes(self, records: TakenRecords) -> Iterator[Finding]:
        lowest, highest = records.rates
        if highest > RAISED * min(self._lowest_rate, lowest) or records.trainable != self._trainable:
            # The rate has been raised or parameters were unfrozen, so values may grow by design.
            self._losses.reset()
            self._norms.reset()
            self._lowest_rate, self._trainable = lowest, records.trainable
        self._lowest_rate = min(self._lowest_rate, lowest)
        advice = "look at the batch of this step; clip gradients if it happens by design"
        if spike := self._losses.first_spike(records.losses):
            yield Finding(
                "history",
                self._run.rank,
                spike[0],
                "the loss",
                f"is {spike[1]:.1e} times its median so far",
                "a wrong batch, a memory error, or a learning rate that is too large",
                advice,
            )
        if spike := self._norms.first_spike(records.norms()):
            shares = {
                name: norm
                for name, record in records.parameters.items()
                for s, norm in zip(record.steps, record.norms, strict=True)
                if s == spike[0]
            }
            name = max(shares, key=lambda key: shares[key])
            yield Finding(
                "history",
                self._run.rank,
                spike[0],
                f"the gradient of {name}",
                f"raises the norm to {spike[1]:.1e} times its median so far",
                "a memory error, a wrong batch, or a learning rate that is too large",
                advice,
            )

    def _moves(self, records: TakenRecords, step: int) -> Iterator[Finding]:
        if not self._run.reads_weights:
            return
        optimized = self._optimized()
        held = [
            (name, parameter)
            for name, parameter in self._module.named_parameters()
            if parameter.is_floating_point() and ("weight", name) in self._digests and self._run.holds(parameter)
        ]
        norms = norms_of([parameter.detach() for _, parameter in held]).tolist() if held else []
        states = {
            name: WeightState(
                self._digests["weight", name],
                norm,
                parameter.dtype,
                id(parameter) in optimized,
                parameter.grad is not None,
            )
            for (name, parameter), norm in zip(held, norms, strict=True)
        }
        moved = self._movements.compare(states, records, step - self._checked_at, self._run.sees_gradients)
        for names, fault, cause, remedy, is_note in (
            (
                moved.stuck,
                "has gradients, but does not change",
                "the optimizer has another copy of it, or steps are undone",
                "create the optimizer after the network is complete",
                False,
            ),
            (
                moved.not_optimized,
                "has gradients, but is in no optimizer",
                "it was created after the optimizer",
                "give it to the optimizer, or set its requires_grad to False",
                False,
            ),
            (
                moved.without_gradient,
                "has had no gradient since the last check",
                "the loss does not depend on it",
                "use it in the loss, or set its requires_grad to False",
                True,
            ),
            (
                moved.moved_by_optimizer,
                "is frozen, but the optimizer changes it",
                "it has kept an old gradient",
                "set its grad to None when you freeze it",
                False,
            ),
            (
                moved.written,
                "is frozen, and has changed",
                "code other than the optimizer has written it, or a memory error",
                "continue from the last verified checkpoint, or update it in each step",
                False,
            ),
        ):
            if names:
                yield Finding("moves", self._run.rank, step, and_others(names), fault, cause, remedy, is_note)
