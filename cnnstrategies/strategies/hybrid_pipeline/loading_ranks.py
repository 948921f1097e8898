"""Decide which ranks of a pipeline load a loader's data, and hand their batches over to the first stage."""

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from cnnstrategies.data.division import Row, StreamComparison, describe_batch, divided_among, is_divided
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.models.joined_batches import joined
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.shares.dealing import turns

FIRST = 16  # Largest number of batches that are compared before the first step.


class LoadingRanks:
    """The ranks that load the batches of one loader: those of the first stage, or all ranks.

    Usually the replicas of the first stage load the data, and all other ranks load nothing. If the user's own code has
    divided the data among all ranks, as for ``ddp``, all ranks load their parts. Each rank then hands its batches over
    to a replica of the first stage, so that the global batch consists of what all ranks have loaded together.

    Attributes:
        all_load: Whether all ranks load; None if this is known only after the first batches.

    Args:
        loader: This rank's loader.
        placement: The numbering of the ranks.
        rank: This rank.
        gather: Function that sends a row of numbers to all ranks, and returns the rows of all ranks in rank order.
        transport: Function that returns the transport with which batches are handed over.

    Raises:
        ConfigurationError: A sampler divides the data among a number of processes that does not fit the run.
    """

    def __init__(
        self,
        loader: Any,
        placement: Placement,
        rank: int,
        gather: Callable[[Row], list[Row]],
        transport: Callable[[], Transport],
    ) -> None:
        self._placement = placement
        self._rank = rank
        self._gather = gather
        self._transport = transport
        self._sources = list(placement.ranks(0))
        self._others = [other for other in range(placement.world_size) if other not in self._sources]
        self.all_load = self._all_load(loader)

    @property
    def number(self) -> int:
        """Number of ranks that load, as far as this is known."""
        return self._placement.world_size if self.all_load else len(self._sources)

    @property
    def replicas(self) -> int:
        """Number of replicas of the first stage."""
        return len(self._sources)

    @property
    def in_first_stage(self) -> bool:
        """Whether this rank belongs to the first stage."""
        return self._rank in self._sources

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield this rank's part of each global batch, or None if this rank has no part of a global batch.

        The iterator does not end: after a rank's last batch it yields None. All ranks must call this.

        Args:
            batches: The batches of this rank's own loader.
        """
        first: Sequence[Any] = ()
        if self.all_load is None:
            first = self._compare(batches)
        loads = self.all_load or self.in_first_stage
        if not loads and isinstance(batches, Generator):
            batches.close()  # Ends the workers of a loader whose first batches have been compared.
        mine: Iterator[Any] = chain(first, batches) if loads else iter(())
        while True:
            batch = next(mine, None)
            yield self._handed_over(batch) if self.all_load else batch

    def indices(self, loaded: Sequence[int]) -> list[int]:
        """Return on rank 0 the indices of a global batch's samples, in the order of the rows. All ranks must call this.

        Args:
            loaded: The indices that this rank has loaded.
        """
        transport = self._transport()
        if self._rank:
            for sending in transport.send_object(list(loaded), 0, "the indices of a batch"):
                sending.wait()
            return []
        lists = [list(loaded)]
        for rank in range(1, self._placement.world_size):
            lists.append(transport.receive_object(rank, "the indices of a batch"))
        replicas = len(self._sources)
        parts = [list(chain(*lists[replica::replicas])) for replica in range(replicas)]
        ordered = [0] * sum(map(len, parts))
        for part, places in zip(parts, turns([len(part) for part in parts]), strict=True):
            for index, place in zip(part, places, strict=True):
                ordered[place] = index
        return ordered

    def _all_load(self, loader: Any) -> bool | None:
        declared = divided_among(loader)
        replicas, world = len(self._sources), self._placement.world_size
        if declared is not None and declared[1] not in (1, replicas, world):
            raise ConfigurationError(
                f"{declared[0]} has num_replicas={declared[1]}: hybrid_pipeline has {replicas} loading process"
                f"{'es' if replicas > 1 else ''} in its first stage and {world} processes in all; leave "
                f"num_replicas out, set it to {world}, or use **trainer.distributed_sampler_kwargs"
            )
        return is_divided(loader, world, self._gather, self._sources)

    def _compare(self, batches: Iterator[Any]) -> list[Any]:
        """Determine from the first batches whether all ranks load, and return this rank's batches."""
        comparison = StreamComparison(self._sources, self._others)
        loaded: list[Any] = []
        while self.all_load is None:
            batch = next(batches, None)
            loaded.append(batch)
            rows = self._gather(describe_batch(batch))
            self.all_load = comparison.add(rows)
            if self.all_load is None and (len(loaded) == FIRST or not any(row[0] for row in rows)):
                self.all_load = comparison.decide()
        return [batch for batch in loaded if batch is not None]

    def _handed_over(self, batch: Any) -> Any:
        """Send this rank's batch to its replica of the first stage, and return what this rank has received, joined.

        The replicas of the first stage take the ranks in turn, so that the rows of equally divided data are in the
        order in which a single process would load them.
        """
        transport, replicas = self._transport(), len(self._sources)
        target = self._sources[self._rank % replicas]
        sendings = [] if target == self._rank else transport.send_object([batch], target, "a batch")
        parts: list[Any] = []
        if self.in_first_stage:
            for rank in range(self._sources.index(self._rank), self._placement.world_size, replicas):
                parts += [batch] if rank == self._rank else transport.receive_object(rank, "a batch")
        for sending in sendings:
            sending.wait()
        present = [part for part in parts if part is not None]
        return joined(present) if present else None


def warn_of_shares(loader: Any) -> None:
    """Warn that a loader that divides the data among all ranks does not follow the ranks' shares."""
    rank_zero_warn(
        f"shares are ignored for the loader {type(loader).__name__}, which divides the data among all ranks itself: "
        "for shares use a DataLoader with a batch_size that all ranks build equally, and leave use_distributed_sampler "
        "true"
    )
