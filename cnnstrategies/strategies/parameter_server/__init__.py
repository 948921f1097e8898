"""The strategy ``parameter_server``, which connects Lightning's Trainer to :mod:`cnnstrategies.paramserver`."""

from cnnstrategies.strategies.parameter_server.strategy import ParameterServerStrategy

__all__ = ["ParameterServerStrategy"]
