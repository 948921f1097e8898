"""Data-parallel strategies that notice that the user's code has divided the data among the ranks already."""

from typing import Any

import torch.distributed as dist
from typing_extensions import override

from cnnstrategies.data.division import Row, is_divided
from cnnstrategies.strategies.protocol import StrategyFacts


class LeavesDividedData(StrategyFacts):
    """Base class of data-parallel strategies in which Lightning does not divide a rank's part of the data again.

    With the Trainer's defaults, Lightning puts a ``DistributedSampler`` into a loader whose data set or sampler is
    already this rank's part. The run would then train on a fraction of the data, in silence.
    """

    _examined: tuple[Any, bool] | None = None  # The last loader, and whether its data are divided.

    @override
    def keeps_sampler(self, loader: Any) -> bool:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return False
        if self._examined is None or self._examined[0] is not loader:
            self._examined = loader, bool(is_divided(loader, dist.get_world_size(), _rows_of_all))
        return self._examined[1]


def _rows_of_all(row: Row) -> list[Row]:
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    return rows
