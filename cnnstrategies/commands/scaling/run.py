"""The program of a rank in a trial that loads a new batch in each step, as ``fit`` does.

``scaling`` uses such trials, and ``tune`` uses them to measure the loading of data. The measuring process requests a
number of steps, and each rank reports how long the parts of these steps took. Only
:class:`cnnstrategies.planning.tune.trial.Trial` runs this module.
"""

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import SaveConfigCallback
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from cnnstrategies._lightning_private import saves_in_epoch
from cnnstrategies._torch_private import READ, OperationMode
from cnnstrategies.callbacks import Pictures, SlowLines, StartPanel, TrainingSummary
from cnnstrategies.callbacks.step_parts import TOTAL, StepMeter
from cnnstrategies.commands.run.trainer import as_list
from cnnstrategies.commands.scaling.probes import load_alone, one_sample, prefetched, sum_alone
from cnnstrategies.commands.scaling.recorder import TimelineRecorder
from cnnstrategies.commands.tune.step_control import StepControl, TrialCLI, run_rank
from cnnstrategies.models.samples import count_samples, samples_of
from cnnstrategies.planning.scaling.timeline import WAITING
from cnnstrategies.planning.tune.trial import TRIAL
from cnnstrategies.recording.actions import CALLBACK, LOGGER, callback_of
from cnnstrategies.runtime.waiting import report_forwards, unwatch, watch
from cnnstrategies.strategies.protocol import facts_of

VALIDATED = 4  # Number of validation batches that are measured.
# A measurement skips the batches that were loaded in advance, but at most this number of batches.
MOST_READY = 32
# Class names of the loggers that send runs to a server, which a measured run leaves out.
REMOTE = ("WandbLogger", "MLFlowLogger", "CometLogger", "NeptuneLogger")
# Classes of callbacks that a measured run leaves out.
LEFT_OUT = (
    *(Checkpoint, EarlyStopping, ProgressBar, SaveConfigCallback),
    *(Pictures, SlowLines, StartPanel, TrainingSummary),
)


