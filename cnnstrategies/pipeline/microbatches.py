"""Division of a global batch into microbatches, with the order of its rows."""

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
    """Division of one global batch into microbatches.

    Replica r of the first stage holds ``rows[r]`` samples and cuts them into its microbatches, whose sizes differ by at
    most one. If there are too few samples, the last microbatches are empty, and the step leaves them out. If a batch is
    smaller than usual, as the last batch of an epoch may be, only as many microbatches are filled as the samples need
    at the usual size, because batch normalisation works best with full microbatches.

    The rows of the global batch have the order of one process: samplers give samples to the replicas in turn.

    Attributes:
        rows: Number of samples of each replica of the first stage.
        runs: For each microbatch of a full step the replica of the first stage that runs it.
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
        """For each microbatch the first row and the row after the last, counted in its replica's samples."""
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
        """Return the number of microbatches over which a replica's samples are spread.

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
            filled -= 1  # Batch normalisation refuses a single sample: another microbatch takes the sample instead.
        return min(microbatches, max(1, filled))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each microbatch."""
        return tuple(stop - start for start, stop in self.bounds)

    @cached_property
    def positions(self) -> Tensor:
        """Row in the global batch of each sample (N,), with the samples ordered replica by replica."""
        return torch.tensor(list(chain(*turns(self.rows))), dtype=torch.int64)

    def global_rows(self, *microbatches: int, device: torch.device = CPU) -> Tensor:
        """Return the rows of the global batch that belong to microbatches (n,), microbatch after microbatch."""
        return rows_on(self, microbatches, device)

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the rows of the global batch (N, ...), assembled from the rows of each replica (n, ...)."""
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
    """Return the rows of :meth:`Split.global_rows`, from a cache: the host would wait for each copy to a device."""
    rows = []
    for microbatch in microbatches:
        offset = sum(split.rows[: split.runs[microbatch]])
        start, stop = split.bounds[microbatch]
        rows.append(split.positions[offset + start : offset + stop])
    return torch.cat(rows).to(device)


def default_microbatches(replicas: Sequence[int], samples: int | None = None) -> int:
    """Return the default number of microbatches of a step.

    The default is 4 for each stage and each replica of the widest stage. With batch normalisation the number is lower
    if necessary, so that each microbatch has at least 8 samples, as long as every replica has a microbatch.

    Args:
        replicas: Number of replicas of each stage.
        samples: Samples of a batch in each replica of the first stage; None if the number is not known, or if the
            network has no batch normalisation.
    """
    widest = max(replicas)
    microbatches = PER_STAGE_AND_REPLICA * len(replicas) * widest
    if samples is not None:
        microbatches = min(microbatches, replicas[0] * (samples // NORMALISED_TOGETHER))
        # Round down to a multiple of the widest stage's replicas, so that they run equally many.
        microbatches = max(widest, microbatches // widest * widest)
    return microbatches
