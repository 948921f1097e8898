"""The one error type for mistakes in a configuration, and what lies behind an error."""

from collections.abc import Iterator


class ConfigurationError(ValueError):
    """A user's mistake in a configuration: the message names the value, why it is refused and the remedy.

    The command line prints it as one line and exits with code 2; in Python it is an ordinary ``ValueError``.
    """


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and one after the other those that have led to it, each once: some have led to each other."""
    link: BaseException | None = error
    seen: list[BaseException] = []
    while link is not None and all(link is not one for one in seen):
        yield link
        seen.append(link)
        link = link.__cause__ or link.__context__
