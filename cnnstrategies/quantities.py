"""Parsing of durations such as ``90`` or ``'1:30'``, and of sizes such as ``8GiB`` or a number of bytes.

An option for a duration has the annotation :data:`Duration` and is parsed by :func:`seconds`. An option for a size has
the annotation :data:`Size` and is parsed by :func:`size_in_bytes`. The constructor of the class with the option calls
the parser, so that YAML, the command line and Python accept the same values.

Without quotes, YAML 1.1 reads 1:30 and 1:30:00 as the numbers 90 and 5400, which are the correct numbers of seconds.
"""

import math
import re
from datetime import timedelta
from typing import overload

from cnnstrategies.errors import ConfigurationError

Duration = float | str | timedelta
Size = int | str

_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d{2}(?:\.\d+)?)")
_DAYS = re.compile(r"(\d+) days?, (.+)")  # Python and jsonargparse write a timedelta of a day or more in this form.
_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([A-Za-z]*)")
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("kMGT", start=1)},
    "KB": 10**3,
}
_MOST_IN_FIELD = 60  # Number of minutes in an hour, and of seconds in a minute.


def seconds(value: Duration, name: str, least: float | None = None) -> float:
    """Parse a duration and return it in seconds.

    Args:
        value: Number of seconds, ``minutes:seconds``, ``hours:minutes:seconds`` or a timedelta.
        name: Name of the option, for the error message.
        least: Smallest duration that is accepted, in seconds. By default all durations above 0 are accepted.

    Raises:
        ConfigurationError: The value is not a duration, or is too short.
    """
    duration = _read_duration(value)
    if duration is None:
        raise ConfigurationError(
            f"{name}={value!r} is not a duration: write seconds, such as 90, or minutes:seconds, such as '1:30', or "
            "hours:minutes:seconds, such as '1:30:00'"
        )
    if duration <= 0 if least is None else duration < least:
        raise ConfigurationError(
            f"{name}={value} is too short: it must be "
            + ("above 0 seconds" if least is None else f"at least {least:g} seconds")
        )
    return duration


def as_timedelta(value: Duration, name: str) -> timedelta:
    """Parse a duration as :func:`seconds` does, and return it as a timedelta for torch and Lightning."""
    return timedelta(seconds=seconds(value, name))


def _read_duration(value: object) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, str):
        text, days = value.strip(), 0
        if match := _DAYS.fullmatch(text):
            days, text = int(match[1]), match[2]
        if match := _CLOCK.fullmatch(text):
            hours, minutes, rest = match[1], int(match[2]), float(match[3])
            if rest >= _MOST_IN_FIELD or (hours is not None and minutes >= _MOST_IN_FIELD):
                return None
            return ((days * 24 + int(hours or 0)) * 60 + minutes) * 60 + rest
        if days:
            return None
        try:
            value = float(text)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


@overload
def size_in_bytes(value: Size, name: str) -> int: ...
@overload
def size_in_bytes(value: None, name: str) -> None: ...
def size_in_bytes(value: Size | None, name: str) -> int | None:
    """Parse a size and return it in bytes. For options that allow None, None is returned unchanged.

    Args:
        value: Number of bytes, or a number with a unit. KiB, MiB, GiB and TiB are powers of 1024; kB, MB, GB and TB are
            powers of 1000; B is bytes.
        name: Name of the option, for the error message.

    Raises:
        ConfigurationError: The value is not a size above 0.
    """
    if value is None:
        return None
    match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value).strip())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size > 0:
        return size
    if match and match[2] in ("K", "M", "G", "T", "k"):
        number, letter = match[1], match[2].upper()
        raise ConfigurationError(
            f"{name}={value!r} is not a size, because {match[2]} could be a power of 1024 or of 1000: write "
            f"{number}{letter}iB or {number}{letter}B"
        )
    raise ConfigurationError(
        f"{name}={value!r} is not a size above 0: write a number of bytes, or a number with a unit, such as 8GiB, "
        "512MiB or 500MB"
    )
