"""What a network returns: logits, and those of auxiliary classifiers behind them."""

from typing import Any

from torch import Tensor

from cnnstrategies.errors import ConfigurationError


def main_logits(outputs: Any) -> Tensor:
    """The main classifier's logits (N, num_classes) of what a network returned."""
    logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return logits


def check_logits(outputs: Any, samples: int, num_classes: int) -> None:
    """Refuse outputs of another number of classes; cross-entropy takes more of them than there are, and trains.

    Args:
        outputs: What the network returned: logits, or a tuple of the main ones followed by auxiliary ones or None.
        samples: Number of images that it was given.
        num_classes: The model's.

    Raises:
        ConfigurationError: A shape is not (samples, num_classes).
    """
    main, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
    for logits in (main, *(extra for extra in auxiliary if extra is not None)):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else None
        if shape == (samples, num_classes):
            continue
        if shape is None or len(shape) != 2 or shape[0] != samples:
            returned = type(logits).__name__ if shape is None else f"shape {shape}"
            raise ConfigurationError(
                f"for {samples} images the network returned {returned}, but num_classes={num_classes} needs logits of "
                f"shape {(samples, num_classes)}: end the network with a layer that gives those"
            )
        raise ConfigurationError(
            f"the network gives {shape[1]} logits for an image, but the model has num_classes={num_classes}: give "
            f"model.init_args.network num_classes={num_classes} too (in its init_args or dict_kwargs), or set "
            f"model.init_args.num_classes={shape[1]}"
        )
