"""Record a run for the comparison: its batches, its logged values, and checkpoints at the end or after each step."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from typing_extensions import override

from cnnstrategies._lightning_private import own_values
from cnnstrategies._torch_private import turn_off_dropout_functions
from cnnstrategies.callbacks.start_panel import differences
from cnnstrategies.data.division import shuffles, yields_each_once
from cnnstrategies.models.samples import samples_of
from cnnstrategies.recording.steps import StepRecorder
from cnnstrategies.strategies.protocol import facts_of
from cnnstrategies.verifying.batches import (
    BatchKeeper,
    GlobalBatches,
    Precision,
    ValidationBatches,
    rank_folders,
)
from cnnstrategies.verifying.contents import contents_of, shares_data_set
from cnnstrategies.verifying.loaded_batches import LOADER, LoadedBatches
from cnnstrategies.verifying.loaders import (
    drawn_samples,
    epoch_samples,
    lines_about_samples,
    loader_of_one_process,
    whole_epoch,
)
from cnnstrategies.verifying.tracer import Trace, Tracer, sketch_of

DROPPING = ("drop", "stochasticdepth")  # Parts of the class names of dropout layers, in lower case.
DROPS = ("p", "drop_prob", "dropout")  # Attributes of dropout layers that may hold the dropout probability.
# Attributes that may hold the dropout probability in modules that call a function instead of a dropout layer.
RATES = ("drop_rate", "dropout_rate", "dropout_p")
END, NOTES, VALIDATED = "end.ckpt", "notes.json", "validated"


@dataclass(frozen=True)
class RunRole:
    """One of the two runs that are compared: under the strategy, or on one device.

    Attributes:
        folder: Folder of the run's files.
        of: Folder of the run under the strategy. The run on one device reads its batches from this folder. None if this
            is the run under the strategy.
        precision: Precision in which the run trains.
        saves_trace: Whether the run saves a trace.
        saves_steps: Whether the run saves a checkpoint after each step.
        noise: Seed of errors of rounding that are added to the outputs of layers; 0 if no errors are added.
    """

    folder: Path
    of: Path | None = None
    precision: Precision = "64-true"
    saves_trace: bool = False
    saves_steps: bool = False
    noise: int = 0

    @property
    def notes(self) -> dict[str, Any]:
        """Notes that the recorder saved at the end of the run, such as the number of steps. Keys are their names.

        The mapping is empty if the run has not reached its end.
        """
        file = self.folder / NOTES
        return dict(json.loads(file.read_text())) if file.exists() else {}

    @property
    def is_first(self) -> bool:
        """Whether this is the first run under the strategy or on one device, which is not repeated for a trace."""
        return not (self.saves_trace or self.saves_steps or self.noise)

    @property
    def loaded(self) -> LoadedBatches:
        """Batches that the ranks have loaded in the run."""
        return LoadedBatches(self.folder, self.notes.get("ends", ()))

    def states(self) -> list[dict[str, Tensor]]:
        """Return sketches of the weights and buffers that the run's ranks had at its end, in the order of the ranks."""
        files = sorted(self.folder.glob("state-*.pt"), key=lambda file: int(file.stem.partition("-")[2]))
        return [torch.load(file) for file in files]

    def traces(self) -> list[Trace]:
        """Return the traces of the run's ranks, in their order."""
        files = sorted(self.folder.glob("trace-*.pt"), key=lambda file: int(file.stem.partition("-")[2]))
        return [torch.load(file, weights_only=False) for file in files]

    def batches(self) -> GlobalBatches:
        """Return the loader of global batches for the run on one device."""
        assert self.of is not None, "the run under the strategy loads its own batches"
        notes = RunRole(self.of).notes
        return GlobalBatches(rank_folders(self.of), notes["ends"], notes["batches"])

    @cached_property
    def validation_batches(self) -> list[ValidationBatches]:
        """Return the loaders of global batches for validations on one device."""
        assert self.of is not None, "the run under the strategy loads its own batches"
        folders = sorted((self.of / VALIDATED).glob("*"), key=lambda folder: int(folder.name))
        return [ValidationBatches(folder) for folder in folders]


