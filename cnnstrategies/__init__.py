"""Train any CNN on several devices: how the work is divided is one line of YAML.

Importing the package registers its strategies with Lightning: at once, or as soon as Lightning is imported. So what
needs neither Lightning nor torch, such as a command's help, starts without them. Ctrl-C before the command line has
begun shows Python's traceback, so nothing is imported here that takes milliseconds.
"""

import importlib
import sys
from collections.abc import Callable, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

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


class AfterImport:
    """Calls a function as soon as a module has been imported, by finding it, once, where the other finders do."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self.name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname != self.name:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: "ModuleType") -> None:
            execute(module)
            self._action()

        spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def _register() -> None:
    importlib.import_module("cnnstrategies.strategies")


if "lightning.pytorch" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, AfterImport("lightning.pytorch", _register))
