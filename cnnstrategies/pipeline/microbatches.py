"""How a global batch is cut into microbatches, and in which order its rows stand."""

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
    """The microbatches of one global batch.

    Replica r of the first stage holds ``rows[r]`` samples and cuts them into its microbatches, whose sizes differ by at
    most one; the last ones are empty when there are too few samples, and are left out of the step. Where replicas
    usually have more samples, as before the last batch of an epoch, no more microbatches are filled than the samples
    need at their usual size: batch normalisation has use for full ones.

    The rows of the global batch are ordered as one process would have them: samplers deal them out in turn.

    Attributes:
        runs: For each microbatch of a full step which replica of the first stage runs it.
        usual: Samples that such a replica has, on an average, in a full step; None where each step is one.
    """

    rows: tuple[int, ...]
    runs: tuple[int, ...]
    usual: int | None = None

    @property
    def microbatches(self) -> int:
        """Microbatches of a full step, over all replicas."""
        return len(self.runs)

    @property
    def samples(self) -> int:
        """Samples of the global batch."""
        return sum(self.rows)

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """For each microbatch the first row and the row after the last, counted in its replica's samples."""
        left = []
        for replica, rows in enumerate(self.rows):
            filled = self._filled(rows, self.runs.count(replica) or 1)
            size, extra = divmod(rows, filled)
            left.append(iter([size + 1] * extra + [size] * (filled - extra)))
        stops = [0] * len(self.rows)
        bounds = []
        for replica in self.runs:
            start = stops[replica]
            stops[replica] += next(left[replica], 0)
            bounds.append((start, stops[replica]))
        return tuple(bounds)

    def _filled(self, rows: int, own: int) -> int:
        """How many of a replica's own microbatches get samples, if there are as many samples."""
        whole = (self.usual or 0) * len(self.rows)
        if self.samples >= whole:
            return own
        size = -(-whole // self.microbatches)
        filled = -(-rows // size)
        if size > 1 and filled and rows // filled == 1:
            filled -= 1  # Batch normalisation refuses a single sample; one microbatch has one more instead.
        return min(own, max(1, filled))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each microbatch."""
        return tuple(stop - start for start, stop in self.bounds)

    @cached_property
    def positions(self) -> Tensor:
        """Row in the global batch of each sample, with the samples ordered replica by replica (N,)."""
        return torch.tensor(list(chain(*turns(self.rows))), dtype=torch.int64)

    def global_rows(self, *microbatches: int, device: torch.device = CPU) -> Tensor:
        """Rows of the global batch that microbatches hold, one after the other and each in its order (n,)."""
        return rows_on(self, microbatches, device)

    def assemble(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of the global batch, from those of each replica (n, ...)."""
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
    """See :meth:`Split.global_rows`; kept, because the host would wait for each copy to a device."""
    rows = []
    for microbatch in microbatches:
        offset = sum(split.rows[: split.runs[microbatch]])
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
