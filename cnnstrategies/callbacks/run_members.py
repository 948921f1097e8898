"""Where a run with a parameter server can be watched, and who has taken part in it."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from cnnstrategies.callbacks.membership_picture import draw_membership
from cnnstrategies.paramserver.drivers.line import Watcher
from cnnstrategies.paramserver.places import RunAddress
from cnnstrategies.paramserver.services import load_keys

ANSWER_SECONDS = 30.0


class RunMembers(Callback):
    """Rank 0 leaves ``watch.json`` in the log directory while it trains, for ``cnnstrategies watch --run``.

    When training has ended ``membership.png`` takes its place: when which worker and server was there. Only under the
    strategy ``parameter_server``, and with a logger.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._address: RunAddress | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        address = getattr(trainer.strategy, "run_address", None)
        debugging = trainer.fast_dev_run  # type: ignore[attr-defined]  # set outside the class
        if not isinstance(address, RunAddress) or debugging or not trainer.loggers:
            return
        folder = trainer.log_dir  # A broadcast: every rank asks.
        if trainer.is_global_zero and folder is not None and "://" not in folder:
            self._folder, self._address = Path(folder), address
            address.save(self._folder)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # At the end of fit the workers have left, and the coordinator may have gone.
        folder, address = self._folder, self._address
        self._remove()
        if folder is None or address is None:
            return
        with Watcher(address.coordinator, load_keys(address.key_file)) as watcher:
            answer = watcher.ask(ANSWER_SECONDS, events=True)
        if answer is not None:
            draw_membership(answer.fields["events"], folder / "membership.png")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._folder is not None:
            RunAddress.remove(self._folder)
        self._folder = self._address = None
