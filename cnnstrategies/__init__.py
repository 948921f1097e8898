"""Train any CNN on several devices: how the work is divided is one line of YAML.

Importing the package registers its strategies with Lightning: at once, or as soon as Lightning is imported. So what
needs neither Lightning nor torch, such as a command's help, starts without them. Ctrl-C before the command line has
begun shows Python's traceback, so nothing is imported here that takes milliseconds.
"""

import importlib

from cnnstrategies.runtime.import_hooks import after_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cnnstrategies import strategies
    from cnnstrategies.errors import ConfigurationError
    from cnnstrategies.models.classifier import ImageClassifier
    from cnnstrategies.models.segmenter import ImageSegmenter
    from cnnstrategies.verifying import verify

__all__ = ["ConfigurationError", "ImageClassifier", "ImageSegmenter", "strategies", "verify"]


def __getattr__(name: str) -> object:
    homes = {
        "ConfigurationError": "cnnstrategies.errors",
        "ImageClassifier": "cnnstrategies.models.classifier",
        "ImageSegmenter": "cnnstrategies.models.segmenter",
        "verify": "cnnstrategies.verifying",
    }
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    if name == "strategies":
        return importlib.import_module("cnnstrategies.strategies")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


after_import("lightning.pytorch", lambda: importlib.import_module("cnnstrategies.strategies"))
