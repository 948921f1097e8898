"""How a global batch is cut into microbatches, and in which order its rows stand."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from cnnstrategies.shares import NORMALISED_TOGETHER as NORMALISED_TOGETHER

CPU = torch.device("cpu")
PER_STAGE_AND_REPLICA = 4


@dataclass(frozen=True)
class Split:
    """The microbatches of one global batch.

    Replica r of the first stage holds ``rows[r]`` samples and cuts them into its microbatches r, r + R, r + 2 R and
    so on, whose sizes differ by at most one; the last ones are empty when there are too few samples, and are left out
    of the step. Where replicas usually have more samples, as before the last batch of an epoch, no more microbatches
    are filled than the samples need at their usual size: batch normalisation has use for full ones.

    The rows of the global batch are ordered as one process would have them: the i-th samples of all replicas, then
    the next ones, because samplers deal the samples out to the replicas in turn.

    Attributes:
        microbatches: Microbatches of a full step, over all replicas.
        usual: Samples that a replica of the first stage has in a full step; None where each step is one.
    """

    rows: tuple[int, ...]
    microbatches: int
    usual: int | None = None

    @property
    def samples(self) -> int:
        """Samples of the global batch."""
        return sum(self.rows)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """For each microbatch the first row and the row after the last, counted in its replica's samples."""
        replicas = len(self.rows)
        # For each replica how many of its microbatches are filled, their size, and how many have one more.
        shares = []
        for replica, rows in enumerate(self.rows):
            filled = self._filled(rows, len(range(replica, self.microbatches, replicas)) or 1)
            shares.append((filled, *divmod(rows, filled)))
        bounds = []
        for microbatch in range(self.microbatches):
            index, replica = divmod(microbatch, replicas)
            filled, size, extra = shares[replica]
            start = min(index, filled) * size + min(index, extra)
            bounds.append((start, start + (size + (index < extra) if index < filled else 0)))
        return tuple(bounds)

    def _filled(self, rows: int, own: int) -> int:
        """How many of a replica's own microbatches get samples, if there are as many samples."""
        if self.usual is None or rows >= self.usual:
            return own
        size = -(-self.usual // own)
        filled = -(-rows // size)
        if size > 1 and filled and rows // filled == 1:
            filled -= 1  # Batch normalisation refuses a single sample; one microbatch has one more instead.
        return max(1, filled)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each microbatch."""
        return tuple(stop - start for start, stop in self.bounds)

    @cached_property
    def positions(self) -> Tensor:
        """Row in the global batch of each sample, with the samples ordered replica by replica (N,)."""
        rows = torch.tensor(self.rows)
        replicas = torch.repeat_interleave(torch.arange(len(rows)), rows)
        firsts = torch.cumsum(rows, 0) - rows
        order = torch.argsort((torch.arange(len(replicas)) - firsts[replicas]) * len(rows) + replicas)
        positions = torch.empty(len(order), dtype=torch.int64)
        positions[order] = torch.arange(len(order))
        return positions

    def global_rows(self, *microbatches: int, device: torch.device = CPU) -> Tensor:
        """Rows of the global batch that microbatches hold, one after the other and each in its order (n,)."""
        return rows_on(self, microbatches, device)

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of the global batch, from those of each replica (n, ...)."""
        if len(self.rows) == 1:
            return parts[0]
        joined = torch.cat(list(parts))
        result = torch.empty_like(joined)
        every = range(self.microbatches)
        own = (m for replica in range(len(self.rows)) for m in every[replica :: len(self.rows)])
        result[self.global_rows(*own, device=joined.device)] = joined
        return result


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def rows_on(split: Split, microbatches: tuple[int, ...], device: torch.device) -> Tensor:
    """See :meth:`Split.global_rows`; kept, because the host would wait for each copy to a device."""
    rows = []
    for microbatch in microbatches:
        offset = sum(split.rows[: microbatch % len(split.rows)])
        start, stop = split.bounds[microbatch]
        rows.append(split.positions[offset + start : offset + stop])
    return torch.cat(rows).to(device)


def default_microbatches(replicas: Sequence[int], samples: int | None = None) -> int:
    """Microbatches of a step where the user names none.

    4 for each stage and replica of the widest stage. A network with batch normalisation gets fewer where they would be
    too small: so many that each has at least 8 samples, as long as no replica is without one.
    The samples are those of a batch in each replica of the first stage; None where they are not known, or there is no
    batch normalisation.
    """
    widest = max(replicas)
    microbatches = PER_STAGE_AND_REPLICA * len(replicas) * widest
    if samples is not None:
        microbatches = min(microbatches, replicas[0] * (samples // NORMALISED_TOGETHER))
        # As many for each replica of the widest stage.
        microbatches = max(widest, microbatches // widest * widest)
    return microbatches
