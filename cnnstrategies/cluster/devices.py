"""The devices of this machine with their memories and measured speeds, for a plan."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from cnnstrategies.planning.devices import Device
from cnnstrategies.runtime.host_memory import host_memory

SECONDS = 0.3  # Duration of the measurement of a device.
# Shape of the images and number of output channels of the measured convolution, which is typical of a ResNet.
IMAGES, CHANNELS = (8, 64, 56, 56), 64


@dataclass(frozen=True)
class MeasuredDevice:
    """A device of this machine.

    Attributes:
        name: Name of the device.
        memory: Bytes of memory. The memory of a CPU is that of the machine or the container.
        rate: Convolutions per second, for a comparison with other devices.
    """

    name: str
    memory: int
    rate: float


def measured_devices() -> list[MeasuredDevice]:
    """Return the accelerators of this machine; without an accelerator its CPU, which all processes share."""
    if not torch.accelerator.is_available():
        return [MeasuredDevice("CPU", host_memory(), _rate(torch.device("cpu")))]
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    devices = [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
    if kind.type != "cuda":
        return [MeasuredDevice(str(device), host_memory(), _rate(device)) for device in devices]
    properties = [torch.cuda.get_device_properties(device) for device in devices]
    return [
        MeasuredDevice(described.name, described.total_memory, _rate(device))
        for device, described in zip(devices, properties, strict=True)
    ]


def relative_speeds(devices: Sequence[MeasuredDevice]) -> list[Device]:
    """Return the devices with their speeds as multiples of the speed of the first device."""
    return [Device(round(device.rate / devices[0].rate, 2) or 0.01, device.memory) for device in devices]


def _rate(device: torch.device) -> float:
    """Return the number of convolutions per second."""
    images = torch.randn(IMAGES, device=device)
    weight = torch.randn(CHANNELS, IMAGES[1], 3, 3, device=device)

    def run() -> None:
        functional.conv2d(images, weight, padding=1)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    run()  # The first call initialises libraries.
    fastest, end = float("inf"), time.perf_counter() + SECONDS
    # Other work on the machine makes some calls slower, so the fastest call counts.
    while (start := time.perf_counter()) < end:
        run()
        fastest = min(fastest, time.perf_counter() - start)
    return 1 / fastest
