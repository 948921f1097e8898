"""Numbers in environment variables, which launchers and users set."""

from collections.abc import Mapping

from cnnstrategies.errors import ConfigurationError


def number_of(environ: Mapping[str, str], variable: str) -> int | None:
    """Return the number in an environment variable. Return None if the variable is not set.

    Raises:
        ConfigurationError: The value is not a number, or is negative.
    """
    text = environ.get(variable)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"{variable}={text!r} is not a number: set it to a number, or unset it")
    return int(text)
