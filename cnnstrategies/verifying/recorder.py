"""What a run leaves for the comparison: its batches, its state at the end or after each step, what it has logged."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from cnnstrategies._lightning_private import own_values
from cnnstrategies.callbacks.start_panel import differences
from cnnstrategies.models.samples import samples_of
from cnnstrategies.verifying.batches import GlobalBatches, Keeps

DROPPING = ("drop", "stochasticdepth")  # In the names of classes of layers that drop at random.
DROPS = ("p", "drop_prob", "dropout")  # Their attributes by which they do.
RATES = ("drop_rate", "dropout_rate", "dropout_p")  # Those of networks that have functions for it.
END, NOTES = "end.ckpt", "notes.json"


@dataclass(frozen=True)
class RunRole:
    """Which of two runs this is, and where its files are.

    Attributes:
        of: The folder of the run whose batches it trains on; None for one that loads its own.
        single: In float32, for a module that cannot be trained in float64.
        every_step: Whether its state is saved after each step, too.
    """

    folder: Path
    of: Path | None = None
    single: bool = False
    every_step: bool = False

    @property
    def notes(self) -> dict[str, Any]:
        """What the recorder has noted; empty where the run has not come to its end."""
        file = self.folder / NOTES
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def batches(self) -> GlobalBatches:
        """The other run's."""
        assert self.of is not None, "it has loaded its own"
        folders = sorted((file.parent for file in self.of.glob("*/0.pt")), key=lambda folder: int(folder.name))
        notes = RunRole(self.of).notes
        return GlobalBatches(folders, notes["ends"], notes["batches"])


class Recorder(Checkpoint):
    """Writes down what a run has done; it comes after all other callbacks, as all that save do."""

    def __init__(self, role: RunRole, settled: Sequence[str]) -> None:
        self._role = role
        self._notes: dict[str, Any] = {"ends": [], "draws": False, "settled": settled}
        self._step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        size = samples_of(trainer.train_dataloader, getattr(trainer, "datamodule", None))
        self._notes["unlike one device"] = differences(trainer, size)
        self._begun = {name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()}
        self._notes["parameters"] = list(self._begun)
        batches = trainer.num_training_batches
        self._notes["batches"] = None if math.isinf(batches) else int(batches)
        if self._role.of is None:
            folder = _keeper(trainer).folder = self._role.folder / str(trainer.global_rank)
            folder.mkdir(parents=True)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._role.every_step and trainer.global_step > self._step:
            self._step = trainer.global_step
            trainer.save_checkpoint(self._role.folder / f"step-{self._step}.ckpt")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._notes["draws"] |= not torch.equal(_keeper(trainer).generator, torch.get_rng_state())

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._notes["ends"].append(_keeper(trainer).count)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end: Lightning has made the module's and all other callbacks' last hooks of a step before."""
        trainer.save_checkpoint(self._role.folder / END)
        if not trainer.is_global_zero:
            return
        self._notes |= {
            "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "own": sorted(own_values(trainer)),
            "steps": trainer.global_step,
            "moved": self._moved(pl_module),
            "devices": trainer.world_size,
        }
        (self._role.folder / NOTES).write_text(json.dumps(self._notes))

    def _moved(self, module: LightningModule) -> int:
        """How many parameters are not what they were."""
        return sum(not torch.equal(self._begun[name], value) for name, value in module.named_parameters())


def _keeper(trainer: Trainer) -> Keeps:
    plugin = trainer.precision_plugin
    assert isinstance(plugin, Keeps), "that of a run to be compared"
    return plugin


def settle(module: nn.Module) -> list[str]:
    """Turn off what several processes do in another way than one by design, and say so, a line each.

    Layers that drop at random drop nothing, and batch normalisation takes its running statistics.
    """
    drops = norms = 0
    for layer in module.modules():
        kind = type(layer).__name__.lower()
        drops_itself = any(word in kind for word in DROPPING) or isinstance(layer, nn.MultiheadAttention)
        for name in (*RATES, *DROPS * drops_itself):
            if isinstance(value := getattr(layer, name, None), float) and value > 0:
                setattr(layer, name, 0.0)
                drops += 1
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            layer.eval()
            layer.train = partial(_stays, layer)  # type: ignore[assignment]  # whoever asks
            norms += 1
    said = [f"dropout is off (layers: {drops}): each process draws its own"] * bool(drops)
    statistics = "batch normalisation takes its running statistics"
    said += [f"{statistics} (layers: {norms}): each process would take its own batch's"] * bool(norms)
    return said


def _stays(layer: nn.Module, mode: bool = True) -> nn.Module:
    return layer
