"""Callback that checks a training while it runs."""

import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from tqdm import tqdm  # type: ignore[import-untyped]
from typing_extensions import override

from cnnstrategies._lightning_private import averages_models
from cnnstrategies.errors import ConfigurationError, StoppedTogether
from cnnstrategies.guarding.agreement import ComparedValue, disagreements
from cnnstrategies.guarding.findings import Finding
from cnnstrategies.guarding.watch import TrainingWatch, WatchedRun
from cnnstrategies.strategies.protocol import facts_of

EXIT_CODE = 3  # Exit code of a run that a finding has stopped.
MOST_KEYS = 8  # Number of findings of a rank of which the other ranks learn at a check.


class Guard(Callback):
    """Callback that looks for silent errors of a training, and prints a line with the cause and the remedy.

    After the first step, every 100 steps and at the end: ranks that should have equal weights, buffers, states and
    options of optimizers do; weights move if and only if they should; layers are in the mode that the user has set; and
    losses and gradients are finite and like those before. The page "Guard a run" has a table of the checks under each
    strategy.

    Args:
        on_finding: ``warn`` prints a line for each finding. ``stop`` also ends all ranks together, with exit code 3.
        every: Number of steps from one check to the next.

    Attributes:
        findings: Findings so far. Each rank has those of its own checks, and those of comparisons of ranks.

    Raises:
        ConfigurationError: An argument has a value that is not allowed.
    """

    def __init__(self, on_finding: Literal["warn", "stop"] = "warn", every: int = 100) -> None:
        if on_finding not in ("warn", "stop"):
            raise ConfigurationError(f"on_finding={on_finding!r}: use warn or stop")
        if every < 1:
            raise ConfigurationError(f"every={every}: check after 1 step or more, for example 100")
        self.on_finding, self.every = on_finding, every
        self.findings: list[Finding] = []
        self._watch: TrainingWatch | None = None
        self._printed: set[int] = set()
        self._begun_at = 0  # Number of steps before the current batch.
        self._is_checked = True  # Whether the last step has been checked.

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        facts = facts_of(trainer.strategy)
        run = WatchedRun(
            rank=trainer.global_rank,
            holders=facts.holders_of,
            sees_gradients=facts.step_kind != "worker",
            reads_weights=not facts.shards_parameters,
            replicas_agree=facts.replicas_agree and not averages_models(trainer.strategy),
            counts_alike=not facts.may_skip_steps,
            may_skip=getattr(trainer.precision_plugin, "scaler", None) is not None,
        )
        self.findings, self._printed, self._is_checked = [], set(), True
        with facts.local_code():
            self._watch = TrainingWatch(pl_module, trainer.optimizers, run)
            self._watch.begin(trainer.global_step)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._running.modes.begin_epoch()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begun_at = trainer.global_step
        self._running.modes.begin_batch()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._running.observe()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        with facts_of(trainer.strategy).local_code():
            self._running.records.add_gradients(self._begun_at + 1, optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        with facts_of(trainer.strategy).local_code():
            self._running.records.add_loss(self._begun_at + 1, loss)
        self._running.observe()
        step = trainer.global_step
        if step > self._begun_at:
            # All ranks find the same answer, also a rank that was restarted.
            self._is_checked = self._begun_at == 0 or step // self.every > self._begun_at // self.every
            if self._is_checked:
                self._check(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_checked:
            self._check(trainer)

    @property
    def _running(self) -> TrainingWatch:
        assert self._watch is not None, "the training has begun"
        return self._watch

    def _check(self, trainer: Trainer) -> None:
        """Check, print the findings, and stop if this is wanted. All ranks that step together must call this."""
        facts, step = facts_of(trainer.strategy), trainer.global_step
        facts.settle_weights()
        with facts.local_code():
            values, rows, alone = self._running.check(step)
        if facts.steps_in_lockstep:
            is_first, stops = self._exchange_keys(trainer, values, alone)
            compared = disagreements(values, self._gather(trainer, rows), step) if is_first is not None else []
        else:
            is_first, compared, stops = [True] * len(alone), [], any(not finding.is_note for finding in alone)
        self.findings += [*compared, *alone]
        for finding in compared:
            self._print(finding, trainer.is_global_zero)
        for finding, prints in zip(alone, is_first or [True] * len(alone), strict=True):
            self._print(finding, prints)
        if self.on_finding == "stop" and (stops or compared):
            self._stop(trainer)

    def _gather(self, trainer: Trainer, values: Tensor) -> Tensor:
        return facts_of(trainer.strategy).gather_from_ranks(values.to(trainer.strategy.root_device)).cpu()

    def _exchange_keys(
        self, trainer: Trainer, values: Sequence[ComparedValue], alone: list[Finding]
    ) -> tuple[list[bool] | None, bool]:
        """Tell the other ranks of this rank's findings. All ranks must call this.

        Returns:
            For each finding, whether no lower rank has it as well; None if the ranks do not have the same values to
            compare, which is another finding. And whether any rank has a finding.
        """
        keys = [finding.key for finding in alone[:MOST_KEYS]]
        is_wrong = any(not finding.is_note for finding in alone)
        head = [self._running.structure(values), len(values), int(is_wrong), *keys, *[0] * (MOST_KEYS - len(keys))]
        gathered = self._gather(trainer, torch.tensor(head, dtype=torch.int64))
        stops = bool(gathered[:, 2].any())
        lower = set(gathered[: trainer.global_rank, 3:].flatten().tolist())
        first = [finding.key not in lower for finding in alone]
        odd = next((rank for rank, row in enumerate(gathered) if not row[:2].equal(gathered[0, :2])), None)
        if odd is None:
            return first, stops
        finding = Finding(
            "replicas",
            odd,
            trainer.global_step,
            "the module",
            "has other parameters, buffers or parameter groups than on rank 0",
            "code that changes the module or the optimizer on some ranks only",
            "change them on all ranks alike",
        )
        self.findings.append(finding)
        self._print(finding, trainer.is_global_zero)
        return None, True

    def _print(self, finding: Finding, prints: bool) -> None:
        """Print a finding once."""
        if prints and finding.key not in self._printed:
            with tqdm.external_write_mode(sys.stderr):
                print(finding, file=sys.stderr, flush=True)
        self._printed.add(finding.key)

    def _stop(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            print(f"guard: the run is stopped after step {trainer.global_step}", file=sys.stderr, flush=True)
        raise StoppedTogether(EXIT_CODE if trainer.is_global_zero else 0)
