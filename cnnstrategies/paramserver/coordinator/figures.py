"""What members say of themselves with their heartbeats, for whoever watches the run: numbers, and few."""

from collections.abc import Mapping

from cnnstrategies.paramserver.core.node import ControlError, Message

FIGURES = ("step", "samples", "sent", "received", "waited", "staleness", "pushed", "needs")
LARGEST = 1 << 63


def figures_of(message: Message) -> Mapping[str, float] | None:
    """The figures of a heartbeat; None if it has none.

    All but ``step``, ``pushed`` and ``needs`` are sums since the member began: samples, bytes sent and received,
    seconds waited for the servers, and updates of others between what it has computed with and its own. A server's step
    is its updates. A worker has ``pushed`` so many of the run's common steps, and goes on when all others have pushed
    what it ``needs``.

    Raises:
        ControlError: They are not numbers of these names.
    """
    figures = message.fields.get("figures")
    if figures is None:
        return None
    if not isinstance(figures, dict) or any(name not in FIGURES for name in figures):
        raise ControlError(f"{message.kind}: figures of other names")
    # A comparison with what is no number at all is false.
    if any(type(one) not in (int, float) or not 0 <= one < LARGEST for one in figures.values()):
        raise ControlError(f"{message.kind}: figures that are no numbers")
    return figures
