"""Conclusions from the names of metrics."""

import difflib
from collections.abc import Iterable

# Validation metrics of ImageClassifier, ImageSegmenter and most other modules; the most important first.
USUAL = ("val_acc", "val_miou", "val_map", "val_mae", "val_loss")
MOST = 8  # largest number of metrics in a summary


def is_of_epochs(name: str) -> bool:
    """Whether a logged value is a metric of an epoch, and not of a step, a learning rate or a speed."""
    return not name.endswith("_step") and not name.startswith("lr-") and name != "samples_per_s"


def less_is_better(name: str) -> bool:
    """Whether smaller values of a metric are better."""
    return any(word in name.lower() for word in ("loss", "error", "mae", "rmse", "mse"))


def worth_showing(names: Iterable[str]) -> list[str]:
    """Return the logged metrics that a summary shows: validation metrics, usual names first, or else all metrics."""
    epochs = [name for name in names if is_of_epochs(name)]
    usual = [name for name in USUAL if name in epochs]
    others = [name for name in epochs if name.lower().startswith("val") and name not in usual]
    return [*usual, *others][:MOST] or epochs


def not_logged(where: str, name: object, logged: Iterable[str]) -> str:
    """Return the message for an option that names a metric which the module does not log.

    Args:
        where: The option.
        name: The metric that it names.
        logged: Names of the logged values.
    """
    names = sorted(metric for metric in logged if is_of_epochs(metric))
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{where}: the module does not log {name!r}; {hint}logged: {', '.join(names) or 'nothing'}"
