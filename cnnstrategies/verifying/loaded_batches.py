"""Batches that the ranks of a run have loaded: samples that are left out or repeated, and ranks with the same batches.

One device trains on the ranks' batches, so the comparison of the runs does not show these faults.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from cnnstrategies.models.joined_batches import tensors_in
from cnnstrategies.verifying.contents import contents_of, other_contents

LOADER = "loaded.json"  # File with facts about a rank's loader.
REMEDY = "leave trainer.use_distributed_sampler on, or give the loader a sampler for each process"
Samples = tuple[bytes, ...]  # Digests of the samples of a batch.


@dataclass(frozen=True)
class RankBatches:
    """Batches that a rank has loaded in a run.

    Attributes:
        rank: The rank.
        batches: The batches, in their order. Each sample counts by its row of the batch's first tensor.
        loader: Facts about the rank's loader; empty if the rank does not load batches of its own.
    """

    rank: int
    batches: tuple[Samples, ...]
    loader: dict[str, Any]

    def repeated(self, ends: Sequence[int], shuffles: bool) -> tuple[int, int] | None:
        """Return the numbers of two equal batches, which a loader of different samples does not load.

        Such batches are equal batches of one epoch, and the first batches of two epochs if all batches that both epochs
        have in common are equal, and at least two of them differ. Batches of equal samples do not count.

        Args:
            ends: See :class:`LoadedBatches`.
            shuffles: Whether each epoch should have an order of its own.
        """
        batches = self.batches
        bounds = [min(bound, len(batches)) for bound in (0, *ends)]  # A rank may have no batches of its own.
        for start, end in itertools.pairwise([*bounds, len(batches)]):
            numbers: dict[Samples, int] = {}
            for number in range(start, end):
                first = numbers.setdefault(batches[number], number)
                if first != number and len(set(batches[number])) > 1:
                    return first, number
            common = min(end - start, [*bounds, 0][1])
            is_repeated = start and common > 1 and batches[:common] == batches[start : start + common]
            if shuffles and is_repeated and len(set(batches[:common])) > 1:
                return 0, start
        return None


@dataclass(frozen=True)
class LoadedBatches:
    """Batches that all ranks have loaded in a run.

    Attributes:
        folder: Folder of the run, with a folder for each rank.
        ends: For each epoch, the number of batches that a rank has loaded from the start of the run to the epoch's end.
    """

    folder: Path
    ends: Sequence[int] = ()

    @cached_property
    def ranks(self) -> list[RankBatches]:
        """The batches of the ranks, in rank order."""
        folders = sorted(self.folder.glob("[0-9]*/"), key=lambda folder: int(folder.name))
        return [_batches_of(folder) for folder in folders]

    @property
    def all_samples(self) -> list[bytes]:
        """All samples that the ranks have loaded, with repetitions."""
        return [sample for rank in self.ranks for batch in rank.batches for sample in batch]

    @property
    def _loaders(self) -> list[RankBatches]:
        return [rank for rank in self.ranks if rank.loader]

    def in_an_epoch(self) -> int | None:
        """Return the number of samples that all ranks together load in an epoch; None if the number is not known."""
        counts = [rank.loader["count"] for rank in self._loaders]
        if None in counts and self.ends:
            counts = [sum(map(len, rank.batches[: self.ends[0]])) for rank in self.ranks]
        return None if None in counts else sum(counts)

    def left_out(self, whole: int | None) -> tuple[int, int] | None:
        """Return the number of samples that no rank loads in an epoch, and the number of samples in the data set.

        The result is None if these numbers are not known.

        Args:
            whole: Number of samples that one process loads in an epoch; None if the number is not known.
        """
        if drawn := [rank.loader["drawn"] for rank in self._loaders if rank.loader["drawn"]]:
            size = drawn[0]["size"]
            missing = size - len(set().union(*(record["indices"] for record in drawn)))
            if missing > drawn[0]["allowed"]:
                return missing, size
        loaded = self.in_an_epoch()
        if whole is None or loaded is None:
            return None
        return (0 if drawn and drawn[0]["allowed"] else max(0, whole - loaded)), whole

    def equals(self, other: "LoadedBatches") -> bool:
        """Return whether the ranks of another run have loaded the same batches."""
        return [rank.batches for rank in self.ranks] == [rank.batches for rank in other.ranks]

    def same_batches(self) -> tuple[int, int] | None:
        """Return two ranks that have loaded the same batches, or None if there are no such ranks.

        If all samples of the run are equal, the result is None, because then the batches of a correct loader are equal
        as well.
        """
        first_ranks: dict[tuple[Samples, ...], int] = {}
        ranks = [rank for rank in self.ranks if rank.batches] if len(set(self.all_samples)) > 1 else []
        for rank in ranks:
            first = first_ranks.setdefault(rank.batches[: len(ranks[0].batches)], rank.rank)
            if first != rank.rank:
                return first, rank.rank
        return None

    def faults(self, whole: int | None) -> Iterator[str]:
        """Yield texts for the user about samples that are left out, or loaded several times in an epoch.

        Args:
            whole: Number of samples that one process loads in an epoch; None if the number is not known.
        """
        missing, size = self.left_out(whole) or (0, 0)
        if missing:
            yield (
                f"an epoch leaves out {missing} of {size} samples, because the loader gives them to other processes, "
                "or the processes divide different orders (set_epoch and seed must be equal)"
            )
        loaded = self.in_an_epoch()
        if repetition := next(self._repetitions(), None):
            yield repetition
        elif ranks := self.same_batches():
            yield f"processes {ranks[0]} and {ranks[1]} load the same batches: {REMEDY}"
        elif (
            whole and loaded is not None and loaded >= 2 * whole and sum(bool(rank.batches) for rank in self.ranks) > 1
        ):
            yield f"an epoch loads {loaded} samples, and {whole} in one process: {REMEDY}"

    def _repetitions(self) -> Iterator[str]:
        for rank in self._loaders:
            pair = None if rank.loader["repeats"] else rank.repeated(self.ends, rank.loader["shuffles"])
            if pair and pair[1] in self.ends:
                yield f"process {rank.rank} loads epochs in the same order: call the sampler's set_epoch"
            elif pair:
                batches = f"{pair[0] + 1} and {pair[1] + 1}"
                yield f"process {rank.rank} loads the same samples in batches {batches} of the run"

    def other_contents(self, loader: Any) -> str:
        """Return which rank loads other contents than one process, as a text; empty if there is no such rank.

        Args:
            loader: The user's training loader in one process.
        """
        contents = {rank.rank: rank.loader["contents"] for rank in self._loaders}
        if len(contents) < 2 or None in contents.values():
            return ""
        # Samples that differ when they are loaded again are random, although the random numbers have a seed.
        return other_contents(contents, contents_of(loader, times=2))


def _batches_of(folder: Path) -> RankBatches:
    batches, facts = [], folder / LOADER
    for number in range(len([*folder.glob("*.pt")])):
        first = next(tensors_in(torch.load(folder / f"{number}.pt", weights_only=False)), torch.empty(0))
        rows = (sample.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for sample in first)
        batches.append(tuple(hashlib.sha256(row).digest() for row in rows))
    return RankBatches(int(folder.name), tuple(batches), json.loads(facts.read_text()) if facts.exists() else {})
