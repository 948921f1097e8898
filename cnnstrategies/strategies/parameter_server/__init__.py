"""The strategy `parameter_server`: the layer between Lightning and the engine in `cnnstrategies.paramserver`."""

from cnnstrategies.strategies.parameter_server.strategy import ParameterServerStrategy

__all__ = ["ParameterServerStrategy"]
