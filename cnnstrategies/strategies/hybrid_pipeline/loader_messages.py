"""Messages between ranks about the batches of loaders, from which a rank learns that another rank is elsewhere."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.placed import Places

# All these messages have the same subject, so that a rank notices if another rank has ended its epoch.
SUBJECT = "the next batch"
START = -1  # Index in the position of a message about a new iterator. Messages about batches have the batch's index.

# Number of the loader, and index of the batch; None if the rank has ended an epoch.
Position = tuple[int, int] | None


class LoaderMessage(NamedTuple):
    """Message about a batch, about a loader's new iterator, or about the end of an epoch.

    Attributes:
        position: Number of the loader, and index of the batch or `START`; None if the rank has ended an epoch.
        batches: The batch as the only item, taken apart; empty without a batch. Between replicas of the first stage,
            this is the part of the batch that the sender has loaded.
        samples: Number of samples of the part that the sender has loaded.
        states: If the sender is the first loading rank: states of the random generators that have changed.
    """

    position: Position
    batches: list[Any]
    states: dict[str, Any]
    samples: int = 0


def exchange(places: Places, sources: Sequence[int], message: LoaderMessage) -> list[LoaderMessage]:
    """Return the messages of all replicas of the first stage, in their order. The ranks of the first stage call this.

    Raises:
        ConfigurationError: A rank's message has another position.
    """
    messages = places.exchange(message, sources, SUBJECT)
    for rank, received in zip(sources, messages, strict=True):
        _check(places.rank, message.position, rank, received.position)
    return messages


def send(
    places: Places,
    message: LoaderMessage,
    without: Sequence[int],
    batches_for: Callable[[int], list[Any]] | None = None,
) -> None:
    """Send a message to all ranks except those in ``without``.

    Args:
        places: The rules of this rank.
        message: The message.
        without: Ranks that do not get the message.
        batches_for: Function of a rank that returns the batch for this rank; by default all ranks get the message's.
    """
    for rank in range(places.world_size):
        if rank not in without:
            for_rank = message if batches_for is None else message._replace(batches=batches_for(rank))
            places.messages.send(rank, SUBJECT, for_rank)


def receive(places: Places, source: int, position: Position) -> LoaderMessage:
    """Return the next message of a rank, and check its position."""
    message: LoaderMessage = places.messages.receive(source, SUBJECT)
    _check(places.rank, position, source, message.position)
    return message


def end_together(places: Places, sources: Sequence[int]) -> None:
    """Check that all ranks have reached the end of their batches. All ranks call this at the end of an epoch.

    A rank that has not ended expects its next batch instead, and refuses the message that this function sends.

    Args:
        places: The rules of this rank.
        sources: Ranks of the first stage.

    Raises:
        ConfigurationError: Another rank continues with a batch.
    """
    message = LoaderMessage(None, [], {})
    with places.local():
        if places.rank not in sources:
            receive(places, sources[0], None)
            return
        exchange(places, sources, message)
        if places.rank == sources[0]:
            send(places, message, without=sources)


def _check(rank: int, position: Position, other: int, other_position: Position) -> None:
    """Raise an error if two ranks have different positions."""
    if position == other_position:
        return
    if position is None or other_position is None:
        ended, continued = (rank, other) if position is None else (other, rank)
        raise ConfigurationError(
            f"rank {ended} ended an epoch, or training, while rank {continued} continued with another batch: stop all "
            "ranks at the same step, for example with trainer.should_stop on every rank"
        )
    raise ConfigurationError(
        f"rank {rank} is at {_text(position)}, while rank {other} is at {_text(other_position)}: all ranks must "
        "iterate over the same loaders in the same order"
    )


def _text(position: tuple[int, int]) -> str:
    loader, batch = position
    return f"the start of loader {loader}" if batch == START else f"batch {batch} of loader {loader}"
