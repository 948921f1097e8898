"""Loader of a stream's samples for one process."""

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from cnnstrategies._lightning_private import StreamPositions
from cnnstrategies._torch_private import number_of_collectives
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.runtime.groups import gather_tensors
from cnnstrategies.strategies.protocol import facts_of
from cnnstrategies.strategies.streams.agreement import until_all_end, until_own_end
from cnnstrategies.strategies.streams.part import StreamBatch, StreamPart, is_stateful
from cnnstrategies.strategies.streams.position import (
    EpochPosition,
    continue_epoch,
    division_of,
    gather_states,
    refuse,
)
from cnnstrategies.strategies.streams.reading import OwnReader, StreamReader, can_be_divided
from cnnstrategies.strategies.streams.recognition import describe_division, same_start
from cnnstrategies.strategies.streams.sampler import StreamedBatches


class StreamLoader:
    """Loader of this process's part of a stream, which can resume within an epoch.

    If the stream (an ``IterableDataset``) divides its samples among the processes or the workers itself, its own
    division is kept, and so is that of a loader that iterates in its own way. If not,
    :class:`~cnnstrategies.strategies.streams.part.StreamPart` divides the samples. All processes have the same number
    of training batches: if the stream's own division ends earlier on some processes, they repeat their last batch with
    weight 0.

    Other attributes of a loader are those of the user's own loader.

    Attributes:
        loader: The user's loader.
        knows_counts: Whether this process knows the numbers of samples of all processes in each batch.
        left_out: Number of samples at the end of the epoch that are in no batch, because ``drop_last`` is set.

    Args:
        loader: The user's loader.
        trainer: The trainer that uses the loader.
        is_evaluation: Whether the loader is not for training.
    """

    def __init__(self, loader: DataLoader[Any], trainer: Trainer, is_evaluation: bool) -> None:
        self.loader, self._trainer, self._is_evaluation = loader, trainer, is_evaluation
        self._facts = facts = facts_of(trainer.strategy)
        sampling = trainer.distributed_sampler_kwargs
        self._processes: int = 1 if sampling is None else sampling["num_replicas"]
        process = 0 if sampling is None else sampling["rank"]
        # Each rank of a pipeline runs the whole step, also if the rank has not loaded samples of the batch.
        fills = facts.steps_in_lockstep and not facts.has_global_batches
        self._part = StreamPart(
            loader.dataset,
            loader.batch_size,
            loader.collate_fn,
            loader.drop_last,
            self._processes,
            process,
            loader.num_workers,
            is_evaluation,
            fills,
            int(os.getenv("PL_GLOBAL_SEED", "0")),
        )
        self._reads_own_way = not can_be_divided(loader)
        self._reader: OwnReader | StreamReader
        if self._reads_own_way:
            self._reader = OwnReader(loader, self._part)
        else:
            self._reader = StreamReader(loader, self._part, self._gather)
        self._agrees = fills and self._processes > 1 and facts.ranks_per_batch == 1 and not is_evaluation
        accumulated = trainer.accumulate_grad_batches
        self._numbers = StreamedBatches(loader.batch_size, self._processes, process, accumulated, loader.drop_last)
        # Positions of the samples of each batch in the stream, if Lightning's prediction writers read them.
        self._positions = StreamPositions() if trainer.state.fn == "predict" else None
        self._group: dist.ProcessGroup | None = None
        self._started: Iterator[StreamBatch] | None = None
        self._resume: dict[str, Any] | None = None
        self._length: int | None = None
        self._position = EpochPosition()
        self.left_out = 0

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # While an instance is unpickled, it does not have this attribute yet.
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def sampler(self) -> Any:
        """The numbers of samples of the processes, or the sampler of the user's loader.

        Before the first batch it is the user's, because a strategy must not yet take the stream for divided.
        """
        return self._numbers if self._processes > 1 and self._part.division is not None else self.loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The positions of the samples for Lightning's prediction writers, or the batch sampler of the user's loader.

        The positions are those of one device. They are not known if the stream divides its samples itself.
        """
        positions = self._positions
        return positions if positions is not None and positions.seen_batch_indices else self.loader.batch_sampler

    # Attributes that Lightning sets

    @property
    def worker_init_fn(self) -> Any:
        """The function of the loader that reads the stream. Lightning sets this attribute to seed the workers."""
        return self._reader.loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._reader.loader.worker_init_fn = function

    # Facts

    @property
    def agrees_on_end(self) -> bool:
        """Whether all processes have the same number of batches in an epoch."""
        division = self._part.division
        return division is not None and (self._agrees or not division.by_process)

    @property
    def knows_counts(self) -> bool:
        """Whether this process knows the numbers of samples of all processes in each batch."""
        return self.agrees_on_end

    def own_count(self, batch: int) -> int:
        """Return the number of samples of this process in a batch of the current epoch; 0 if it has not loaded it."""
        return self._numbers.own_count(batch)

    def describe_stream(self) -> str:
        """Return a text about the division of the stream, for the start panel."""
        division, name = self._part.division, type(self.loader.dataset).__name__
        if self._reads_own_way:
            return f"{type(self.loader).__name__} divides the samples of {name} in its own way"
        assert division is not None, "the first batch has been loaded"
        return describe_division(division, name, self._processes, self.loader.num_workers)

    def counts_of(self, batch: int) -> tuple[int, ...]:
        """Return the number of samples of each process in a batch of the current epoch."""
        return self._numbers.counts(batch)

    def __len__(self) -> int:
        """Return the number of batches of an epoch. All processes must call this before the first batch.

        Raises:
            TypeError: The length of the stream, or its division among workers, is not known.
        """
        if self._length is None:
            self._length = self._find_length()
        return self._length

    def _find_length(self) -> int:
        # Some streams start again if they are asked for their length, so they are asked once, before the first sample.
        batches, samples = len(self.loader), sized_len(self.loader.dataset)
        if self._reads_own_way:
            return max(numbers[0] for numbers in self._gather([batches]))
        if self._part.division is None:
            self._started = self._start()
        division = self._part.division
        assert division is not None
        if samples is None or (division.by_worker and self.loader.num_workers > 1):
            # Each worker may have an incomplete batch. With torch's number of batches Lightning would end too early.
            raise TypeError(f"{type(self.loader.dataset).__name__} has no length for each worker")
        if division.by_process:
            return max(numbers[0] for numbers in self._gather([batches]))
        size = self._processes * (self.loader.batch_size or 1)
        whole, rest = divmod(samples, size)
        held = self._is_evaluation and rest < self._processes and whole
        return whole + bool(rest and not self.loader.drop_last and not held)

    # Batches

    def __iter__(self) -> Iterator[Any]:
        """Yield this process's batches of an epoch. In a resumed epoch, yield the remaining batches."""
        # torch's iterator has a length that is an error, so its truth must not be asked for.
        batches = self._start() if self._started is None else self._started
        self._started = None
        if self._part.division is not None and self._part.division.by_process:
            batches = self._agreed(batches)
        for batch in batches:
            if batch.left_out:
                self.left_out += batch.left_out
                continue
            self._numbers.note(self._position.batches, batch.counts)
            self._position.add(batch.worker, self._samples_of_batch)
            if self._positions is not None and batch.first >= 0:
                self._note_positions(range(batch.first, batch.first + sum(batch.counts)))
            inner: Any = self._reader.loader
            if is_stateful(inner) and not self._is_evaluation:
                self._position.keep_state(inner.state_dict())
            yield batch.batch
        self._position.is_exhausted = True

    def _start(self) -> Iterator[StreamBatch]:
        loop: Any = self._trainer.fit_loop
        position = self._position
        epoch = 0 if self._is_evaluation else loop.epoch_progress.current.processed
        position.begin(epoch, max(1, self.loader.num_workers))
        self.left_out = discarded = 0
        self._numbers.begin()
        if self._positions is not None:
            self._positions.seen_batch_indices = []
        resume, self._resume = self._resume, None
        if resume is not None and resume["ended"] and resume["epoch"] == epoch:
            position.epoch += 1  # Lightning counts this epoch as finished a little later.
        elif resume is not None and resume["epoch"] == epoch:
            discarded = continue_epoch(resume, position, self._reader, self._trainer.global_rank)
        position.continue_here()
        batches = self._reader.start(position.epoch)
        if position.batches and self._part.division != division_of(resume):
            refuse(resume, self._part, self.loader.num_workers)
        before, now = [] if resume is None else resume["first"], self._reader.first
        if before and now and not same_start(before, now):
            rank_zero_warn(
                f"the first samples of {type(self.loader.dataset).__name__} are not those of the run that saved the "
                "checkpoint: if the stream's order has changed, samples of this epoch may be repeated or left out; "
                "seed the stream's order"
            )
        for batch in islice(batches, discarded):
            position.used[batch.worker] += self._samples_of_batch
        return batches

    def _agreed(self, batches: Iterator[StreamBatch]) -> Iterator[StreamBatch]:
        name = type(self.loader.dataset).__name__
        if self._agrees:
            return until_all_end(batches, self._gather_in_epoch, name, self._reader.any_batch)
        in_replicas = self._processes == self._trainer.world_size > 1 and not self._facts.has_global_batches
        if self._is_evaluation and in_replicas and dist.is_initialized() and not self._facts.connects_hosts:
            return until_own_end(batches, self._gather_in_epoch, name, number_of_collectives)
        return batches

    def _note_positions(self, of_global_batch: range) -> None:
        assert self._positions is not None
        rank, ranks = self._numbers.rank, self._processes
        mine = of_global_batch if self._facts.has_global_batches else of_global_batch[rank::ranks]
        self._positions.seen_batch_indices.append(list(mine))

    @property
    def _samples_of_batch(self) -> int:
        """Number of samples of the stream in a whole global batch."""
        return self._processes * (self.loader.batch_size or 1)

    # Exchange of numbers

    def _gather(self, row: list[int]) -> list[list[int]]:
        if self._trainer.world_size == 1:
            return [row]
        values = torch.tensor(row, device=self._trainer.strategy.root_device)
        rows: list[list[int]] = self._facts.gather_from_ranks(values).tolist()
        return rows

    def _gather_in_epoch(self, row: list[int]) -> list[list[int]]:
        """Exchange numbers as :meth:`_gather`, without the device, whose work would be waited for."""
        if not dist.is_initialized() or self._facts.connects_hosts:
            return self._gather(row)
        if self._group is None:
            self._group = dist.new_group(backend="gloo")  # type: ignore[assignment]  # It is -100 outside the group.
        rows: list[list[int]] = gather_tensors(torch.tensor(row), self._group).tolist()
        return rows

    # Position in the epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, for a checkpoint. All processes must call this.

        A stream that does not divide its samples itself can continue with another number of processes. If the user's
        loader has a state, the states of the loaders of all processes are saved.
        """
        if self._resume is not None:
            return self._resume
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        trained = min(progress.current.processed, self._position.batches)
        states = []
        if is_stateful(self._reader.loader) and self._trainer.state.fn == "fit":
            states = gather_states(self._position.state_after(trained), self._gather)
        return {
            **self._position.numbers_after(trained),
            "processes": self._processes,
            "workers": self.loader.num_workers,
            "division": list(self._part.division or (False, False)),
            "draws_alike": self._part.draws_alike,
            "first": self._reader.first,
            "states": states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches that were used before a state was saved, if the next epoch is that of the state.

        Raises:
            ConfigurationError: The state was saved by a loader of another kind.
        """
        if "used" not in state or "division" not in state:
            raise ConfigurationError(
                f"the checkpoint was saved within an epoch by another loader, and this run reads the stream "
                f"{type(self.loader.dataset).__name__}: use the same data, or resume from a checkpoint of an epoch's "
                "end"
            )
        self._resume, self._started = dict(state), None
        self._reader.restart()


def divide_stream(loader: Any, trainer: Trainer, is_evaluation: bool) -> Any:
    """Return a loader of this process's part of a stream. Other loaders are returned unchanged.

    Args:
        loader: A loader of the user.
        trainer: The trainer that uses the loader.
        is_evaluation: Whether the loader is not for training.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return loader
    if isinstance(loader.dataset, IterDataPipe):
        return loader  # torch's loader divides the data set.
    return StreamLoader(loader, trainer, is_evaluation)
