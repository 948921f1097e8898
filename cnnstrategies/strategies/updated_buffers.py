"""Buffers that a user's layers update in ``forward``, such as the moving averages of a codebook."""

KNOWN_PACKAGES = ("torch.", "torchmetrics.", "lightning.", "cnnstrategies.")
# Beginnings of the names of methods that do not belong to a training step.
SET_UP = ("__init__", "__setstate__", "reset", "_load", "load", "_init", "init")
