"""Check that a strategy can start its processes from a notebook or an interactive session."""

import sys
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.protocol import facts_of


def is_interactive() -> bool:
    """Return whether this process runs a notebook's cells or an interactive session."""
    return hasattr(sys, "ps1")


def check_interactive(strategy: Any, launcher: Any) -> None:
    """Refuse a strategy that would start programs or spawn processes from a notebook, whose cells they do not have.

    Lightning would recommend ``ddp_notebook``, which is another strategy.

    Args:
        strategy: The strategy.
        launcher: Its launcher, or None if another program starts the processes.

    Raises:
        ConfigurationError: The strategy must fork its processes in a notebook.
    """
    if launcher is None or launcher.is_interactive_compatible or not is_interactive():
        return
    facts, kind = facts_of(strategy), type(strategy).__name__
    name, options = facts.display_name, facts.server_options
    if options is not None and f"{name}_{options.mode}_fork" in StrategyRegistry:
        name = f"{name}_{options.mode}"
    twins = [key for key, entry in StrategyRegistry.items() if entry["strategy"] is type(strategy)]
    twin = f"{name}_fork" if f"{name}_fork" in twins else min((key for key in twins if key.endswith("_fork")), key=len)
    raise ConfigurationError(
        f"strategy {name} starts processes that do not have the cells of a notebook: use strategy={twin!r}, or "
        f"{kind}(..., start_method='fork'), which forks them"
    )
