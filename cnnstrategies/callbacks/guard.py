"""Callback that checks a training while it runs."""

import contextlib
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.optim import Optimizer
from tqdm import tqdm  # type: ignore[import-untyped]
from typing_extensions import override

from cnnstrategies.callbacks.guarded_run import applied_checks, is_compiled_in_part, watched_run
from cnnstrategies.callbacks.guarded_steps import GuardedSteps
from cnnstrategies.errors import ConfigurationError, StoppedTogether
from cnnstrategies.guarding.agreement import disagreements
from cnnstrategies.guarding.batches import COMPARED, equal_ranks, fixed_row
from cnnstrategies.guarding.findings import Finding, and_others
from cnnstrategies.guarding.loading import LOADING, lines_about_loading, watch_loading
from cnnstrategies.guarding.replay import Replay
from cnnstrategies.guarding.rereading import digests_in, fault_of
from cnnstrategies.guarding.watch import TrainingWatch
from cnnstrategies.recording.steps import StepRecorder
from cnnstrategies.strategies.protocol import FINDING, StrategyFacts, facts_of

EXIT_CODE = 3  # Exit code of a run that a finding has stopped.
MOST_KEYS = 8  # Number of findings of a rank of which the other ranks learn at a check.


class Guard(Callback):
    """Callback that looks for silent errors of a training, and prints a line with the cause and the remedy.

    After the first step, every 100 steps and at the end: ranks that should have equal weights, buffers, states and
    options of optimizers do; weights move if and only if they should; learning rates are those of their schedules;
    layers are in the mode that the user has set; losses and gradients are finite and like those before; gradients
    are set to zero and clipped, and schedules make a step in each step. Every 1,000 steps, layers are computed
    twice. Batches do not come twice in an epoch, or on two ranks. Each checkpoint is read back. The page "Guard a
    run" has a table of the checks under each strategy.

    Args:
        on_finding: ``warn`` prints a line for each finding. ``stop`` also ends all ranks together, with exit code 3.
        every: Number of steps from one check to the next.
        replay_every: Number of steps from one batch whose layers are computed twice to the next.

    Attributes:
        findings: Findings so far. Each rank has those of its own checks, and those of comparisons of ranks.

    Raises:
        ConfigurationError: An argument has a value that is not allowed.
    """

    def __init__(
        self, on_finding: Literal["warn", "stop"] = "warn", every: int = 100, replay_every: int = 1000
    ) -> None:
        if on_finding not in ("warn", "stop"):
            raise ConfigurationError(f"on_finding={on_finding!r}: use warn or stop")
        for name, value in (("every", every), ("replay_every", replay_every)):
            if value < 1:
                raise ConfigurationError(f"{name}={value}: use 1 step or more, for example 100")
        self.on_finding, self.every, self.replay_every = on_finding, every, replay_every
        watch_loading()
        self._reset()

    def _reset(self) -> None:
        self.findings: list[Finding] = []
        self._watch: TrainingWatch | None = None
        self._replay: Replay | None = None
        self._recorder = StepRecorder()
        self._waiting: list[Finding] = []  # Findings since the last check, of which the other ranks do not know.
        self._checks, self._alarms = 0, 0  # Numbers of checks, and of checks with a finding on any rank.
        self._printed: set[int] = set()
        self._saved: dict[Path, int] = {}  # Checkpoints that were read back, and the steps before they were saved.
        self._verified: Path | None = None  # The last of them that was saved before a check without a finding.
        self._begun_at = 0  # Number of steps before the current batch.
        self._is_checked = True  # Whether the last step has been checked.

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reset()
        facts = self._facts = facts_of(trainer.strategy)
        self._applied = applied_checks(facts, trainer.world_size)
        with facts.local_code():
            run = watched_run(trainer)
            self._watch = TrainingWatch(pl_module, trainer.optimizers, run)
            self._watch.begin(trainer.global_step)
            self._steps = GuardedSteps(trainer, pl_module, run, self.every)
            readers = [*self._watch.readers, *self._steps.readers]
            if self._applied["replay"] and not is_compiled_in_part(trainer):
                self._replay = Replay(pl_module, run.holds, facts.local_code, self.replay_every)
                readers.append(self._replay)
            if trainer.overfit_batches == 0:  # type: ignore[attr-defined]  # set outside the class
                readers += [self._watch.batches, *([self._steps.constant] if self._applied["samples"] else [])]
            self._recorder = StepRecorder(readers, trainer.optimizers)
        for fault in lines_about_loading(pl_module):
            cause, remedy = "names with a prefix", "make the names equal, for example by removing a prefix"
            finding = Finding("checkpoint", trainer.global_rank, 0, LOADING, fault, cause, remedy, is_note=True)
            self._waiting.append(finding)
        io = trainer.strategy.checkpoint_io
        if trainer.is_global_zero and not isinstance(io, AsyncCheckpointIO):
            vars(io)["save_checkpoint"] = partial(self._save, trainer, io.save_checkpoint)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._running.modes.begin_epoch()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begun_at = trainer.global_step
        with self._facts.local_code():
            self._recorder.begin_batch(batch, batch_idx, self._begun_at)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        with self._facts.local_code():
            self._recorder.before_backward(loss)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        with self._facts.local_code():
            self._recorder.before_step(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        with self._facts.local_code():
            self._recorder.end_batch(outputs)
            differing = [] if self._replay is None else self._replay.take()
        if differing:
            fault = "gives another output when it is computed again"
            cause, remedy = "a memory error or a faulty processor", "train on other hardware"
            rank, step = trainer.global_rank, self._begun_at + 1
            self._note(Finding("replay", rank, step, and_others(differing), fault, cause, remedy))
        step = trainer.global_step
        if step > self._begun_at:
            self._is_checked = self._is_due(step)
            if self._is_checked:
                self._check(trainer)
            # Ranks that step on their own do not wait for each other, and another rank may have found something.
            is_alone = self.on_finding == "stop" and not self._facts.steps_in_lockstep
            if is_alone and self._facts.agree_on_stop(None) == FINDING:
                self._stop(trainer)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0 and self._watch is not None:
            self._waiting += self._steps.in_validation()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self._facts.local_code():
            repeated = self._running.batches.end_epoch()
            repeats_order = self._running.batches.repeats_order()
        if self._applied["samples"]:
            for finding in self._steps.in_epoch(repeated, repeats_order):
                self._note(finding)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_checked:
            self._check(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._recorder.end()
        vars(trainer.strategy.checkpoint_io).pop("save_checkpoint", None)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._recorder.end()

    @property
    def _running(self) -> TrainingWatch:
        assert self._watch is not None, "the training has begun"
        return self._watch

    # Checks

    def _is_due(self, step: int) -> bool:
        """Whether a check follows the current batch. All ranks find the same answer, also if they were restarted.

        Args:
            step: Number of steps after the batch.
        """
        return self._begun_at == 0 or step // self.every > self._begun_at // self.every

    def _check(self, trainer: Trainer) -> None:
        """Check, print the findings, and stop if this is wanted. All ranks that step together must call this."""
        facts, step = self._facts, trainer.global_step
        facts.settle_weights()
        with facts.local_code():
            values, rows, alone = self._running.check(step)
            batches = fixed_row(self._running.batches.take())
            alone += self._steps.check()
        alone = [*self._waiting, *alone]
        self._waiting = []
        compared: list[Finding] = []
        is_first, stops = [True] * len(alone), any(not finding.is_note for finding in alone)
        if facts.steps_in_lockstep:
            keys = [finding.key for finding in alone[:MOST_KEYS]]
            keys += [0] * (MOST_KEYS - len(keys))
            head = [self._running.structure(values), len(values), int(stops), *batches, *keys]
            gathered = self._gather(trainer, torch.tensor(head, dtype=torch.int64))
            stops = bool(gathered[:, 2].any())
            lower = set(gathered[: trainer.global_rank, 3 + COMPARED :].flatten().tolist())
            is_first = [finding.key not in lower for finding in alone]
            compared = self._compare_batches(facts, gathered[:, 3 : 3 + COMPARED].tolist(), step)
            odd = [rank for rank, row in enumerate(gathered) if not row[:2].equal(gathered[0, :2])]
            compared += (
                [_other_structure(odd[0], step)] if odd else disagreements(values, self._gather(trainer, rows), step)
            )
        self.findings += [finding for finding in (*compared, *alone) if finding not in self.findings]
        for finding, prints in (
            *((finding, trainer.is_global_zero) for finding in compared),
            *zip(alone, is_first, strict=True),
        ):
            self._print(finding, prints)
        self._checks += 1
        if stops or any(not finding.is_note for finding in compared):
            self._alarms += 1
            if self.on_finding == "stop":
                if not facts.steps_in_lockstep:
                    facts.agree_on_stop(FINDING)
                self._stop(trainer)
        elif saved := [path for path, saved_at in self._saved.items() if saved_at <= step]:
            self._verified = saved[-1]

    def summary_rows(self) -> list[tuple[str, str]]:
        """Return the row of the closing summary with the number of checks, and of those that have found something."""
        if not self._checks:
            return []
        text = f"{self._checks} check{'s' * (self._checks > 1)}, "
        return [("guard", text + (f"{self._alarms} with findings: see above" if self._alarms else "nothing found"))]

    def _gather(self, trainer: Trainer, values: Tensor) -> Tensor:
        return self._facts.gather_from_ranks(values.to(trainer.strategy.root_device)).cpu()

    def _compare_batches(self, facts: StrategyFacts, rows: list[list[int]], step: int) -> list[Finding]:
        leaders = range(0, len(rows), facts.ranks_per_batch)
        pair = equal_ranks(rows, leaders) if self._applied["batches"] else None
        if pair is None:
            return []
        remedy = "use a DistributedSampler, or make an IterableDataset yield another part on each rank"
        fault, cause = f"loads the same batches as on rank {pair[0]}", "data that are not divided among the ranks"
        return [Finding("batches", pair[1], step, "the loader", fault, cause, remedy)]

    # Checkpoints

    def _save(
        self, trainer: Trainer, save: Any, checkpoint: Mapping[str, Any], path: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Save a checkpoint, and read it back."""
        with self._facts.local_code():
            written = digests_in(checkpoint)
        save(checkpoint, path, *args, **kwargs)
        for finding in self._steps.in_checkpoint(checkpoint, str(path)):
            self._note(finding)
        file = Path(path)
        self._saved.pop(file, None)
        if self._verified == file:
            self._verified = None
        if not file.is_file():
            return  # At a URL, or a folder.
        with self._facts.local_code():
            fault = fault_of(file, written)
        if fault is None:
            self._saved[file] = trainer.global_step
        else:
            cause, remedy = "a faulty disk or network file system", "save to another disk, and check this one"
            self._note(self._steps.finding("checkpoint", str(path), fault, cause, remedy))

    # Output

    def _note(self, finding: Finding) -> None:
        """Keep a finding of this rank for the next check, and print it now."""
        self._waiting.append(finding)
        self.findings.append(finding)
        self._print(finding, True)

    def _print(self, finding: Finding, prints: bool) -> None:
        """Print a finding once."""
        if prints and finding.key not in self._printed:
            with contextlib.suppress(Exception), tqdm.external_write_mode(sys.stderr):
                print(finding, file=sys.stderr, flush=True)
        self._printed.add(finding.key)

    def _stop(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            verified = self._verified
            checkpoint = (
                f"the last verified checkpoint is {verified}" if verified else "no checkpoint was verified before"
            )
            print(f"guard: stopped after step {trainer.global_step}; {checkpoint}", file=sys.stderr, flush=True)
        raise StoppedTogether(EXIT_CODE if trainer.is_global_zero else 0)


def _other_structure(rank: int, step: int) -> Finding:
    fault = "has other parameters, buffers or parameter groups than on rank 0"
    cause = "code that changes the module or the optimizer on some ranks only"
    return Finding("replicas", rank, step, "the module", fault, cause, "change them on all ranks alike")
