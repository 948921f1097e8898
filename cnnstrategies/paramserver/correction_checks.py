"""Whether the workers may make the momentum, and send less step by step, with the other options."""

from collections.abc import Mapping, Sequence
from typing import Any

from cnnstrategies.errors import ConfigurationError

FIRST_SHARE = 0.25  # of the elements that the first step of a warm-up sends
_SGD = ("torch.optim.SGD", "torch.optim.sgd.SGD")


def check_warmup(steps: int, compression: str, ratio: float) -> None:
    """Refuse a warm-up of another compression than top-k, or one that would rise.

    Raises:
        ConfigurationError: It is one of these.
    """
    if compression != "topk":
        raise ConfigurationError(
            f"compression_warmup={steps} is for compression='topk', not compression={compression!r}: leave it out"
        )
    if ratio >= FIRST_SHARE:
        raise ConfigurationError(
            f"compression_warmup={steps} with compression_ratio={ratio}: a warm-up begins with {FIRST_SHARE} of the "
            "elements and falls; use a smaller ratio, or leave it out"
        )


def check_correction(mode: str, compression: str) -> None:
    """Refuse momentum correction where nothing comes late.

    Raises:
        ConfigurationError: The options contradict it.
    """
    if mode == "local":
        raise ConfigurationError(
            "momentum_correction=True is not for mode='local': there each worker's optimizer has its own momentum; "
            "leave it out"
        )
    if compression != "topk":
        raise ConfigurationError(
            f"momentum_correction=True is for compression='topk', with which elements wait for later steps, not "
            f"compression={compression!r}: leave it out"
        )


def check_clipping(limit: float | None, mode: str) -> None:
    """Refuse to clip the mean gradient, where workers push something else.

    Args:
        limit: Where gradients are clipped, by norm or value; None or 0 if they are not.
        mode: In which workers step together.

    Raises:
        ConfigurationError: They are clipped.
    """
    if limit:
        raise ConfigurationError(
            f"gradients are clipped at {limit}, in mode={mode!r} the mean of all workers': with "
            "momentum_correction=True the servers are sent velocities instead; leave clipping out, or use "
            "mode='async', where each worker clips its own"
        )


def check_momentum(optimizer: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse an optimizer whose momentum the workers cannot make.

    Args:
        optimizer: Its class path.
        groups: The hyper-parameters of its parameter groups.

    Raises:
        ConfigurationError: It is not SGD with momentum, or has options that are not made here.
    """
    if optimizer not in _SGD:
        raise ConfigurationError(
            f"momentum_correction=True is for torch.optim.SGD, not {optimizer}: leave it out, or use SGD"
        )
    for number, options in enumerate(groups):
        for name in ("dampening", "maximize"):
            if options[name]:
                raise ConfigurationError(
                    f"{name}={options[name]} of parameter group {number} with momentum_correction=True: workers make "
                    f"momentum without it; leave {name} out"
                )
    if not any(options["momentum"] > 0 for options in groups):
        raise ConfigurationError(
            f"momentum_correction=True with momentum={groups[0]['momentum']}: there is nothing to correct; leave it out"
        )
