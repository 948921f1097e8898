"""Durations and sizes as users write them."""

from datetime import timedelta

import pytest

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import seconds, size_in_bytes

pytestmark = pytest.mark.light


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("90", 90.0),
        ("1:30", 90.0),
        ("90:00", 5400.0),
        ("1:30:00", 5400.0),
        (5400, 5400.0),  # YAML reads 1:30:00 without quotes as this number.
        ("0:00:00.250", 0.25),
        ("1 day, 0:00:10", 86410.0),
        (timedelta(minutes=10), 600.0),
        (str(timedelta(days=2, hours=3)), 183600.0),
    ],
)
def test_a_duration_is_seconds_or_a_clock(value, expected):
    assert seconds(value, "timeout") == expected


@pytest.mark.parametrize("value", ["soon", "1:60", "1:60:00", "1:5", "1::30", "-1:30", "", True, float("nan"), "inf"])
def test_an_invalid_duration_is_refused_with_the_remedy(value):
    with pytest.raises(ConfigurationError, match=r"^wait=.* is not a duration: write seconds, such as 90, .* '1:30'"):
        seconds(value, "wait")


@pytest.mark.parametrize("value", [0, -1, "0:00"])
def test_a_duration_is_above_zero(value):
    with pytest.raises(ConfigurationError, match=r"^wait=.* is too short: it must be above 0 seconds$"):
        seconds(value, "wait")


def test_a_duration_can_have_a_least_value():
    assert seconds(0, "grace", least=0) == 0
    with pytest.raises(ConfigurationError, match=r"^grace=0:05 is too short: it must be at least 10 seconds$"):
        seconds("0:05", "grace", least=10)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("8GiB", 8 * 2**30),
        ("512 MiB", 2**29),
        ("1.5GB", 1_500_000_000),
        ("2e9", 2 * 10**9),
        ("3kB", 3000),
        ("3KB", 3000),
        ("1TiB", 2**40),
        ("7B", 7),
        (None, None),
    ],
)
def test_a_size_is_bytes_or_has_a_unit(value, expected):
    assert size_in_bytes(value, "memory_limit") == expected


@pytest.mark.parametrize("value", ["much", "8 apples", "-1GiB", 0, "0GiB", "1:30", True, "nan"])
def test_an_invalid_size_is_refused_with_the_remedy(value):
    with pytest.raises(
        ConfigurationError, match=r"^memory_limit=.* is not a size above 0: write a number of bytes, .* 8GiB"
    ):
        size_in_bytes(value, "memory_limit")


def test_a_letter_alone_is_ambiguous():
    with pytest.raises(ConfigurationError, match=r"^memory_limit='8G' is not a size, .* write 8GiB or 8GB$"):
        size_in_bytes("8G", "memory_limit")
