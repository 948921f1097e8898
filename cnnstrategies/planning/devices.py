"""Devices with unequal speeds and memories, and the text that describes them: ``1x24GiB@1.0, 2x8GiB@0.4``."""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import size_in_bytes

EXAMPLE = "1x24GiB@1.0, 2x8GiB@0.4"
# A group of equal devices: their number, and optionally their memory and their speed.
_GROUP = re.compile(r"(\d+)\s*x\s*([^@]*?)\s*(?:@\s*(\S+))?")


@dataclass(frozen=True)
class Device:
    """One device of a machine.

    Attributes:
        speed: Speed as a multiple of the speed of the device on which the profile was measured.
        memory: Bytes of memory; None if unlimited.
    """

    speed: float = 1.0
    memory: int | None = None


def read_devices(text: str, name: str) -> tuple[Device, ...]:
    """Return the devices that a text such as ``1x24GiB@1.0, 2x8GiB@0.4`` describes.

    Each group of equal devices has the form NUMBERxMEMORY@SPEED. Without ``@SPEED`` the speed is 1.

    Args:
        text: Groups of equal devices, separated by commas.
        name: Name of the option or key, for error messages.

    Raises:
        ConfigurationError: The text does not have this form.
    """
    devices: list[Device] = []
    for group in text.split(","):
        match = _GROUP.fullmatch(group.strip())
        if match is None or not match[2]:
            raise ConfigurationError(
                f"{name}={text!r}: {group.strip()!r} is not a group of devices: write NUMBERxMEMORY@SPEED, as in "
                f'"{EXAMPLE}"'
            )
        count = int(match[1])
        if count < 1:
            raise ConfigurationError(f"{name}={text!r}: {group.strip()!r} has no device: write a number of at least 1")
        memory = size_in_bytes(match[2], f"{name}={text!r}: memory")
        devices += [Device(_speed(match[3] or "1", text, name), memory)] * count
    return tuple(devices)


def _speed(word: str, text: str, name: str) -> float:
    try:
        speed = float(word)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise ConfigurationError(
            f"{name}={text!r}: the speed {word!r} is not a number above 0: write the speed as a multiple of the speed "
            "of the device that `plan` measures, such as @0.4"
        )
    return speed


def described(devices: Iterable[Device]) -> str:
    """Return the text that :func:`read_devices` reads. Equal neighbours form a group.

    Memories are rounded down to a tenth of a GiB. Devices below 1 GiB get MiB.
    """
    groups = []
    for device, members in itertools.groupby(devices):
        assert device.memory is not None, "a text for unlimited memory does not exist"
        gib = math.floor(device.memory / 2**30 * 10) / 10
        memory = f"{gib:g}GiB" if gib >= 1 else f"{device.memory // 2**20}MiB"
        groups.append(f"{len(list(members))}x{memory}@{device.speed:.3g}")
    return ", ".join(groups)
