"""The error type for mistakes in a configuration, and the causes of an error."""

from collections.abc import Iterator


class ConfigurationError(ValueError):
    """A user's mistake in a configuration: the message names the value, why it is refused and the remedy.

    The command line prints it as one line and exits with code 2; in Python it is an ordinary ``ValueError``.
    """


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and then the chain of its causes, each once; chains can be circular."""
    link: BaseException | None = error
    seen: list[BaseException] = []
    while link is not None and all(link is not earlier for earlier in seen):
        yield link
        seen.append(link)
        link = link.__cause__ or link.__context__
