"""What a run is computed on, in a few words, for the checkpoint."""

import importlib.metadata
import platform
from pathlib import Path

from lightning.pytorch import Trainer

from cnnstrategies.callbacks import panel_rows as panel

PACKAGES = ("cnnstrategies", "torch", "lightning")


def trained_on(trainer: Trainer) -> dict[str, str]:
    """Strategy, devices, precision and versions, by name.

    Args:
        trainer: After its strategy was set up.
    """
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    return {
        "strategy": panel.strategy_name(trainer.strategy),
        "devices": panel.devices(trainer),
        "processor": _processor(),
        "precision": str(trainer.precision),
        "versions": ", ".join((*versions, f"Python {platform.python_version()}")),
    }


def _processor() -> str:
    """The main processor's name as Linux tells it, else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
