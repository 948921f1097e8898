"""A warning about `load_state_dict` with `strict=False` that loads hardly anything, which torch does in silence."""

import functools
import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

FEWEST = 4  # Smallest number of tensors of which a statement is made.
PART = 0.1  # Fraction of the tensors that are loaded, below which a warning is given.

LOADING = "load_state_dict(strict=False)"
# Modules into which hardly anything was loaded, with what happened.
_lines: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()


def lines_about_loading(module: nn.Module) -> list[str]:
    """Return what happened when hardly anything was loaded into a module or a part of it."""
    return [_lines[part] for part in module.modules() if part in _lines]


def watch_loading() -> None:
    """Let all modules of this process warn from now on. Results of `load_state_dict` are as before."""
    original = nn.Module.load_state_dict
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def load_state_dict(
        self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        names = [name for name, value in state_dict.items() if isinstance(value, Tensor)]
        result = original(self, state_dict, strict, assign)
        _lines.pop(self, None)
        unexpected = set(result.unexpected_keys)
        loaded = sum(name not in unexpected for name in names)
        if not strict and len(names) >= FEWEST and loaded < PART * len(names) and result.missing_keys:
            line = (
                f"has loaded {loaded} of {len(names)} tensors into {type(self).__name__}: the state has {names[0]}, "
                f"and the module {result.missing_keys[0]}"
            )
            _lines[self] = line
            warnings.warn(f"{LOADING} {line}: make the names equal, for example by removing a prefix", stacklevel=2)
        return result

    nn.Module.load_state_dict = load_state_dict  # type: ignore[method-assign]
