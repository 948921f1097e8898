"""Checks of the options ``shares`` and ``initial_shares``."""

from collections.abc import Sequence
from math import inf

from cnnstrategies.errors import ConfigurationError


def check_shares(shares: str | Sequence[float], named: Sequence[str]) -> None:
    """Check the option ``shares``.

    Args:
        shares: Value of the option: a keyword, or a list with the share of each rank.
        named: Keywords that the option accepts.

    Raises:
        ConfigurationError: The value is neither one of the keywords nor a list of numbers above 0.
    """
    if isinstance(shares, str):
        if shares not in named:
            raise ConfigurationError(f"shares={shares!r}: use {', '.join(named)} or a list such as [3, 1]")
    elif not shares or not all(0 < share < inf for share in shares):
        raise ConfigurationError(f"shares={list(shares)}: set a share above 0 for each rank")


def check_initial(initial: str | Sequence[float], shares: str | Sequence[float]) -> None:
    """Check the option ``initial_shares``.

    Raises:
        ConfigurationError: The initial shares are not valid, or have no effect because ``shares`` is not ``auto``.
    """
    check_shares(shares, ("auto", "equal"))
    check_shares(initial, ("equal",))
    if initial != "equal" and shares != "auto":
        raise ConfigurationError(
            f"initial_shares={initial} has no effect with shares={shares}: set shares: auto, or leave initial_shares "
            "out"
        )


def check_count(shares: str | Sequence[float], ranks: int, name: str = "shares") -> None:
    """Check that a list has one number for each rank.

    Args:
        shares: The list, or a keyword, which is accepted.
        ranks: Number of ranks.
        name: Name of the option with the list.

    Raises:
        ConfigurationError: The length of the list is not the number of ranks.
    """
    if not isinstance(shares, str) and len(shares) != ranks:
        raise ConfigurationError(
            f"{name}={list(shares)} has length {len(shares)}, but there are {ranks} processes "
            f"(trainer.devices x trainer.num_nodes): give one number for each process, or leave {name} out"
        )
