"""Divide a global batch into microbatches, and determine the order of the batch's rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import torch
from torch import Tensor

from cnnstrategies.shares.dealing import NORMALISED_TOGETHER, turns

CPU = torch.device("cpu")
Images = Tensor | tuple[Tensor, ...]  # The input of the network: a tuple if the network takes several tensors.
PER_STAGE_AND_REPLICA = 4


@dataclass(frozen=True)
class Split:
    """The division of one global batch into microbatches.

    Replica r of the first stage has ``rows[r]`` samples and divides them into its microbatches, whose sizes differ by
    at most one sample. If a replica has too few samples, its last microbatches are empty, and the step skips the empty
    microbatches.

    A batch can be smaller than the other batches of its epoch, for example the last batch. Microbatches then keep about
    the size that they have in the other batches, and the remaining microbatches are empty, because BatchNorm works
    better with a few full microbatches than with many small ones.

    The rows of the global batch are in the order in which a single process would load them. The samplers distribute
    the samples to the replicas in turn, in this order.

    Attributes:
        rows: Number of samples of each replica of the first stage.
        runs: For each microbatch, including empty microbatches, the replica of the first stage that runs the
            microbatch.
        usual: Mean number of samples that a replica has in a batch of the usual size; None if this batch counts as a
            batch of the usual size.
    """

    rows: tuple[int, ...]
    runs: tuple[int, ...]
    usual: int | None = None

    @property
    def microbatches(self) -> int:
        """Number of microbatches over all replicas, including microbatches that are empty in this batch."""
        return len(self.runs)

    @property
    def samples(self) -> int:
        """Number of samples of the global batch."""
        return sum(self.rows)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """For each microbatch, the index of its first row, and the index of the row after its last row.

        The indices refer to the samples of the replica that runs the microbatch in the first stage.
        """
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
        """Return the number of a replica's microbatches that get samples. The replica's other microbatches stay empty.

        Args:
            rows: Number of the replica's samples.
            microbatches: Number of the replica's microbatches, including empty microbatches.
        """
        full_batch = (self.usual or 0) * len(self.rows)
        if self.samples >= full_batch:
            return microbatches
        size = -(-full_batch // self.microbatches)
        filled = -(-rows // size)
        if size > 1 and filled and rows // filled == 1:
            filled -= 1  # BatchNorm refuses a microbatch of one sample, so fewer microbatches get more samples each.
        return min(microbatches, max(1, filled))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each microbatch."""
        return tuple(stop - start for start, stop in self.bounds)

    @cached_property
    def positions(self) -> Tensor:
        """Index of each sample's row in the global batch, as a tensor (N,).

        The samples of replica 0 come first, then the samples of replica 1, and so on.
        """
        return torch.tensor(list(chain(*turns(self.rows))), dtype=torch.int64)

    def global_rows(self, *microbatches: int, device: torch.device = CPU) -> Tensor:
        """Return the indices of the microbatches' rows in the global batch, as a tensor (n,).

        The indices are in the order of the ``microbatches``, and within a microbatch in the order of its samples.
        """
        return rows_on(self, microbatches, device)

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the rows of all replicas, and return the rows of the global batch (N, ...) in their order.

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
    """Return the indices of the microbatches' rows in the global batch; see :meth:`Split.global_rows`.

    Results are cached, because the process waits for each copy from CPU memory to the device.
    """
    rows = []
    for microbatch in microbatches:
        offset = sum(split.rows[: split.runs[microbatch]])
        start, stop = split.bounds[microbatch]
        rows.append(split.positions[offset + start : offset + stop])
    return torch.cat(rows).to(device)


def default_microbatches(replicas: Sequence[int], samples: int | None = None) -> int:
    """Return the default number of microbatches of a step.

    The default is 4 S R, where S is the number of stages and R is the largest number of replicas of a stage. If the
    network has BatchNorm, the number is reduced so that each microbatch has at least 8 samples, but every replica keeps
    at least one microbatch.

    Args:
        replicas: Number of replicas of each stage.
        samples: Number of samples of a batch on each replica of the first stage; None if this number is not known, or
            if the network does not have BatchNorm.
    """
    widest = max(replicas)
    microbatches = PER_STAGE_AND_REPLICA * len(replicas) * widest
    if samples is not None:
        microbatches = min(microbatches, replicas[0] * (samples // NORMALISED_TOGETHER))
        # The number is rounded down to a multiple of the largest number of replicas. In the stage with that number of
        # replicas, all replicas then run equal numbers of microbatches.
        microbatches = max(widest, microbatches // widest * widest)
    return microbatches
