"""Error type for mistakes in a configuration, exit of a stopped rank, and iteration over the causes of an error."""

from collections.abc import Iterator


class ConfigurationError(ValueError):
    """Error for a user's mistake in a configuration. The message names the value, the reason and the remedy.

    The command line prints the message as one line and exits with the code ``exit_code``. In Python it is an ordinary
    ``ValueError``.
    """

    exit_code = 2


class StoppedTogether(SystemExit):
    """Exit of a rank after all ranks have agreed to stop at the same step. No rank waits for another rank any more."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause's cause and so on. Each error is yielded once, even in a circular chain."""
    link: BaseException | None = error
    seen: list[BaseException] = []
    while link is not None and all(link is not earlier for earlier in seen):
        yield link
        seen.append(link)
        link = link.__cause__ or link.__context__
