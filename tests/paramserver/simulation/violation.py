"""What a simulated run ends with that does not go as it should."""


class ViolationError(Exception):
    """An invariant does not hold."""
