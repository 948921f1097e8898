"""The private Lightning names that this package needs, each with the reason.

`tests/test_lightning_private.py` fails when one of them changes.
"""

from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters


def built_by_cli() -> bool:
    """Whether a LightningModule is being built from a configuration by LightningCLI.

    Then `save_hyperparameters` records the configuration (plain data); otherwise it would record and deep-copy
    the live objects. Lightning has no public way to tell the two apart.
    """
    return _given_hyperparameters.get() is not None
