"""The strategy `hybrid_pipeline`: what stands between Lightning and the engine in `cnnstrategies.pipeline`."""

from cnnstrategies.strategies.hybrid_pipeline.strategy import HybridPipelineStrategy

__all__ = ["HybridPipelineStrategy"]
