"""Callback that prints during a run why its steps have become slower, and when they are as fast again."""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from cnnstrategies._torch_private import default_store
from cnnstrategies.callbacks.host_clock import COMPUTE, Waits, host_clock
from cnnstrategies.callbacks.slow_changes import (
    CHECKPOINT,
    STEPS,
    VALIDATION,
    SlowChange,
    SlowSteps,
    StepBlock,
    StepsEnded,
)
from cnnstrategies.callbacks.step_blocks import StepBlocks, decode, encode
from cnnstrategies.recording.clock import PartClock
from cnnstrategies.runtime.stopwatch import Stopwatch
from cnnstrategies.runtime.waiting import report_forwards, unwatch, watch
from cnnstrategies.strategies.protocol import StepKind, StrategyFacts, facts_of

FIRST = 10  # Number of steps at the start of a run that are not measured, because caches and connections are new.
EVERY = 1.0  # Shortest time in seconds between two messages of a rank to rank 0.
READ_AFTER = 3  # Step of a block in which rank 0 reads the blocks of other ranks, so that the blocks have arrived.
KEPT = 64  # Largest number of blocks in a message.


class BlockExchange:
    """Exchange of the ranks' blocks through a store. No rank waits for another rank.

    Each rank overwrites its own key with its newest blocks. Rank 0 reads the keys.

    Args:
        store: Store that all ranks use; None if this rank judges its own blocks.
        rank: This rank.
        world: Number of ranks.
    """

    def __init__(self, store: Store | None, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = 1 if store is None else world
        self._blocks: list[deque[StepBlock]] = [deque(maxlen=KEPT) for _ in range(self._world)]
        self._next = 0  # Number of the next block to return.
        self._sent = 0.0
        self._read = 0.0
        self._unsent = self._repeated = 0  # Numbers of the newest blocks that were not sent, and sent once.

    def add(self, block: StepBlock) -> None:
        """Add a block of this rank."""
        mine = self._blocks[self._rank if self._world > 1 else 0]
        mine.append(block)
        self._unsent += 1
        now = time.monotonic()
        if self._store is not None and self._rank != 0 and now - self._sent >= EVERY:
            self._sent = now
            # The blocks of the last message are repeated, in case rank 0 has not read the message.
            newest = [*mine][-min(KEPT, self._unsent + self._repeated) :]
            self._repeated, self._unsent = self._unsent, 0
            self._store.set(f"blocks {self._rank}", encode(newest))

    def complete(self) -> list[Sequence[StepBlock]]:
        """Return the blocks of all ranks that have not been returned yet, in the order of their numbers."""
        now = time.monotonic()
        if self._store is not None and now - self._read < EVERY:
            return []
        self._read = now
        for rank in range(1, self._world):
            if self._store is not None and self._store.check([f"blocks {rank}"]):
                known = self._blocks[rank][-1].number if self._blocks[rank] else -1
                received = decode(self._store.get(f"blocks {rank}"))
                self._blocks[rank].extend(block for block in received if block.number > known)
        numbers = [{block.number: block for block in blocks} for blocks in self._blocks]
        common = sorted(number for number in numbers[0] if all(number in others for others in numbers))
        new = [number for number in common if number >= self._next]
        self._next = max([self._next, *(number + 1 for number in new)])
        return [[blocks[number] for blocks in numbers] for number in new]


class SlowLines(Callback):
    """Callback that prints a line if the steps of a run become slower for good, and a line when that ends.

    Each line names the cause, its size and the remedy: a rank that is slower than before, a loader that is behind, slow
    messages between the ranks, or a callback, a validation or a checkpoint that takes longer. A line is printed within
    50 steps, or within a few seconds if steps are short, if a step takes at least 15 % longer and noise does not
    explain it. Steps that are slow from the start of a run are not reported; ``scaling`` finds their causes.

    Each rank measures its own time on the host. On a GPU, events measure the own time of the device, and no step waits
    for the device. Rank 0 reads the figures of the other ranks about once a second from torch's store, so no collective
    is added. Workers of parameter servers have no store, so each of them judges its own steps.
    """

    def __init__(self) -> None:
        self._clock: PartClock | None = None
        self._handles: list[RemovableHandle] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without measurements, because a copy of a trainer does not measure."""
        return {"_clock": None, "_handles": []}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set outside the class
            return
        device = trainer.strategy.root_device
        facts = self._facts = facts_of(trainer.strategy)
        self._stopwatch = None if device.type == "cpu" else Stopwatch(device)
        self._clock = host_clock(trainer, type(self).__name__)
        self._waits = Waits(self._clock, self._stopwatch)
        watch(self._waits)
        self._blocks = StepBlocks(self._clock, None if self._stopwatch is None else self._stopwatch.take)
        store = None
        if trainer.world_size > 1 and dist.is_initialized() and not facts.connects_hosts:
            store = PrefixStore("cnnstrategies_slow_steps", default_store())
        self._exchange = BlockExchange(store, trainer.global_rank, trainer.world_size)
        self._judges = store is None or trainer.global_rank == 0
        self._changes = SlowSteps()
        self._batches = 0
        self._in_batch = self._in_validation = False
        self._model: Any = None

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The set of trainable parameters may have changed, and DDP may have been created again.
        model = trainer.strategy.model
        if self._clock is None or not isinstance(model, DistributedDataParallel):
            return
        self._remove_hooks()
        first = next((parameter for parameter in model.module.parameters() if parameter.requires_grad), None)
        if first is not None:  # Usually it gets its gradient last. Then DDP waits for the sums of the gradients.
            self._handles.append(first.register_post_accumulate_grad_hook(self._waits.hold))
        self._handles += report_forwards(model)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._clock is not None:
            self._end_batch()
            self._in_batch = True
            self._clock.begin(COMPUTE)
            if self._stopwatch is not None:
                self._stopwatch.begin()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None:
            self._waits.release()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._clock is None:
            return
        self._end_batch()
        if self._stopwatch is not None:
            self._stopwatch.end()
        self._batches += 1
        if self._batches <= FIRST:
            self._blocks.discard()
            return
        block = self._blocks.end_step(trainer.global_step)
        # The store is lost if the process that serves it ends, and `FailTogether` reports that.
        with contextlib.suppress(RuntimeError, ValueError):
            if block is not None:
                self._exchange.add(block)
            if self._judges and (self._batches - FIRST) % STEPS == READ_AFTER:
                for blocks in self._exchange.complete():
                    for event in self._changes.add(blocks):
                        self._print(trainer, self._facts, event)

    def _end_batch(self) -> None:
        assert self._clock is not None
        self._waits.release()
        if self._in_batch:
            self._clock.end()
            self._in_batch = False

    def _print(self, trainer: Trainer, facts: StrategyFacts, event: SlowChange | StepsEnded) -> None:
        change = event.change if isinstance(event, StepsEnded) else event
        rank = trainer.global_rank
        if change.part == "waited" and facts.step_kind == "worker" and facts.steps_in_lockstep and rank != 0:
            return  # All workers wait for the slowest worker. It is enough that one of them says so.
        me = "the process" if trainer.world_size == 1 else f"worker {rank}"
        line = line_about_end(event) if isinstance(event, StepsEnded) else line_about(event, facts.step_kind, me)
        print(line, file=sys.stderr, flush=True)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None and not self._in_validation:
            self._in_validation = True
            self._clock.begin(VALIDATION)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None and self._in_validation:
            self._in_validation = False
            self._clock.end()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        clock, self._clock = self._clock, None
        if clock is not None:
            unwatch(self._waits)
            self._remove_hooks()
            clock.remove(trainer)

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()


REMEDIES = {
    "compute": "stop other programs on its machine or device, and look at its temperature; if it stays slow, give it a "
    "smaller share of the work, for example with strategy ddp_balanced",
    "data": "use more loader workers (num_workers), stop what else reads from the disk, or pack images into shards "
    "(cnnstrategies pack)",
    "rest": "look at loggers, at batch hooks and at other code that runs between the steps",
    "waited": "test the links with cnnstrategies doctor, or send less, for example with strategy ddp_bf16",
    "servers": "a worker whose own work takes longer prints its own line; otherwise look at the load of the servers, "
    "and at the link to them",
    VALIDATION: "validate less often (check_val_every_n_epoch), or on fewer batches (limit_val_batches)",
    CHECKPOINT: "look at the load of the checkpoints' disk, or save less often",
    "beside": "call it less often, or remove it",
}
ALL_RANKS = "look for other programs, for a lower clock of the devices, and for larger inputs"


def line_about(change: SlowChange, kind: StepKind, me: str) -> str:
    """Return the line about a change that has begun.

    Args:
        change: The change.
        kind: What a process computes in a step.
        me: Name of this process, if the change is in the blocks of one rank.
    """
    if not change.in_each_step:
        action = {VALIDATION: "validation takes", CHECKPOINT: "saving a checkpoint takes"}.get(change.name)
        remedy = REMEDIES.get(change.name, REMEDIES["beside"])
        text = f"{action or f'{change.name} takes'} {milliseconds(change.after)} each time"
        return f"slow since step {change.first}: {text} ({milliseconds(change.before)} before): {remedy}"
    size = f"a step takes {milliseconds(change.step_after)} ({milliseconds(change.step_before)} before)"
    is_alone = change.world == 1 and kind != "worker"
    subject = _ranks(change.ranks, change.world, me)
    is_plural = 1 < len(change.ranks) < change.world
    times = f"{milliseconds(change.after)} ({milliseconds(change.before)} before)"
    remedy = REMEDIES[change.part]
    if change.part == "compute":
        text = f"the own work of {subject} takes {times}"
        remedy = ALL_RANKS if is_alone or len(change.ranks) == change.world > 1 else remedy
    elif change.part == "data":
        text = f"{subject} {'wait' if is_plural else 'waits'} {times} for the data loader"
    elif change.part == "rest":
        text = f"{subject} {'are' if is_plural else 'is'} busy between the steps for {times}"
    elif change.part == "waited" and kind == "worker":
        text, remedy = f"{subject} waits {times} for the servers", REMEDIES["servers"]
    elif change.part == "waited":
        text = f"no rank's own work takes longer, but the ranks wait {times} for messages"
    else:
        text = f"{change.name} takes {times} on {subject}"
    return f"slow since step {change.first}: {text}; {size}: {remedy}"


def line_about_end(end: StepsEnded) -> str:
    """Return the line about a change that has ended."""
    change = end.change
    if not change.in_each_step:
        now = f"it takes {milliseconds(end.now)} now" if end.now else "it does not run any more"
        name = {CHECKPOINT: "saving a checkpoint"}.get(change.name, change.name)
        return f"not slow any more since step {end.first}: {name}; {now} ({milliseconds(change.after)} before)"
    times = f"{milliseconds(end.now)} ({milliseconds(change.step_after)} before)"
    return f"not slow any more since step {end.first}: a step takes {times}"


def milliseconds(seconds: float) -> str:
    """Return a time as text, in seconds from one second on, otherwise in milliseconds."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _ranks(ranks: Sequence[int], world: int, me: str) -> str:
    if world == 1:
        return me
    if len(ranks) == world:
        return "each rank"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
