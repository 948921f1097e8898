"""The options ``shares`` and ``initial_shares`` of a strategy, and the division of its training batches by shares."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from cnnstrategies._lightning_private import keep_batches
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.runtime.groups import GatherRows
from cnnstrategies.runtime.stopwatch import Stopwatch
from cnnstrategies.shares.dealing import NORMALISED_TOGETHER
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.shares.loaders import OrderBatches, OrderLoader, options_of
from cnnstrategies.shares.options import check_count, check_initial
from cnnstrategies.shares.rebalancing import Balance, rebalance
from cnnstrategies.shares.samplers import batches_of
from cnnstrategies.strategies.sample_weights import weigh_samples
from cnnstrategies.strategies.streams import StreamLoader, divide_stream

Shares = Literal["auto", "equal"] | Sequence[float]


class ShareOptions:
    """Division of the training batches of a strategy among its ranks, by configured or measured shares.

    Attributes:
        clock: Stopwatch of this rank's steps; None unless shares are measured. A strategy tells it about waits that are
            not reported in :mod:`cnnstrategies.runtime.waiting`.

    Args:
        strategy: The strategy that divides its batches.
        shares: A list with one share for each rank; ``equal``; or ``auto`` for measured shares.
        most: Largest number of samples of a global batch that a rank may get: one number for all ranks, or a list with
            a number for each rank; None for no limit.
        initial: The shares with which ``auto`` begins: a list, or ``equal``.

    Raises:
        ConfigurationError: A share is not above 0, ``most`` is below 1, or ``initial`` is set without ``auto``.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        shares: Shares,
        most: int | Sequence[int] | None = None,
        initial: Shares = "equal",
    ) -> None:
        check_initial(initial, shares)
        if most is not None and min(most if isinstance(most, Sequence) else [most], default=0) < 1:
            raise ConfigurationError(f"max_samples={most}: a rank needs at least 1 sample; use 1 or more")
        self.shares = shares
        self._initial = initial if shares == "auto" else shares
        self.clock: Stopwatch | None = None
        self._most = most
        self._strategy = strategy
        self._history: ShareHistory | None = None

    def check(self) -> None:
        """Raise a ConfigurationError if the number of shares or of limits differs from the number of ranks.

        Call this before processes start.
        """
        processes = self._strategy.num_nodes * self._strategy.num_processes
        check_count(self._initial, processes)
        if isinstance(self._most, Sequence):
            check_count(self._most, processes, "max_samples")

    @property
    def history(self) -> ShareHistory:
        """Shares of the ranks during the run. They determine how each global batch is divided."""
        if self._history is None:
            module = self._strategy.lightning_module
            shares: Sequence[float] = (
                [1] * self._strategy.world_size if isinstance(self._initial, str) else self._initial
            )
            least = NORMALISED_TOGETHER if module is not None and has_batch_norm(module) else 1
            most = tuple(self._most) if isinstance(self._most, Sequence) else self._most
            self._history = ShareHistory(shares, least, inf if most is None else most)
        return self._history

    def begin(self, gather: Callable[[], GatherRows]) -> None:
        """Prepare a run of the trainer. If the run trains, add the callbacks that weight samples and change shares.

        Call this before the strategy's `setup`, so that Lightning restores the states of these callbacks from a
        checkpoint.

        Args:
            gather: Function without arguments. It returns the function that exchanges rows of numbers among all ranks.
                `gather` is called only if shares are measured.
        """
        module = self._strategy.lightning_module
        assert module is not None
        trainer = module.trainer
        keep_batches(trainer, divide_stream)
        self._history = self.clock = balance = None
        weigh_samples(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.shares == "auto" and self._strategy.world_size > 1:
            balance = Balance(self.history, self._strategy.root_device, gather())
            self.clock = balance.clock
        rebalance(trainer, balance)

    def loader(self, dataloader: object) -> object:
        """Return a loader of the same dataset whose batches are divided by shares, as :func:`by_shares` describes."""
        module = self._strategy.lightning_module
        assert module is not None
        return by_shares(dataloader, module.trainer, self.history)

    def panel_row(self) -> tuple[str, str]:
        """Return the start panel's row about the shares, as a pair of a name and a text."""
        module = self._strategy.lightning_module
        loader = None if module is None else module.trainer.train_dataloader
        if isinstance(loader, StreamLoader):
            return "shares", f"equal, because {type(loader.dataset).__name__} is a stream without indices"
        text = f"{self._initial} at first, then by each rank's own time" if self.shares == "auto" else str(self.shares)
        least = f"; at least {self.history.least} samples for each rank" if self.history.least > 1 else ""
        most = f"; at most {self._most} samples for each rank" if self._most is not None else ""
        return "shares", f"{text}{least}{most}"


def by_shares(loader: Any, trainer: Trainer, history: ShareHistory) -> Any:
    """Replace a training loader by a loader whose batches are divided by shares, and return the new loader.

    The loader must be a torch DataLoader with a plain BatchSampler, and Lightning must have replaced the sampler inside
    the BatchSampler by a DistributedSampler. Any other training loader is returned unchanged, with a warning if there
    are several ranks. Loaders for evaluation, and loaders that divide their batches by shares already, are returned
    unchanged without a warning.

    Args:
        loader: The loader.
        trainer: The trainer that uses the loader.
        history: The ranks' shares.
    """
    if not trainer.training or batches_of(loader) is not None:
        return loader
    if isinstance(loader, StreamLoader):
        if len(set(history.shares)) > 1:
            rank_zero_warn(
                f"shares are ignored for the stream {type(loader.dataset).__name__}, because its length is not known: "
                "all ranks load batches of the loader's size; for shares use a data set with indices"
            )
        return loader
    batches = getattr(loader, "batch_sampler", None)
    if (
        not isinstance(loader, DataLoader)
        or type(batches) is not BatchSampler
        or not isinstance(batches.sampler, DistributedSampler)
    ):
        if len(history.shares) > 1:
            rank_zero_warn(
                f"shares are ignored for the loader {type(loader).__name__}, which chooses its batches itself: all "
                "ranks load batches of the loader's size, and all batches count equally; for shares use a DataLoader "
                "with a batch_size, and leave use_distributed_sampler true"
            )
        return loader
    order = OrderBatches(batches, trainer, history)
    return OrderLoader(loader.dataset, batch_sampler=order, **options_of(loader))
