"""The one error type for mistakes in a configuration."""


class ConfigurationError(ValueError):
    """A user's mistake in a configuration: the message names the value, why it is refused and the remedy.

    The command line prints it as one line and exits with code 2; in Python it is an ordinary ``ValueError``.
    """
