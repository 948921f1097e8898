"""What a metric's name says about it."""

import difflib
from collections.abc import Iterable

USUAL = (
    "val_acc",
    "val_miou",
    "val_map",
    "val_mae",
    "val_loss",
)  # Of ImageClassifier and ImageSegmenter, and of most modules.

MOST = 8  # that a summary shows


def is_of_epochs(name: str) -> bool:
    """Whether a logged value is a metric of the module's epochs, and no rate or speed."""
    return not name.endswith("_step") and not name.startswith("lr-") and name != "samples_per_s"


def less_is_better(name: str) -> bool:
    """Whether a metric is one of which less is better."""
    return any(word in name.lower() for word in ("loss", "error", "mae", "rmse", "mse"))


def worth_showing(names: Iterable[str]) -> list[str]:
    """Which of the logged metrics a summary shows: those of the validation, the usual ones first; else all."""
    epochs = [name for name in names if is_of_epochs(name)]
    usual = [name for name in USUAL if name in epochs]
    others = [name for name in epochs if name.lower().startswith("val") and name not in usual]
    return [*usual, *others][:MOST] or epochs


def not_logged(where: str, name: object, logged: Iterable[str]) -> str:
    """What is said of a metric to follow that the module does not log."""
    names = sorted(one for one in logged if is_of_epochs(one))
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{where}: the module does not log {name!r}; {hint}logged: {', '.join(names) or 'nothing'}"
