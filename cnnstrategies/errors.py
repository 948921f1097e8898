"""Error type for mistakes in a configuration, and iteration over the causes of an error."""

from collections.abc import Iterator


class ConfigurationError(ValueError):
    """Error for a user's mistake in a configuration. The message names the value, the reason and the remedy.

    The command line prints the message as one line and exits with the code ``exit_code``. In Python it is an ordinary
    ``ValueError``.
    """

    exit_code = 2


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause's cause and so on. Each error is yielded once, even in a circular chain."""
    link: BaseException | None = error
    seen: list[BaseException] = []
    while link is not None and all(link is not earlier for earlier in seen):
        yield link
        seen.append(link)
        link = link.__cause__ or link.__context__
