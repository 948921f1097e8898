"""`strategy: ddp_balanced`: data parallelism on devices that are not equally fast."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from cnnstrategies.cluster.stores import on_loopback
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.old_names import refuse_old_names
from cnnstrategies.quantities import as_timedelta
from cnnstrategies.shares import Deals
from cnnstrategies.strategies.balancing import GatherRows, gather_rows
from cnnstrategies.strategies.dealing import Dealing
from cnnstrategies.strategies.protocol import StrategyFacts


class BalancedDDPStrategy(StrategyFacts, DDPStrategy):
    """DDP in which each rank has its share of the global batch, and all samples count equally.

    The gradient is the mean over all samples of the global batch, whatever the shares are. For networks without batch
    normalisation it is the gradient that one process would compute.

    Args:
        shares: The ranks' parts of a batch as a list of proportions such as ``[3, 1]``; ``equal``; or ``auto``. The
            shares of ``auto`` are equal at first. They then follow each rank's measured time for a sample, and are
            rebalanced whenever a step would become more than 3 % quicker.
        max_samples: Largest number of samples that a rank can hold in a batch.
        initial_shares: The shares with which ``auto`` begins. ``plan`` writes them from the speeds in a cluster file.
        **kwargs: Options of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Raises:
        ConfigurationError: The number of shares differs from the number of ranks, or a share is not above 0.
    """

    strategy_name = "ddp_balanced"

    def __init__(
        self,
        shares: Literal["auto", "equal"] | list[float] = "auto",
        max_samples: int | None = None,
        initial_shares: Literal["equal"] | list[float] = "equal",
        **kwargs: Any,
    ) -> None:
        refuse_old_names(BalancedDDPStrategy, kwargs)
        if kwargs.get("ddp_comm_hook") is not None:
            raise ConfigurationError("ddp_comm_hook: this strategy brings its own hook; use strategy ddp with yours")
        if "timeout" in kwargs:
            kwargs["timeout"] = as_timedelta(kwargs["timeout"], "timeout")
        super().__init__(**kwargs)
        self._dealing = Dealing(self, shares, max_samples, initial_shares)
        self._group: dist.ProcessGroup | None = None

    @property
    @override
    def launcher(self) -> Any:
        """Lightning's launcher. Lightning asks for it right before it starts processes, the last moment for checks."""
        self._dealing.check()
        return super().launcher

    @property
    @override
    def batch_shares(self) -> Deals:
        return self._dealing.deals

    @override
    def setup_environment(self) -> None:
        with on_loopback(self):  # A single machine may have no network.
            super().setup_environment()
        self._dealing.begin(self._open_group)

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if self._dealing.stopwatch is not None:
            self.model.register_comm_hook(None, self._reduce)

    def _reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        if bucket.is_last():
            assert self._dealing.stopwatch is not None
            self._dealing.stopwatch.end()
        group: Any = None
        reduced: torch.futures.Future[Tensor] = default_hooks.allreduce_hook(group, bucket)
        return reduced

    def _open_group(self) -> GatherRows:
        self._group = dist.new_group(backend="gloo")  # type: ignore[assignment]  # -100 is for those outside
        return lambda row: gather_rows(row, self._group)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._dealing.stopwatch is not None:
            self._dealing.stopwatch.begin()
        return super().training_step(*args, **kwargs)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._dealing.loader(dataloader)

    @override
    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        return [self._dealing.panel_row()]
