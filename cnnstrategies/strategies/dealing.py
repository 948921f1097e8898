"""The options `shares` and `initial_shares` of a strategy: their checks, and the division of batches by shares."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Literal

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from cnnstrategies._lightning_private import keep_batches
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.buffers import has_batch_norm
from cnnstrategies.shares import NORMALISED_TOGETHER, Deals, check_count, check_initial
from cnnstrategies.strategies.balancing import Balance
from cnnstrategies.strategies.dealt_loader import by_shares
from cnnstrategies.strategies.gathering import GatherRows
from cnnstrategies.strategies.sample_weights import weigh_samples
from cnnstrategies.strategies.stopwatch import Stopwatch
from cnnstrategies.strategies.streams import StreamLoader, divide_stream

Shares = Literal["auto", "equal"] | Sequence[float]


class Dealing:
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
        self._deals: Deals | None = None

    def check(self) -> None:
        """Raise a ConfigurationError if the number of shares or of limits differs from the number of ranks.

        Call this before processes start.
        """
        processes = self._strategy.num_nodes * self._strategy.num_processes
        check_count(self._initial, processes)
        if isinstance(self._most, Sequence):
            check_count(self._most, processes, "max_samples")

    @property
    def deals(self) -> Deals:
        """Shares of the ranks during the run. They determine how each global batch is divided."""
        if self._deals is None:
            module = self._strategy.lightning_module
            shares: Sequence[float] = (
                [1] * self._strategy.world_size if isinstance(self._initial, str) else self._initial
            )
            least = NORMALISED_TOGETHER if module is not None and has_batch_norm(module) else 1
            most = tuple(self._most) if isinstance(self._most, Sequence) else self._most
            self._deals = Deals(shares, least, inf if most is None else most)
        return self._deals

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
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, Balance)]
        self._deals = self.clock = None
        if trainer.state.fn != TrainerFn.FITTING:
            return
        weigh_samples(trainer)
        if self.shares == "auto" and self._strategy.world_size > 1:
            balance = Balance(self.deals, self._strategy.root_device, gather())
            self.clock = balance.clock
            callbacks.append(balance)

    def loader(self, dataloader: object) -> object:
        """Return a loader of the same dataset whose batches are divided by shares, as :func:`by_shares` describes."""
        module = self._strategy.lightning_module
        assert module is not None
        return by_shares(dataloader, module.trainer, self.deals)

    def panel_row(self) -> tuple[str, str]:
        """Return the start panel's row about the shares, as a pair of a name and a text."""
        module = self._strategy.lightning_module
        loader = None if module is None else module.trainer.train_dataloader
        if isinstance(loader, StreamLoader):
            return "shares", f"equal, because {type(loader.dataset).__name__} is a stream without indices"
        text = f"{self._initial} at first, then by each rank's own time" if self.shares == "auto" else str(self.shares)
        least = f"; at least {self.deals.least} samples for each rank" if self.deals.least > 1 else ""
        most = f"; at most {self._most} samples for each rank" if self._most is not None else ""
        return "shares", f"{text}{least}{most}"
