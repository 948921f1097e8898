"""Train any CNN on several devices. One line of YAML selects the strategy that divides the work.

If Lightning is already imported, importing this package registers the package's strategies immediately. Otherwise the
strategies are registered as soon as Lightning is imported. Commands that need neither Lightning nor torch, such as
help, therefore start quickly. This module must not import anything that takes milliseconds: if the user presses Ctrl-C
during these imports, Python shows a traceback, because the command line has not started yet.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from cnnstrategies import strategies
    from cnnstrategies.errors import ConfigurationError
    from cnnstrategies.models.classifier import ImageClassifier
    from cnnstrategies.models.detector import DetectionModule
    from cnnstrategies.models.segmenter import ImageSegmenter
    from cnnstrategies.verifying import verify

PRINTED = "CNNSTRATEGIES_OTHER_SYSTEM"  # Environment variable that is set once the line on the system is printed.

__all__ = ["ConfigurationError", "DetectionModule", "ImageClassifier", "ImageSegmenter", "strategies", "verify"]


def __getattr__(name: str) -> object:
    modules = {
        "ConfigurationError": "cnnstrategies.errors",
        "DetectionModule": "cnnstrategies.models.detector",
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
    """Import hook that calls a function as soon as a module has been imported, and then removes itself.

    The hook is an entry of ``sys.meta_path``. It uses the other entries to find the module.

    Args:
        name: Name of the module.
        action: Function to call after the import.
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


def _warn_of_other_systems(platform: str) -> None:
    """Print a line if the operating system is not Linux. Processes that this process starts do not print it again."""
    if platform == "linux" or PRINTED in os.environ:
        return
    os.environ[PRINTED] = "1"
    print(
        f"cnnstrategies is tested on Linux only, and this is {platform}: parameter_server, shards, scaling, tune and "
        "runs on several machines need Linux, and everything else is untried.",
        file=sys.stderr,
    )


def _register() -> None:
    importlib.import_module("cnnstrategies.strategies")


_warn_of_other_systems(sys.platform)
if "lightning.pytorch" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, AfterImport("lightning.pytorch", _register))
