"""The argument `shares` of a strategy: what it accepts, and training batches that are dealt by it."""

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
from cnnstrategies.strategies.balancing import Balance, Rows, Stopwatch
from cnnstrategies.strategies.dealt_loader import by_shares
from cnnstrategies.strategies.sample_weights import SampleWeights

Shares = Literal["auto", "equal"] | Sequence[float]


class Dealing:
    """Has the training batches of a strategy's ranks dealt by shares, which are given or found.

    Args:
        strategy: Whose.
        shares: One for each rank; ``equal``; or ``auto``, by each rank's own time.
        most: Samples that a rank can hold in a batch.
        initial: The shares with which ``auto`` begins; equal ones by default.

    Raises:
        ConfigurationError: What is given is no share.
    """

    def __init__(
        self, strategy: DDPStrategy, shares: Shares, most: int | None = None, initial: Shares = "equal"
    ) -> None:
        check_initial(initial, shares)
        if most is not None and most < 1:
            raise ConfigurationError(f"max_samples={most}: a rank needs at least 1 sample")
        self.shares = shares
        self._initial = initial if shares == "auto" else shares
        self.stopwatch: Stopwatch | None = None
        self._most = most
        self._strategy = strategy
        self._deals: Deals | None = None

    def check(self) -> None:
        """Refuse shares that are not as many as the processes; before these are started."""
        check_count(self._initial, self._strategy.num_nodes * self._strategy.num_processes)

    @property
    def deals(self) -> Deals:
        """By which shares batches are dealt."""
        if self._deals is None:
            module = self._strategy.lightning_module
            shares: Sequence[float] = (
                [1] * self._strategy.world_size if isinstance(self._initial, str) else self._initial
            )
            least = NORMALISED_TOGETHER if module is not None and has_batch_norm(module) else 1
            self._deals = Deals(shares, least, inf if self._most is None else self._most)
        return self._deals

    def begin(self, gather: Callable[[], Rows], waited: Callable[[], float] = float) -> None:
        """Add the callbacks, before Lightning gives them their states of a checkpoint, which it does before `setup`.

        Args:
            gather: Makes what brings the numbers of all ranks together; asked for where shares are found.
            waited: Seconds that this rank has waited for others.
        """
        module = self._strategy.lightning_module
        assert module is not None
        trainer = module.trainer
        keep_batches(trainer)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
        callbacks[:] = [one for one in callbacks if not isinstance(one, Balance)]
        self._deals = self.stopwatch = None
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if not any(isinstance(one, SampleWeights) for one in callbacks):
            callbacks.append(SampleWeights())
        if self.shares == "auto" and self._strategy.world_size > 1:
            self.stopwatch = Stopwatch(self._strategy.root_device, waited)
            callbacks.append(Balance(self.deals, [self.stopwatch], gather()))

    def loader(self, dataloader: object) -> object:
        """Have a loader's batches dealt by shares, in the place of Lightning's sampler."""
        module = self._strategy.lightning_module
        assert module is not None
        return by_shares(dataloader, module.trainer, self.deals)

    def panel_row(self) -> tuple[str, str]:
        """Return the start panel's row about the shares."""
        said = f"{self._initial} at first, then by each rank's own time" if self.shares == "auto" else str(self.shares)
        least = f"; at least {self.deals.least} samples" if self.deals.least > 1 else ""
        most = f"; at most {self._most} samples" if self._most is not None else ""
        return "shares", f"{said}{least}{most}"
