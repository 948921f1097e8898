"""The strategies ``ddp_fp16``, ``ddp_bf16`` and ``ddp_powersgd``: data parallelism with compressed gradients."""

from typing import TYPE_CHECKING, Any, Literal

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from cnnstrategies._lightning_private import keep_batches
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.old_names import refuse_old_names
from cnnstrategies.paramserver.compression import COMPRESSIONS, ddp_names
from cnnstrategies.quantities import as_timedelta
from cnnstrategies.strategies.exact_means import ExactMeans
from cnnstrategies.strategies.failing import FailingTogetherDDPStrategy
from cnnstrategies.strategies.own_division import LeavesDividedData
from cnnstrategies.strategies.sample_weights import weigh_samples
from cnnstrategies.strategies.streams import divide_stream
from cnnstrategies.strategies.unfreezing import WrapsAgain

if TYPE_CHECKING:
    DDPCompression = str
else:  # jsonargparse reads this type: the help lists its names, and the parser refuses all other names.
    DDPCompression = Literal[ddp_names()]


class CompressedDDPStrategy(LeavesDividedData, ExactMeans, WrapsAgain, FailingTogetherDDPStrategy):
    """DDP that compresses gradients with torch's communication hooks, on every kind of device.

    Lightning's own option ``DDPStrategy(ddp_comm_hook=...)`` has an effect on CUDA devices only.

    Args:
        compression: Compression of the gradients. ``fp16`` and ``bf16`` round float32 gradients to 16 bits, so half the
            bytes are sent. ``powersgd`` (Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for
            Distributed Optimization", NeurIPS 2019) approximates each gradient matrix by the product of two thin
            matrices and sends these, with error feedback: the approximation's error is added to the next gradient.
            Checkpoints do not contain this error.
        powersgd_rank: For ``powersgd``: the rank of the approximation, 1 or more. With a higher rank the approximation
            is more exact, and more bytes are sent.
        powersgd_start_step: For ``powersgd``: number of steps, at the start of a run, in which gradients are not
            compressed; 2 or more.
        **kwargs: Options of :class:`~lightning.pytorch.strategies.DDPStrategy`, except ``ddp_comm_hook``.

    Raises:
        ConfigurationError: An option has a value that is not allowed, or ``ddp_comm_hook`` is set.
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
            raise ConfigurationError(
                "ddp_comm_hook: this strategy registers its own communication hook; to use another hook, choose "
                "strategy ddp"
            )
        if powersgd_rank < 1:
            raise ConfigurationError(f"powersgd_rank={powersgd_rank}: use 1 or more; 1 to 4 is usual")
        if powersgd_start_step < 2:
            raise ConfigurationError(
                f"powersgd_start_step={powersgd_start_step}: PowerSGD must begin after step 1, in which DDP rebuilds "
                "its buckets; use 2 or more"
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
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        keep_batches(trainer, divide_stream)
        weigh_samples(trainer)

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        COMPRESSIONS[self.compression].register_ddp_hook(self.model, self.powersgd_rank, self.powersgd_start_step)

    @override
    def differences(self, batch_size: int | None) -> list[str]:
        sent = COMPRESSIONS[self.compression].describe_ddp(self.powersgd_rank, self.powersgd_start_step)
        return [f"gradients are sent as {sent}", *super().differences(batch_size)]
