"""A configuration's model and data without a trainer, for commands that measure before a run."""

from typing import Any

import torch
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from cnnstrategies.commands.run.lightning_cli import CLI
from cnnstrategies.errors import ConfigurationError


class ModelAndData(CLI):
    """Parses what ``fit`` parses, and builds model and data but no trainer."""

    def __init__(self) -> None:
        super().__init__(run=False)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--ckpt_path", type=Any, default=None, help="Not used: accepted since fit accepts it.")

    @override
    def before_instantiate_classes(self) -> None:
        """Nothing to check: no trainer is built."""

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None


def device_of(accelerator: Any) -> torch.device:
    """The device that a configuration's accelerator means on this machine.

    Raises:
        ConfigurationError: It is not there, so that nothing can be measured on it.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator == "cpu" or (accelerator == "auto" and found is None):
        return torch.device("cpu")
    if found is None:
        raise ConfigurationError(
            f"trainer.accelerator={accelerator}: this machine has none, and this command measures on the real device: "
            "run it there, or give --trainer.accelerator cpu"
        )
    return found
