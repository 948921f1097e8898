"""The private Lightning names that this package needs, each with the reason.

`tests/test_lightning_private.py` fails when one of them changes.
"""

from typing import Any

from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher


def built_by_cli() -> bool:
    """Whether a LightningModule is being built from a configuration by LightningCLI.

    Then `save_hyperparameters` records the configuration (plain data); otherwise it would record and deep-copy
    the live objects. Lightning has no public way to tell the two apart.
    """
    return _given_hyperparameters.get() is not None


def ranks_are_children(launcher: Any) -> bool:
    """Whether a launcher spawns or forks all ranks, so that none of them is the process that runs the command line.

    On several hosts rank 0 could then not serve the port that its parent has used to find the other hosts.
    Lightning's public property tells only fork from the others.
    """
    return isinstance(launcher, _MultiProcessingLauncher)
