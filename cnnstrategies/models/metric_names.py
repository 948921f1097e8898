"""Functions that tell from a metric's name what the metric means."""

import difflib
from collections.abc import Iterable

# Names of the validation metrics of this package's modules, the most important first.
USUAL = ("val_acc", "val_miou", "val_map", "val_mae", "val_loss")
MOST = 8  # Largest number of metrics in a summary.


def is_of_epochs(name: str) -> bool:
    """Whether a logged value is a metric that is computed over a whole epoch.

    The result is False for a value of a single step, for a learning rate and for the training speed.
    """
    return not name.endswith("_step") and not name.startswith("lr-") and name != "samples_per_s"


def less_is_better(name: str) -> bool:
    """Whether smaller values of a metric are better."""
    return any(word in name.lower() for word in ("loss", "error", "mae", "rmse", "mse"))


def worth_showing(names: Iterable[str]) -> list[str]:
    """Return the names of the metrics that a summary shows.

    The result has up to ``MOST`` validation metrics, and the metrics in ``USUAL`` come first. If no validation metric
    was logged, the result has all metrics that are computed over a whole epoch.
    """
    epochs = [name for name in names if is_of_epochs(name)]
    usual = [name for name in USUAL if name in epochs]
    others = [name for name in epochs if name.lower().startswith("val") and name not in usual]
    return [*usual, *others][:MOST] or epochs


def not_logged(where: str, name: object, logged: Iterable[str]) -> str:
    """Return the error message for an option that names a metric which the module does not log.

    Args:
        where: Name of the option.
        name: Value of the option.
        logged: Names of the values that the module logs.
    """
    names = sorted(metric for metric in logged if is_of_epochs(metric))
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{where}: the module does not log {name!r}; {hint}it logs: {', '.join(names) or 'nothing'}"
