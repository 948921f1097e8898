"""Where a run with a parameter server can be watched."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.paramserver.places import RunAddress


class RunMembers(Callback):
    """Rank 0 leaves ``watch.json`` in the log directory while it trains, for ``cnnstrategies watch --run``.

    Only under the strategy ``parameter_server``, and with a logger.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        address = getattr(trainer.strategy, "run_address", None)
        debugging = trainer.fast_dev_run  # type: ignore[attr-defined]  # set outside the class
        if not isinstance(address, RunAddress) or debugging or not trainer.loggers:
            return
        folder = trainer.log_dir  # A broadcast: every rank asks.
        if trainer.is_global_zero and folder is not None and "://" not in folder:
            self._folder = Path(folder)
            address.save(self._folder)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._folder is not None:
            RunAddress.remove(self._folder)
        self._folder = None
