"""Pipeline and data parallel training: the network is cut into stages, and a stage may have several replicas."""

from cnnstrategies.strategies.hybrid_pipeline.strategy import HybridPipelineStrategy

__all__ = ["HybridPipelineStrategy"]
