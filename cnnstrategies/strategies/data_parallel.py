"""Data parallelism with compressed gradients."""

from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from cnnstrategies._lightning_private import keep_batches
from cnnstrategies.cluster.stores import on_loopback
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.old_names import refuse_old_names
from cnnstrategies.paramserver.compression import COMPRESSIONS, ddp_names
from cnnstrategies.quantities import as_timedelta
from cnnstrategies.strategies.protocol import StrategyFacts

if TYPE_CHECKING:
    DDPCompression = str
else:  # The command line's help lists these names, and its parser refuses others.
    DDPCompression = Literal[ddp_names()]


class CompressedDDPStrategy(StrategyFacts, DDPStrategy):
    """DDP that sends fewer bytes, on every kind of device, through torch's communication hooks.

    ``DDPStrategy(ddp_comm_hook=...)`` registers its hook on CUDA devices only, and ignores it on all others.

    Args:
        compression: ``fp16`` and ``bf16`` send half the bytes. ``powersgd`` (Vogels et al., "PowerSGD: Practical
            Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019) sends two thin factors of each
            gradient matrix, and adds the error to the next gradient. Checkpoints do not contain that error.
        powersgd_rank: Columns of the factors. More columns are more exact and take more bytes.
        powersgd_start_step: Number of steps with uncompressed gradients before PowerSGD begins.
        **kwargs: Options of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Raises:
        ConfigurationError: ``powersgd_rank`` is below 1, ``powersgd_start_step`` is below 2, or ``ddp_comm_hook`` is
            set as well.
    """

    def __init__(
        self,
        compression: DDPCompression = "fp16",
        powersgd_rank: int = 1,
        powersgd_start_step: int = 1000,
        **kwargs: Any,
    ) -> None:
        refuse_old_names(CompressedDDPStrategy, kwargs)
        if kwargs.get("ddp_comm_hook") is not None:
            raise ConfigurationError("ddp_comm_hook: this strategy brings its own hook; use strategy ddp with yours")
        if powersgd_rank < 1:
            raise ConfigurationError(f"powersgd_rank={powersgd_rank}: at least one column is needed; 1 to 4 is usual")
        if powersgd_start_step < 2:
            raise ConfigurationError(
                f"powersgd_start_step={powersgd_start_step}: DDP rebuilds its buckets in step 1; use 2 or more"
            )
        if compression not in ddp_names():
            raise ConfigurationError(f"compression={compression!r}: use one of {', '.join(ddp_names())}")
        if "timeout" in kwargs:
            kwargs["timeout"] = as_timedelta(kwargs["timeout"], "timeout")
        super().__init__(**kwargs)
        self.compression = compression
        self.strategy_name = f"ddp_{compression}"
        self.powersgd_rank = powersgd_rank
        self.powersgd_start_step = powersgd_start_step

    @override
    def setup_environment(self) -> None:
        with on_loopback(self):  # A single machine may have no network.
            super().setup_environment()
        assert self.lightning_module is not None
        keep_batches(self.lightning_module.trainer)

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        COMPRESSIONS[self.compression].register_ddp_hook(self.model, self.powersgd_rank, self.powersgd_start_step)

    @override
    def differences(self, batch_size: int | None) -> list[str]:
        sent = COMPRESSIONS[self.compression].describe_ddp(self.powersgd_rank, self.powersgd_start_step)
        return [f"gradients are sent as {sent}", *super().differences(batch_size)]
