"""Divide a global batch into microbatches, and determine the order of the batch's rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import torch
from torch import Tensor

from cnnstrategies.shares import NORMALISED_TOGETHER as NORMALISED_TOGETHER
from cnnstrategies.shares import turns

CPU = torch.device("cpu")
PER_STAGE_AND_REPLICA = 4


@dataclass(frozen=True)
class Split:
    """The division of one global batch into microbatches.

    Replica r of the first stage has ``rows[r]`` samples and divides them into its microbatches, whose sizes differ by
    at most one sample. If it has too few samples, its last microbatches are empty, and the step skips them.

    A batch can be smaller than usual, like the last batch of an epoch. Microbatches then keep about their usual size,
    and the remaining microbatches are empty, because BatchNorm works better with a few full microbatches than with many
    small ones.

    The rows of the global batch are in the order in which one process alone would load them. The samplers give the
    samples in this order to the replicas in turn.

    Attributes:
        rows: Number of samples of each replica of the first stage.
        runs: For each microbatch of a full step, the replica of the first stage that runs it.
        usual: Average number of samples of a replica in a full step; None if this step counts as full.
    """

    rows: tuple[int, ...]
    runs: tuple[int, ...]
    usual: int | None = None

    @property
    def microbatches(self) -> int:
        """Number of microbatches of a full step, over all replicas."""
        return len(self.runs)

    @property
    def samples(self) -> int:
        """Number of samples of the global batch."""
        return sum(self.rows)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """For each microbatch, its first row and the row after its last row, as indices into the replica's samples."""
        sizes = []
        for replica, rows in enumerate(self.rows):
            filled = self._filled(rows, self.runs.count(replica) or 1)
            size, extra = divmod(rows, filled)
            sizes.append(iter([size + 1] * extra + [size] * (filled - extra)))
        stops = [0] * len(self.rows)
        bounds = []
        for replica in self.runs:
            start = stops[replica]
            stops[replica] += next(sizes[replica], 0)
            bounds.append((start, stops[replica]))
        return tuple(bounds)

    def _filled(self, rows: int, microbatches: int) -> int:
        """Return the number of microbatches that get samples of a replica.

        Args:
            rows: Number of the replica's samples.
            microbatches: Number of the replica's microbatches in a full step.
        """
        full_batch = (self.usual or 0) * len(self.rows)
        if self.samples >= full_batch:
            return microbatches
        size = -(-full_batch // self.microbatches)
        filled = -(-rows // size)
        if size > 1 and filled and rows // filled == 1:
            filled -= 1  # BatchNorm refuses a microbatch of one sample, so another microbatch takes the sample.
        return min(microbatches, max(1, filled))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each microbatch."""
        return tuple(stop - start for start, stop in self.bounds)

    @cached_property
    def positions(self) -> Tensor:
        """Row of each sample in the global batch (N,): first the samples of replica 0, then those of replica 1, etc."""
        return torch.tensor(list(chain(*turns(self.rows))), dtype=torch.int64)

    def global_rows(self, *microbatches: int, device: torch.device = CPU) -> Tensor:
        """Return the indices (n,) of the microbatches' rows in the global batch, one microbatch after the other."""
        return rows_on(self, microbatches, device)

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows of the global batch (N, ...), in the order of the global batch.

        Args:
            parts: The rows (n, ...) of each replica of the first stage.
        """
        if len(self.rows) == 1:
            return parts[0]
        joined = torch.cat(list(parts))
        result = torch.empty_like(joined)
        by_replica = sorted(range(self.microbatches), key=self.runs.__getitem__)
        result[self.global_rows(*by_replica, device=joined.device)] = joined
        return result


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def rows_on(split: Split, microbatches: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the result of :meth:`Split.global_rows` from a cache.

    The cache avoids copying the indices to the device again, because the host waits for such a copy.
    """
    rows = []
    for microbatch in microbatches:
        offset = sum(split.rows[: split.runs[microbatch]])
        start, stop = split.bounds[microbatch]
        rows.append(split.positions[offset + start : offset + stop])
    return torch.cat(rows).to(device)


def default_microbatches(replicas: Sequence[int], samples: int | None = None) -> int:
    """Return the default number of microbatches of a step.

    The default is 4 times the number of stages times the largest number of replicas of a stage. If the network has
    BatchNorm, the number is reduced so that each microbatch has at least 8 samples, but every replica keeps at least
    one microbatch.

    Args:
        replicas: Number of replicas of each stage.
        samples: Number of samples of a batch on each replica of the first stage; None if this number is not known, or
            if the network does not have BatchNorm.
    """
    widest = max(replicas)
    microbatches = PER_STAGE_AND_REPLICA * len(replicas) * widest
    if samples is not None:
        microbatches = min(microbatches, replicas[0] * (samples // NORMALISED_TOGETHER))
        # With a multiple of the widest stage's replicas, all its replicas run equal numbers of microbatches.
        microbatches = max(widest, microbatches // widest * widest)
    return microbatches
