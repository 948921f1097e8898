"""The shares of a run from its first batch on, which determine how each batch is dealt."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any

from cnnstrategies.shares.dealing import deal


@lru_cache(maxsize=64)  # Several calls in each step have the same arguments.
def _dealt(samples: int, shares: tuple[float, ...], least: int, most: float | tuple[float, ...]) -> tuple[int, ...]:
    return deal(samples, shares, least, most)


class ShareHistory:
    """History of the ranks' shares during a run. It determines how each batch is divided among the ranks.

    Shares may change during training. All ranks must make the same changes.

    Args:
        shares: Share of each rank, from the first batch on.
        least: Smallest number of samples of a rank in a batch, if there are enough samples for all ranks.
        most: Largest number of samples of a rank in a batch: one number for all ranks, or a number for each rank.
        loads: Function that takes the shares of all ranks and returns the shares of the ranks that load samples. By
            default all ranks load samples.
    """

    def __init__(
        self,
        shares: Sequence[float],
        least: int = 0,
        most: float | tuple[float, ...] = inf,
        loads: Callable[[Sequence[float]], Sequence[float]] = tuple,
    ) -> None:
        self.least, self.most, self.loads = least, most, loads
        self._since = [((0, 0), tuple(shares))]

    @property
    def shares(self) -> tuple[float, ...]:
        """The current share of each rank."""
        return self._since[-1][1]

    @property
    def since(self) -> tuple[int, int]:
        """Epoch and batch from which the current shares are used."""
        return self._since[-1][0]

    def change(self, epoch: int, batch: int, shares: Sequence[float]) -> None:
        """Use new shares from batch ``batch`` of epoch ``epoch`` on. No rank may have drawn this batch yet."""
        assert self.since < (epoch, batch), "changes must be made in order"
        now = [(since, old) for since, old in self._since if since[0] == epoch]
        self._since = [*(now or self._since[-1:]), ((epoch, batch), tuple(shares))]

    def at(self, epoch: int, batch: int) -> tuple[float, ...]:
        """Return the shares with which a batch is divided."""
        return next((shares for since, shares in reversed(self._since) if since <= (epoch, batch)), self._since[0][1])

    def counts(self, epoch: int, batch: int, samples: int) -> tuple[int, ...]:
        """Return the number of samples of each rank that loads samples.

        Args:
            epoch: Epoch of the batch.
            batch: Index of the batch in its epoch.
            samples: Number of samples in the batch over all ranks.
        """
        return _dealt(samples, tuple(self.loads(self.at(epoch, batch))), self.least, self.most)

    def state_dict(self) -> dict[str, Any]:
        """Return the history of the shares, for a checkpoint.

        Each entry has the shares of all ranks, and the epoch and the batch from which these shares are used.
        """
        return {"since": [[epoch, batch, *shares] for (epoch, batch), shares in self._since]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the shares of a checkpoint. If the number of ranks has changed, keep this run's initial shares."""
        since = [((int(epoch), int(batch)), tuple(shares)) for epoch, batch, *shares in state["since"]]
        if len(since[-1][1]) == len(self.shares):
            self._since = since
