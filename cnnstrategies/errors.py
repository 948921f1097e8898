"""The one error type for mistakes in a configuration, and what lies behind an error."""

from collections.abc import Iterator


class ConfigurationError(ValueError):
    """A user's mistake in a configuration: the message names the value, why it is refused and the remedy.

    The command line prints it as one line and exits with code 2; in Python it is an ordinary ``ValueError``.
    """


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and one after the other those that have led to it.

    Args:
        error: The last one.
    """
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
