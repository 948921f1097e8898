"""Check whether this machine has the accelerator of a configuration, without torch.

torch is asked later and decides. The check here refuses only what torch would certainly refuse.
"""

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cnnstrategies.errors import ConfigurationError

# Commands that train or measure on this machine. The others, such as submit, may describe another machine.
RUNS_HERE = ("fit", "validate", "test", "predict", "verify", "tune", "scaling")
# Files of drivers: NVIDIA's on servers, under WSL and on Jetson boards, and AMD's.
DRIVER_FILES = ("nvidiactl", "nvidia0", "dxg", "nvmap", "nvhost-ctrl-gpu", "kfd")
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def check_accelerator(values: Mapping[str, Any], devices: Path = Path("/dev")) -> None:
    """Raise a ConfigurationError if a configuration asks for a GPU, and this machine certainly has none.

    Args:
        values: Values of the configuration by key.
        devices: Folder with the files of the machine's devices.
    """
    accelerator = values.get("trainer.accelerator")
    if "torch" in sys.modules or sys.platform != "linux" or accelerator not in ("gpu", "cuda", "mps"):
        return
    hidden = [name for name in HIDING if os.environ.get(name) in ("", "-1")]
    reason = ""
    if accelerator == "mps":
        reason = "is for macOS"
    elif hidden:
        reason = f"needs a GPU, and the environment variable {hidden[0]}={os.environ[hidden[0]]!r} hides all GPUs"
    elif not any((devices / name).exists() for name in DRIVER_FILES) and not _has_driver():
        reason = "needs a GPU, and this machine has no driver of a GPU"
    if reason:
        raise ConfigurationError(
            f"trainer.accelerator: {accelerator!r} {reason}: to run on this machine, use --trainer.accelerator=cpu"
        )


def _has_driver() -> bool:
    """Return whether the library of NVIDIA's driver can be loaded, which does not start the driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
