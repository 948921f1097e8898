"""Do something as soon as a module has been imported."""

import sys
from collections.abc import Callable, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def after_import(name: str, action: Callable[[], object]) -> None:
    """Call a function when a module has been imported: now, if it has been."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watcher(name, action))


class _Watcher:
    """Finds one module, once, where the other finders do."""

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
