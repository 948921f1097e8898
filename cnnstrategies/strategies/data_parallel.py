"""Data parallel that sends less: compressed gradients, or weights every k steps."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies.cluster.stores import on_loopback
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.differences import RANK_ZERO, differences_of_replicas

Compression = Literal["fp16", "bf16", "powersgd"]
CASTS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


class HookedStrategy(DDPStrategy):
    """DDP with a communication hook of torch's, also where one machine has no network."""

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("ddp_comm_hook") is not None:
            raise ConfigurationError("ddp_comm_hook: this strategy brings its own hook; use strategy ddp with yours")
        super().__init__(**kwargs)

    @override
    def setup_environment(self) -> None:
        with on_loopback(self):
            super().setup_environment()


class CompressedDDPStrategy(HookedStrategy):
    """DDP that sends fewer bytes, through torch's own communication hooks, on every device.

    ``DDPStrategy(ddp_comm_hook=...)`` registers its hook on CUDA devices only and ignores it elsewhere.

    Args:
        compression: ``fp16`` or ``bf16`` send half the bytes. ``powersgd`` (Vogels et al., "PowerSGD: Practical
            Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019) sends two thin factors of
            each gradient matrix and adds what was lost to the next gradient; what is waiting to be added is not
            part of a checkpoint.
        powersgd_rank: Columns of the factors: more is more exact and more bytes.
        powersgd_start: Steps with uncompressed gradients before PowerSGD begins.
        **kwargs: Those of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Raises:
        ConfigurationError: ``powersgd_rank`` is below 1, ``powersgd_start`` below 2, or a hook was given as well.
    """

    def __init__(
        self,
        compression: Compression = "fp16",
        powersgd_rank: int = 1,
        powersgd_start: int = 1000,
        **kwargs: Any,
    ) -> None:
        if powersgd_rank < 1:
            raise ConfigurationError(f"powersgd_rank={powersgd_rank}: at least one column is needed; 1 to 4 is usual")
        if powersgd_start < 2:
            raise ConfigurationError(
                f"powersgd_start={powersgd_start}: DDP rebuilds its buckets in step 1; use 2 or more"
            )
        if compression not in (*CASTS, "powersgd"):
            raise ConfigurationError(f"compression={compression!r}: accepted are fp16, bf16 and powersgd")
        super().__init__(**kwargs)
        self.compression = compression
        self.strategy_name = f"ddp_{compression}"
        self.powersgd_rank = powersgd_rank
        self.powersgd_start = powersgd_start

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if self.compression == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=self.powersgd_rank,
                start_powerSGD_iter=self.powersgd_start,
            )
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            self.model.register_comm_hook(None, CASTS[self.compression])

    def differences(self, batch_size: int | None) -> list[str]:
        """What is different from one device, a line each, for a panel.

        Args:
            batch_size: Samples of a process's batch; None where they are not known.
        """
        if self.compression == "powersgd":
            sent = f"rank-{self.powersgd_rank} factors from step {self.powersgd_start} on"
        else:
            sent = self.compression
        assert self.lightning_module is not None
        own = [f"gradients are sent as {sent}"]
        return own + differences_of_replicas(self.lightning_module, self.world_size, batch_size, RANK_ZERO)


class LocalSGDStrategy(HookedStrategy):
    """Post-local SGD: plain DDP first, then each rank steps alone and the weights are averaged every k steps.

    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, with torch's hook and averager. After the
    first ``start`` steps it sends 1 / ``sync_every`` of DDP's bytes. The weights are also averaged before each
    validation and checkpoint and at the end, so what is measured and saved is the average. Optimizer state
    (momentum) stays local; a checkpoint holds rank 0's.

    Args:
        sync_every: Optimizer steps between two averages.
        start: Optimizer steps with gradients averaged in each step, as DDP does, before the local phase begins.
        **kwargs: Those of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Raises:
        ConfigurationError: ``sync_every`` is below 1, ``start`` is negative, or a hook was given as well.
    """

    def __init__(self, sync_every: int = 8, start: int = 100, **kwargs: Any) -> None:
        if sync_every < 1:
            raise ConfigurationError(
                f"sync_every={sync_every}: average every 1 step (as DDP) or more; 4 to 16 is usual"
            )
        if start < 0:
            raise ConfigurationError(f"start={start} is negative; 0 begins the local phase at once")
        super().__init__(**kwargs)
        self.sync_every = sync_every
        self.start = start
        self._comm_state = PostLocalSGDState(  # type: ignore[no-untyped-call]
            process_group=None, subgroup=None, start_localSGD_iter=start, post_local_gradient_allreduce=False
        )

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        # Only now is there a process group, which the averager asks for.
        self._averager = PeriodicModelAverager(period=self.sync_every, warmup_steps=self.start)
        self.model.register_comm_hook(self._comm_state, post_localSGD_hook)

    @override
    def on_train_start(self) -> None:
        # Both count optimizer steps (the hook is not called while gradients accumulate): resume where they were.
        assert self.lightning_module is not None
        step = self.lightning_module.trainer.global_step
        self._averager.step = self._comm_state.iter = step

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._averager.average_parameters(optimizer.param_groups)
        return output

    @override
    def on_validation_start(self) -> None:
        self._average()

    @override
    def on_train_end(self) -> None:
        self._average()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The average of the ranks' weights, which each rank also goes on with; called on every rank."""
        self._average()
        return super().lightning_module_state_dict()

    def differences(self, batch_size: int | None) -> list[str]:
        """What is different from one device, a line each, for a panel.

        Args:
            batch_size: Samples of a process's batch; None where they are not known.
        """
        assert self.lightning_module is not None
        begin = f"after step {self.start} " if self.start else ""
        own = [f"{begin}each process makes its own steps", f"weights are averaged every {self.sync_every} steps"]
        return own + differences_of_replicas(self.lightning_module, self.world_size, batch_size, RANK_ZERO)

    def _average(self) -> None:
        # DDP wraps the model in fit only.
        if isinstance(self.model, DistributedDataParallel) and self._averager.step > self.start:
            assert torch.distributed.group.WORLD is not None
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            average_parameters(iter(parameters), torch.distributed.group.WORLD)
