"""The strategy ``ddp_balanced``: data parallelism on devices of different speeds."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.old_names import refuse_old_names
from cnnstrategies.quantities import as_timedelta
from cnnstrategies.runtime.groups import GatherRows, gather_rows, gather_tensors
from cnnstrategies.runtime.waiting import report_forwards
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.strategies.exact_means import ExactMeans
from cnnstrategies.strategies.failing import FailingTogetherDDPStrategy
from cnnstrategies.strategies.own_division import LeavesDividedData
from cnnstrategies.strategies.share_options import ShareOptions
from cnnstrategies.strategies.unfreezing import WrapsAgain


class BalancedDDPStrategy(LeavesDividedData, ExactMeans, WrapsAgain, FailingTogetherDDPStrategy):
    """DDP in which ranks may get different numbers of samples of each global batch, and all samples count equally.

    For any shares, the gradient is the mean over all samples of the global batch. A run on one device would compute the
    same gradient, unless the network has batch normalisation.

    Args:
        shares: Division of each global batch among the ranks. A list has one number above 0 for each rank: with
            ``[3, 1]`` rank 0 gets three quarters of the samples. ``equal`` gives all ranks the same number of samples.
            ``auto`` begins with ``initial_shares`` and measures each rank's time per sample during training. If new
            shares would make a step more than 3 % faster, ``auto`` changes to the new shares.
        max_samples: Largest number of samples of a global batch that one rank may get, or a list with a number for each
            rank; by default no limit.
        initial_shares: The shares with which ``auto`` begins: ``equal``, or a list as for ``shares``. The command
            ``plan`` writes such a list from the speeds in a cluster file.
        **kwargs: Options of :class:`~lightning.pytorch.strategies.DDPStrategy`, except ``ddp_comm_hook``.

    Raises:
        ConfigurationError: An option has a value that is not allowed, or ``ddp_comm_hook`` is set. If the number of
            shares differs from the number of ranks, the error is raised before processes start.
    """

    strategy_name = "ddp_balanced"
    divides_by_shares = True

    def __init__(
        self,
        shares: Literal["auto", "equal"] | list[float] = "auto",
        max_samples: int | list[int] | None = None,
        initial_shares: Literal["equal"] | list[float] = "equal",
        **kwargs: Any,
    ) -> None:
        refuse_old_names(BalancedDDPStrategy, kwargs)
        if kwargs.get("ddp_comm_hook") is not None:
            raise ConfigurationError(
                "ddp_comm_hook: this strategy registers its own communication hook; to use another hook, choose "
                "strategy ddp"
            )
        if "timeout" in kwargs:
            kwargs["timeout"] = as_timedelta(kwargs["timeout"], "timeout")
        super().__init__(**kwargs)
        self._share_options = ShareOptions(self, shares, max_samples, initial_shares)
        self._group: dist.ProcessGroup | None = None
        self._reports: tuple[RemovableHandle, ...] = ()  # They end the reports of DDP's waits.

    @property
    @override
    def launcher(self) -> Any:
        """The launcher with which Lightning starts the run's processes.

        Lightning reads this property right before it starts processes, so the number of shares is checked here.
        """
        self._share_options.check()
        return super().launcher

    @property
    @override
    def batch_shares(self) -> ShareHistory:
        return self._share_options.history

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._share_options.begin(self._open_group)

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if self._share_options.clock is not None:
            self.model.register_comm_hook(None, self._reduce)
            # The module may be wrapped again during training.
            for handle in self._reports:
                handle.remove()
            self._reports = report_forwards(self.model)

    def _reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        group: Any = None
        reduced: torch.futures.Future[Tensor] = default_hooks.allreduce_hook(group, bucket)
        if bucket.is_last():
            # All gradients are computed. In the rest of backward this rank only waits for the other ranks' gradients.
            assert self._share_options.clock is not None
            self._share_options.clock.begin_waiting()
        return reduced

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self._share_options.clock is not None:
            self._share_options.clock.end_waiting()
        super().post_backward(closure_loss)

    def _open_group(self) -> GatherRows:
        # `new_group` returns a number only on ranks outside the group. All ranks are in this group, so mypy's error is
        # ignored.
        self._group = dist.new_group(backend="gloo")  # type: ignore[assignment]
        return lambda row: gather_rows(row, lambda values: gather_tensors(values, self._group))

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._share_options.loader(dataloader)

    @override
    def panel_rows(self, batch_size: int | None) -> list[tuple[str, str]]:
        return [self._share_options.panel_row()]
