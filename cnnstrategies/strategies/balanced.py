"""`strategy: ddp_balanced`: data parallel on devices that are not equally fast."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from cnnstrategies.cluster.stores import on_loopback
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.pipeline.microbatches import NORMALISED_TOGETHER
from cnnstrategies.shares import Deals, check_count, check_shares
from cnnstrategies.strategies.balancing import Balance, Stopwatch
from cnnstrategies.strategies.dealt_loader import by_shares
from cnnstrategies.strategies.differences import RANK_ZERO, differences_of_replicas
from cnnstrategies.strategies.sample_weights import SampleWeights


class BalancedDDPStrategy(DDPStrategy):
    """DDP in which each rank has its share of the global batch, and each sample counts as much as any other.

    The gradient is the mean over all samples of the global batch, whatever the shares: with networks without batch
    normalisation it is that of one process.

    Args:
        shares: What each rank has in proportion to the others', such as ``[3, 1]``; ``equal``; or ``auto``: equal at
            first, then by each rank's own time for a sample, dealt anew wherever that makes a step more than 3 %
            quicker.
        max_share: Samples that a rank can hold in a batch.
        **kwargs: Those of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Raises:
        ConfigurationError: The shares are not as many as the ranks, or not above 0.
    """

    strategy_name = "ddp_balanced"

    def __init__(
        self, shares: Literal["auto", "equal"] | list[float] = "auto", max_share: int | None = None, **kwargs: Any
    ) -> None:
        if kwargs.get("ddp_comm_hook") is not None:
            raise ConfigurationError("ddp_comm_hook: this strategy brings its own hook; use strategy ddp with yours")
        check_shares(shares, ("auto", "equal"))
        if max_share is not None and max_share < 1:
            raise ConfigurationError(f"max_share={max_share}: a rank needs at least 1 sample")
        super().__init__(**kwargs)
        self.shares = shares
        self.max_share = max_share
        self._deals: Deals | None = None
        self._stopwatch: Stopwatch | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    @override
    def launcher(self) -> Any:
        """Lightning's launcher. It is asked for right before processes are started: the last place for checks."""
        check_count(self.shares, self.num_nodes * self.num_processes)
        return super().launcher

    @property
    def deals(self) -> Deals:
        """By which shares batches are dealt."""
        if self._deals is None:
            shares: Sequence[float] = [1] * self.world_size if isinstance(self.shares, str) else self.shares
            least = NORMALISED_TOGETHER if self.lightning_module and has_batch_norm(self.lightning_module) else 1
            self._deals = Deals(shares, least, self.max_share)
        return self._deals

    @override
    def setup_environment(self) -> None:
        """Also add the callbacks, which Lightning gives their states of a checkpoint before it calls `setup`."""
        with on_loopback(self):  # Also where one machine has no network.
            super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
        callbacks[:] = [one for one in callbacks if not isinstance(one, Balance)]
        self._deals = self._stopwatch = None
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if not any(isinstance(one, SampleWeights) for one in callbacks):
            callbacks.append(SampleWeights())
        if self.shares == "auto" and self.world_size > 1:
            self._stopwatch = Stopwatch(self.root_device)
            self._group = dist.new_group(backend="gloo")  # type: ignore[assignment]  # -100 is for those outside
            callbacks.append(Balance(self.deals, self._stopwatch, self._gather))

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if self._stopwatch is not None:
            self.model.register_comm_hook(None, self._reduce)

    def _reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        if bucket.is_last():
            assert self._stopwatch is not None
            self._stopwatch.end()
        group: Any = None
        reduced: torch.futures.Future[Tensor] = default_hooks.allreduce_hook(group, bucket)
        return reduced

    def _gather(self, row: list[float]) -> Tensor:
        own = torch.tensor(row, dtype=torch.float64)
        rows = own.new_empty(self.world_size * len(row))
        dist.all_gather_into_tensor(rows, own, group=self._group)
        return rows.view(self.world_size, -1)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._stopwatch is not None:
            self._stopwatch.begin()
        return super().training_step(*args, **kwargs)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Have a loader's batches dealt by shares, in the place of Lightning's sampler."""
        module = self.lightning_module
        assert isinstance(module, LightningModule)
        return by_shares(dataloader, module.trainer, self.deals)

    def describe(self, batch_size: int | None) -> list[tuple[str, str]]:
        """The shares, for a panel."""
        deals = self.deals
        said = "equal at first, then by each rank's own time" if self.shares == "auto" else str(self.shares)
        least = f"; at least {deals.least} samples" if deals.least > 1 else ""
        most = f"; at most {deals.most} samples" if deals.most is not None else ""
        return [("shares", f"{said}{least}{most}")]

    def differences(self, batch_size: int | None) -> list[str]:
        """What is different from one device, a line each, for a panel."""
        assert self.lightning_module is not None
        return differences_of_replicas(self.lightning_module, self.world_size, batch_size, RANK_ZERO)
