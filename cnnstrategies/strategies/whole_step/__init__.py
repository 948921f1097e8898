"""Pipeline training in which every rank runs the module's steps once, as one device does."""

from cnnstrategies.strategies.whole_step.strategy import WholeStepStrategy

__all__ = ["WholeStepStrategy"]
