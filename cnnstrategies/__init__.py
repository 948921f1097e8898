"""Train any CNN on several devices; one line of YAML chooses how the work is divided.

Importing the package registers its strategies with Lightning: at once, or as soon as Lightning is imported. So a
command that needs neither Lightning nor torch, such as help, starts without them. Ctrl-C before the command line has
begun shows Python's traceback, so this module imports nothing that takes milliseconds.
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
    modules = {
        "ConfigurationError": "cnnstrategies.errors",
        "ImageClassifier": "cnnstrategies.models.classifier",
        "ImageSegmenter": "cnnstrategies.models.segmenter",
        "verify": "cnnstrategies.verifying",
    }
    if name in modules:
        return getattr(importlib.import_module(modules[name]), name)
    if name == "strategies":
        return importlib.import_module("cnnstrategies.strategies")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class AfterImport:
    """A finder of modules that calls a function as soon as a module has been imported.

    It finds the module once, with the help of the other finders, and then removes itself.

    Args:
        name: Name of the module.
        action: The function.
    """

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
