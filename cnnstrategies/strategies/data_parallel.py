"""Data parallel that sends less: compressed gradients."""

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
    """DDP that sends fewer bytes, through torch's own communication hooks, on every device.

    ``DDPStrategy(ddp_comm_hook=...)`` registers its hook on CUDA devices only and ignores it elsewhere.

    Args:
        compression: ``fp16`` or ``bf16`` send half the bytes. ``powersgd`` (Vogels et al., "PowerSGD: Practical
            Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019) sends two thin factors of
            each gradient matrix and adds what was lost to the next gradient; what is waiting to be added is not
            part of a checkpoint.
        powersgd_rank: Columns of the factors: more is more exact and more bytes.
        powersgd_start_step: Steps with uncompressed gradients before PowerSGD begins.
        **kwargs: Those of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Raises:
        ConfigurationError: ``powersgd_rank`` is below 1, ``powersgd_start_step`` below 2, or a hook was given as well.
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
        with on_loopback(self):  # Also where one machine has no network.
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