class ScalingControl(StepControl):
    """Callback that makes the requested number of steps, measures the parts of these steps, and reports the results.

    Args:
        saving: The configured checkpoint callbacks. A trial does not run them, but this callback reports how often they
            would save a checkpoint in an epoch.
        configured: Class names of the callbacks in the configuration.
        root: Folder to which the run would write its files.
    """

    def __init__(
        self, saving: Sequence[ModelCheckpoint] = (), configured: Set[str] = frozenset(), root: str = "."
    ) -> None:
        super().__init__()
        self._saving = saving
        self._root = root
        self._configured = configured
        self._skipped = 0
        self._samples = 0.0
        self._larger = 1
        self._validated: list[float] = []
        self._reads: HostReads | None = None

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._validated.append(time.perf_counter())

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epochs = trainer.check_val_every_n_epoch or 1
        trainer.check_val_every_n_epoch = sys.maxsize
        self._trainer = trainer
        self._ranks_per_batch = facts_of(trainer.strategy).ranks_per_batch
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._default_callbacks = default_callbacks(callbacks, self._configured) | {type(self).__name__}
        self._meter = StepMeter(trainer, self._part, counts_waits=False)
        for logger in trainer.loggers:
            for name in ("log_metrics", "save"):
                setattr(logger, name, self._counted(getattr(logger, name), LOGGER + type(logger).__name__))
        strategy: Any = trainer.strategy
        strategy.batch_to_device = self._enlarged(strategy.batch_to_device)
        report_forwards(strategy.model)
        super().on_train_start(trainer, pl_module)

    @override
    def hello(self, trainer: Trainer) -> dict[str, Any]:
        loader: Any = trainer.train_dataloader
        self._ready = min(MOST_READY, prefetched(loader))
        datamodule = trainer.datamodule  # type: ignore[attr-defined]  # Lightning's data connector sets it.
        self._usual = samples_of(loader, datamodule) or 1
        steps = trainer.num_training_batches
        # The time of the first validation batch includes the start of the loader's workers, so the first batch is left
        # out if there is a second batch.
        end_times = self._validated[1:] if len(self._validated) > 2 else self._validated
        seconds = (end_times[-1] - end_times[0]) / (len(end_times) - 1) if len(end_times) > 1 else 0.0
        return {
            "facts": {
                "accelerator": trainer.strategy.root_device.type != "cpu",
                "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
                "threads": torch.get_num_threads(),
                "workers": int(getattr(loader, "num_workers", 0) or 0),
                "log_every": trainer.log_every_n_steps,  # type: ignore[attr-defined]
            },
            "steps": int(steps) if steps != float("inf") else None,
            "validation": seconds * self._validation_batches(trainer),
            "saving": sum(saves_in_epoch(callback, trainer) for callback in self._saving),
            # Each rank has the whole network.
            "alike": "communication" in self._meter.parts.waiting,
            # The ranks with parts of the same images sum gradients layer by layer.
            "link": "communication" in self._meter.parts.waiting and self._ranks_per_batch == 1,
        }

    def _validation_batches(self, trainer: Trainer) -> float:
        """Return the mean number of validation batches in a training epoch."""
        every, steps = trainer.val_check_batch, trainer.num_training_batches
        if every is None:
            return 0.0  # The trainer validates at intervals of time, so the number of batches in an epoch is not known.
        validations = 1 if float("inf") in (every, steps) else steps / every
        return (
            sum(batches for batches in trainer.num_val_batches if batches != float("inf")) * validations / self._epochs
        )

    def _part(self, action: str) -> str | None:
        """Return the part of a step to which an action of Lightning's profiler belongs.

        Return None if the action belongs to no part.
        """
        if (part := self._meter.parts.of(action)) is not None:
            return part
        return part_of_hook(action, self._default_callbacks)

    def _counted(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self._meter.clock.begin(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._meter.clock.end()

        return called

    def _enlarged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return function(larger(batch, self._larger) if self._larger > 1 else batch, *args, **kwargs)

        return called

    @override
    def execute(self, command: Mapping[str, Any]) -> None:
        if "probe" in command:
            self.say(self._probe(command))
        else:
            self._begin(command)

    def _begin(self, command: Mapping[str, Any]) -> None:
        self._meter.remove(self._trainer)
        self._meter = StepMeter(self._trainer, self._part, counts_waits=False)
        # Skip the current batch and the batches that were loaded in advance: the measured steps must include loading.
        self._left, self._skipped, self._larger = command["steps"], 1 + self._ready, command.get("larger", 1)
        self._samples, self._threads = 0.0, torch.get_num_threads()
        self._recorder = TimelineRecorder(self._meter.clock)
        if "threads" in command:
            torch.set_num_threads(command["threads"])
        if command.get("reads"):
            self._reads = HostReads()
            self._reads.__enter__()  # type: ignore[no-untyped-call]

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._meter.before_backward()

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._meter.sums_gradients:
            self._recorder.end_backward()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note_loss(outputs)
        if not self._left:
            return
        if self._skipped:
            self._skipped -= 1
            if not self._skipped:
                self._meter.prepare()
                self._meter.run()
                watch(self._recorder)
                self._mark = time.perf_counter()
            return
        self._meter.end_step()
        # In a pipeline each rank gets the whole batch, and several ranks may have parts of the same images. The number
        # of samples is divided by the number of these ranks.
        seen_by = self._ranks_per_batch if self._meter.pipeline is None else trainer.world_size
        self._samples += (count_samples(batch) or self._usual) / seen_by
        self._left -= 1
        if not self._left:
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        seconds, steps = time.perf_counter() - self._mark, self._meter.steps
        self._meter.remove(trainer)
        torch.set_num_threads(self._threads)
        waiting = self._meter.parts.waiting
        parts = {
            WAITING + name if name in waiting else name: value
            for name, value in self._meter.means().items()
            if name not in (TOTAL, "communication_total")
        }
        unwatch(self._recorder)
        self._recorder.end([open_ for open_, _ in self._meter.all_reduces])
        answer = {
            "seconds": seconds,
            "steps": steps,
            "samples": self._samples,
            "parts": parts,
            "timeline": self._recorder.segments,
            "losses": self._losses,
        }
        if self._reads is not None:
            self._reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            counts = {place: count / steps for place, count in self._reads.places.items()}
            answer |= {"reads": counts, "read_seconds": self._reads.seconds / steps}
            self._reads = None
        self.say(answer)

    def _probe(self, command: Mapping[str, Any]) -> dict[str, Any]:
        trainer, module = self._trainer, self._trainer.lightning_module
        if command["probe"] == "sum":
            return sum_alone(module, trainer.accumulate_grad_batches)
        if command["probe"] == "sample":
            return one_sample(trainer.train_dataloader)
        if command["probe"] == "save":
            path = checkpoint_folder(self._saving, self._root) / command["name"]
            began = time.perf_counter()
            trainer.save_checkpoint(path)
            seconds = time.perf_counter() - began
            trainer.strategy.remove_checkpoint(path)
            return {"seconds": seconds}
        loader: Any = trainer.train_dataloader
        if self._ranks_per_batch > 1:
            if trainer.global_rank % self._ranks_per_batch:
                return {}  # Another rank of the group loads.
            loader = loader.loader
        return load_alone(loader, command["seconds"])

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = [time.perf_counter()]


def checkpoint_folder(saving: Sequence[ModelCheckpoint], root: str) -> Path:
    """Return the folder of a run's checkpoints, or the nearest existing folder above it.

    Its disk determines how long saving a checkpoint takes. A measured run does not create folders.

    Args:
        saving: The configured checkpoint callbacks.
        root: Folder to which the run writes its files.
    """
    folder = Path(next((callback.dirpath for callback in saving if callback.dirpath), root)).absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def default_callbacks(callbacks: Sequence[Callback], configured: Set[str]) -> set[str]:
    """Return the class names of this package's callbacks that are not in the configuration.

    Args:
        callbacks: All callbacks of a trainer.
        configured: Class names of the callbacks in the configuration.
    """
    kinds = (type(callback) for callback in callbacks)
    return {kind.__name__ for kind in kinds if kind.__module__.startswith("cnnstrategies.")} - configured


def part_of_hook(action: str, default_callbacks: Set[str]) -> str | None:
    """Return the part of a step to which a hook of a callback or of a module belongs.

    Args:
        action: Name of an action, which is a call that Lightning's profiler measures. The call of a hook has a name
            such as ``[Callback]Name.on_train_batch_end``.
        default_callbacks: Class names of this package's default callbacks.

    Returns:
        The name of the part. None for a hook of a default callback, and for an action that is not a hook.
    """
    if (name := callback_of(action)) is not None:
        return None if name in default_callbacks else CALLBACK + name
    owner, _, hook = action.rpartition(".")
    if owner.startswith("[LightningModule]") and hook.startswith("on_") and "batch_transfer" not in hook:
        return f"{CALLBACK}{owner.removeprefix('[LightningModule]')}.{hook}"
    return None


class HostReads(OperationMode):  # type: ignore[no-untyped-call]
    """Mode of torch that counts how often the CPU reads the value of a tensor.

    On a GPU each such read waits until the GPU has computed the value.

    Attributes:
        places: Maps a line of code, as ``file:line``, to the number of reads in this line.
        seconds: Total duration of the reads, in seconds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: Counter[str] = Counter()
        self.seconds = 0.0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not READ:
            return func(*args, **(kwargs or {}))
        began = time.perf_counter()
        value = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - began
        frames = [frame for frame in traceback.extract_stack()[:-1] if "torch" not in Path(frame.filename).parts]
        self.places[f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"] += 1
        return value


def larger(batch: Any, times: int) -> Any:
    """Return a batch that is ``times`` times as large: each tensor is repeated along its first dimension."""
    return tree_map(
        lambda value: (
            value.repeat(times, *[1] * (value.ndim - 1)) if isinstance(value, Tensor) and value.ndim else value
        ),
        batch,
    )


class ScalingCLI(TrialCLI):
    """Command line of a measured rank, which trains like ``fit``.

    The progress bar, the start panel, checkpoints and loggers with a remote server are left out. All files are written
    to a temporary folder.
    """

    @override
    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        trainer = self.config.fit.trainer
        folder = str(Path(os.environ[TRIAL]).parent)
        self.run_root = str(trainer.default_root_dir or ".")
        trainer.default_root_dir = folder
        trainer.num_sanity_val_steps = VALIDATED
        arguments = getattr(trainer.strategy, "init_args", None) or {}
        if arguments.get("data_dispatch") == "dynamic":
            # All ranks must make the requested number of steps. With dynamic dispatch, a rank may get no more batches
            # at the end of an epoch, so it could make too few steps.
            arguments["data_dispatch"], arguments["max_joiners"] = "static", 0
        if not isinstance(trainer.logger, bool):
            kept = [logger for logger in as_list(trainer.logger) if logger.class_path.rpartition(".")[2] not in REMOTE]
            for logger in kept:
                if "save_dir" in (logger.get("init_args") or {}):
                    logger.init_args.save_dir = folder
            trainer.logger = kept or False

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        saving = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        configured = {callback.class_path.rpartition(".")[2] for callback in as_list(self.config.fit.trainer.callbacks)}
        callbacks[:] = [
            *(callback for callback in callbacks if not isinstance(callback, LEFT_OUT)),
            ScalingControl(saving, configured, self.run_root),
        ]
        return trainer


def main() -> None:
    """Run this process as a rank of a trial that trains like ``fit``."""
    run_rank(ScalingCLI)


if __name__ == "__main__":
    main()
