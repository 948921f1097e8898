"""This package's strategies for Lightning. Importing the package registers them by name in Lightning's registry."""

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from cnnstrategies.paramserver.compression import ddp_names
from cnnstrategies.strategies.balanced import BalancedDDPStrategy
from cnnstrategies.strategies.data_parallel import CompressedDDPStrategy
from cnnstrategies.strategies.hybrid_pipeline import HybridPipelineStrategy
from cnnstrategies.strategies.parameter_server import ParameterServerStrategy
from cnnstrategies.strategies.spatial import SpatialStrategy

__all__ = [
    "BalancedDDPStrategy",
    "CompressedDDPStrategy",
    "HybridPipelineStrategy",
    "ParameterServerStrategy",
    "SpatialStrategy",
]

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork"}


def _register(name: str, strategy: type[Strategy], description: str, **init_args: object) -> None:
    """Register a strategy in Lightning's registry under `name`, `name` + "_spawn" and `name` + "_fork"."""
    for suffix, start_method in START_METHODS.items():
        StrategyRegistry.register(
            name + suffix, strategy, description, override=True, start_method=start_method, **init_args
        )


for _compression in ddp_names():
    _register(
        f"ddp_{_compression}",
        CompressedDDPStrategy,
        f"DDP with gradients compressed by {_compression}",
        compression=_compression,
    )
_register("ddp_balanced", BalancedDDPStrategy, "DDP in which slower devices get fewer samples")
_register("hybrid_pipeline", HybridPipelineStrategy, "Pipeline stages, each with its own number of replicas")
_register("parameter_server", ParameterServerStrategy, "Servers make each step with the mean of the workers' gradients")
_register(
    "parameter_server_async", ParameterServerStrategy, "Servers apply each gradient when it arrives", mode="async"
)
_register(
    "parameter_server_ssp",
    ParameterServerStrategy,
    "Like async, but no worker is more than 4 steps ahead of the slowest worker",
    mode="ssp",
    staleness=4,
)
_register("spatial", SpatialStrategy, "Each image is divided among several devices")
