"""Trainer for data modules whose loaders are read without a run, as by ``export``, ``quantize`` and ``plan``."""

import logging

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningDataModule, Trainer

# Logger of Lightning's lines about the hardware, which a trainer without a run writes as well.
HARDWARE = "lightning.pytorch.utilities.rank_zero"


def give_trainer(datamodule: LightningDataModule, devices: int = 1, machines: int = 1) -> None:
    """Give a data module a trainer of its own, unless the data module has a trainer.

    A user's data module may ask the trainer for the number of processes, for example. The trainer is on the CPU, starts
    no process, and writes nothing.

    Args:
        datamodule: The data module.
        devices: Number of processes on each machine, as the data module sees it.
        machines: Number of machines.
    """
    if datamodule.trainer is not None:
        return
    logger = logging.getLogger(HARDWARE)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        datamodule.trainer = Trainer(
            accelerator="cpu",
            devices=devices,
            num_nodes=machines,
            strategy="auto" if devices * machines == 1 else "ddp",
            plugins=[LightningEnvironment()],  # A job's environment may have another number of processes.
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    finally:
        logger.setLevel(level)