class Recorder(Checkpoint):
    """Callback that saves the batches, the checkpoints and the logged values of a run.

    The class derives from ``Checkpoint``, because Lightning calls checkpoint callbacks after all other callbacks.

    Args:
        role: The run to record.
        make: Function that returns the user's training loader.
    """

    def __init__(self, role: RunRole, make: Callable[[], Any]) -> None:
        self._role = role
        self._make = make
        self._notes: dict[str, Any] = {"ends": [], "draws": False, "samples": []}
        self._step = 0
        self._validating = role.validation_batches if role.of is not None else []
        self._validations = 0  # Number of validations that have ended.
        self._loader: dict[str, Any] = {}  # Facts about the loader of a rank that loads batches under the strategy.
        self._tracer: Tracer | None = None
        self._recorder = StepRecorder()

    def settle(self, trainer: Trainer, module: LightningModule) -> None:
        """Change the layers that give other results under the strategy than on one device, in both runs."""
        if self._role.of is None:
            self._notes["settled"] = not facts_of(trainer.strategy).has_layers_of_one_device
        else:
            self._notes["settled"] = RunRole(self._role.of).notes["settled"]
        self._notes["turned off"] = settle(module) if self._notes["settled"] else []
        self._dropout_functions = turn_off_dropout_functions() if self._notes["settled"] else set()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        size = samples_of(trainer.train_dataloader, getattr(trainer, "datamodule", None))
        self._notes["unlike one device"] = differences(trainer, size)
        if self._role.saves_trace:
            rank, holders_of = trainer.global_rank, facts_of(trainer.strategy).holders_of
            self._tracer = Tracer(pl_module, self._role.noise, lambda tensor: rank in (holders_of(tensor) or (rank,)))
        self._begun = {name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()}
        self._notes["parameters"] = list(self._begun)
        batches = trainer.num_training_batches
        self._notes["batches"] = None if math.isinf(batches) else int(batches)
        if self._role.of is None:
            keeper = _keeper(trainer)
            folder = keeper.folder = self._role.folder / str(trainer.global_rank)
            # One of the ranks that have the same batch writes it. If every rank has the global batch, all ranks draw
            # what one device draws.
            facts = facts_of(trainer.strategy)
            keeper.writes = has_batch = trainer.global_rank % facts.ranks_per_batch == 0
            if facts.has_global_batches:
                keeper.writes = keeper.keeps_generator = trainer.is_global_zero
            loader = trainer.train_dataloader
            folder.mkdir(parents=True)
            if trainer.is_global_zero:
                self._notes["samples"] = lines_about_samples(getattr(loader, "loader", loader), trainer.val_dataloaders)
            if has_batch and getattr(loader, "loads", True):
                users = getattr(loader, "loader", loader)
                self._loader = {
                    "drawn": None,  # Known when an epoch has begun.
                    "count": epoch_samples(users),
                    "repeats": not yields_each_once(users),
                    "shuffles": shuffles(users),
                    "contents": contents_of(users) if self._role.is_first and shares_data_set(loader) else None,
                }
        else:
            loader, tested = loader_of_one_process(self._make), RunRole(self._role.of)
            self._notes["whole"] = whole_epoch(loader, reads=bool(tested.notes["ends"]))
            self._notes["other contents"] = tested.loaded.other_contents(loader) if self._role.is_first else ""
        if self._tracer is not None:
            # The optimizers of a worker do not change the weights, because those of the servers do.
            is_worker = facts_of(trainer.strategy).step_kind == "worker"
            self._recorder = StepRecorder([self._tracer], () if is_worker else trainer.optimizers)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._role.saves_steps and trainer.global_step > self._step:
            self._step = trainer.global_step
            trainer.save_checkpoint(self._role.folder / f"step-{self._step}.ckpt")
        if self._loader and batch_idx == trainer.current_epoch == 0:
            # Before, Lightning has called the sampler's `set_epoch`.
            self._loader["drawn"] = drawn_samples(trainer.train_dataloader)
        self._recorder.begin_batch(batch, batch_idx, trainer.global_step)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._recorder.before_step(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._notes["draws"] |= not torch.equal(_keeper(trainer).generator, torch.get_rng_state())
        self._recorder.end_batch(outputs)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._notes["ends"].append(_keeper(trainer).count)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the batches of the validation apart from those of the training."""
        keeper = _keeper(trainer)
        if keeper.folder is not None:
            self._training = keeper.folder, keeper.count
            keeper.folder = keeper.folder / "arrived"
            keeper.folder.mkdir(exist_ok=True)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Move the batch to the folder of its loader and of this validation."""
        keeper = _keeper(trainer)
        if keeper.folder is not None:
            place = self._role.folder / VALIDATED / f"{dataloader_idx}/{self._validations}/{trainer.global_rank}"
            place.mkdir(parents=True, exist_ok=True)
            for file in keeper.folder.glob("*"):
                file.rename(place / f"{batch_idx}{file.suffix}")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        keeper = _keeper(trainer)
        if keeper.folder is not None:
            keeper.folder, keeper.count = self._training
        self._validations += 1
        for loader in self._validating:
            loader.number = self._validations  # Lightning makes several iterators of a loader for one validation.

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save a checkpoint and the notes. Lightning calls this hook after all other hooks of the last step."""
        trainer.save_checkpoint(self._role.folder / END)
        if self._loader:
            (self._role.folder / str(trainer.global_rank) / LOADER).write_text(json.dumps(self._loader))
        # A strategy may need all ranks for the next two values.
        changed = self._changed(pl_module)
        values = [*pl_module.named_parameters(), *pl_module.named_buffers()]
        state = {name: sketch_of(value, by_sample=False) for name, value in values}
        torch.save(state, self._role.folder / f"state-{trainer.global_rank}.pt")
        self._recorder.end()
        if self._tracer is not None:
            self._tracer.save(self._role.folder / f"trace-{trainer.global_rank}.pt", state)
        if not trainer.is_global_zero:
            return
        if self._dropout_functions:
            self._notes["turned off"].append("functions for dropout, such as F.dropout, are off as well")
        has_global_batches = facts_of(trainer.strategy).has_global_batches
        self._notes |= {
            "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "unreduced": [] if has_global_batches else sorted(own_values(trainer)),
            "steps": trainer.global_step,
            "changed": changed,
            "devices": trainer.world_size,
            "validations": self._validations,
            "ranks per batch": facts_of(trainer.strategy).ranks_per_batch,
        }
        (self._role.folder / NOTES).write_text(json.dumps(self._notes))

    def _changed(self, module: LightningModule) -> int:
        """Return the number of parameter tensors that have changed since the start of training."""
        values = {name: value for name, value in module.named_parameters() if name in self._begun}
        return sum(not torch.equal(self._begun[name], value) for name, value in values.items())


def _keeper(trainer: Trainer) -> BatchKeeper:
    plugin = trainer.precision_plugin
    assert isinstance(plugin, BatchKeeper), "verify passes this plugin to each trainer"
    return plugin


def settle(module: nn.Module) -> list[str]:
    """Change the layers that, by design, give different results in several processes and on one device.

    Dropout is turned off, and batch normalisation uses its running statistics.

    Returns:
        A line of text for each kind of layer that was changed.
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
            layer.train = partial(_keep_mode, layer)  # type: ignore[assignment]  # Lightning calls `train()` later.
            norms += 1
    lines = []
    if drops:
        lines.append(f"dropout is off (layers: {drops}), because each process would draw its own random numbers")
    if norms:
        lines.append(
            f"batch normalisation uses its running statistics (layers: {norms}), because each process would use the "
            "statistics of its own batch"
        )
    return lines


def _keep_mode(layer: nn.Module, mode: bool = True) -> nn.Module:
    """Return the layer without changing its mode. :func:`settle` replaces the layer's ``train`` by this function."""
    return layer
