"""Callback that prints a short description of a run before its first batch."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.utils.data import DistributedSampler
from typing_extensions import override

from cnnstrategies.callbacks.tables import print_table, relative, rows_of_callbacks
from cnnstrategies.data.division import has_map, samplers_of
from cnnstrategies.data.module import ImageDataModule
from cnnstrategies.models.samples import samples_of
from cnnstrategies.runtime.memory_records import record_predictions
from cnnstrategies.shares.samplers import dealt
from cnnstrategies.strategies.predicted_memory import predicted_memory
from cnnstrategies.strategies.protocol import facts_of

if TYPE_CHECKING:
    from cnnstrategies.planning.memory import PeakMemory

PARTS = {
    TrainerFn.FITTING: "train",
    TrainerFn.VALIDATING: "val",
    TrainerFn.TESTING: "test",
    TrainerFn.PREDICTING: "predict",
}
Row = tuple[str, str]
STEPS = 20  # Batches after which the real peak memory is compared with the predicted one.
DIFFERENT = 0.15  # Difference of the two peaks, as a fraction of the predicted one, from which a line is printed.


class StartPanel(Callback):
    """Callback that prints a panel on rank 0, after the set-up and before the first batch.

    The panel shows the strategy, devices and nodes; the images and their classes; the size of the global batch; the
    stages of a pipeline, or the servers; the number of parameters of the whole network and of each device; precision
    and memory format; the folder of the results; and the differences from a run on one device. The panels of
    validation, test and prediction have fewer lines.

    The strategy describes itself in its :class:`~cnnstrategies.strategies.protocol.StrategyFacts`.

    After 20 batches on a GPU, rank 0 prints a line if its peak memory, as torch's allocator has counted it, differs
    from the predicted one by more than 15 %. On a CPU there is no such counter, and nothing is printed.
    """

    def __init__(self) -> None:
        self._before = (0, 0)  # Result of `count_parameters` before the strategy's set-up.
        self._batches = 0  # Number of training batches since the panel.
        self._predicted = 0  # Predicted peak memory of rank 0 in bytes; 0 if it is not known.

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # After this hook the strategy may divide the network among the ranks, so the parameters are counted here.
        self._before = count_parameters(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = self._predicted = 0
        self._print("Training", trainer, pl_module, trainer.train_dataloader)
        if self._predicted and trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._batches += 1
        if self._batches == STEPS and self._predicted:
            line = compared_peaks(self._predicted, counted_peak(trainer.strategy.root_device))
            if line is not None:
                rank_zero_info(line)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._print("Validation", trainer, pl_module, trainer.val_dataloaders)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print("Test", trainer, pl_module, trainer.test_dataloaders)

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print("Prediction", trainer, pl_module, trainer.predict_dataloaders)

    def _print(self, title: str, trainer: Trainer, module: LightningModule, loader: Any) -> None:
        if trainer.is_global_zero:
            print_table(title, self._rows(trainer, module, loader))

    def _memory(self, trainer: Trainer, size: int | None) -> list[Row]:
        """Return the panel's row with the predicted peak memory, if it is known."""
        predicted = predicted_memory(trainer, size)
        peaks = predicted.peaks
        if not peaks:
            return []
        self._predicted = peaks[0].total
        if trainer.strategy.root_device.type == "cpu":
            record_predictions([str(peak) for peak in peaks], predicted.plans)
        return [memory_row(peaks)]

    def _rows(self, trainer: Trainer, module: LightningModule, loader: Any) -> list[Row]:
        facts, training = facts_of(trainer.strategy), trainer.state.fn == TrainerFn.FITTING
        size = samples_of(loader, getattr(trainer, "datamodule", None))
        first = loader[0] if isinstance(loader, list) and loader else loader
        rows = [
            ("strategy", facts.display_name),
            ("devices", devices(trainer)),
            *images(trainer),
            training_batch(trainer, size) if training else evaluation_batch(trainer, size, first),
            *(logging_interval(trainer) if training else []),
            *facts.panel_rows(size_of_share(trainer, size, first)),
            *rows_of_callbacks(trainer, "panel_rows"),
            *(self._memory(trainer, size_of_share(trainer, size, first)) if training else []),
            ("parameters", parameters(trainer, whole_network(trainer, module, self._before))),
            ("precision", precision(trainer, module)),
        ]
        if trainer.ckpt_path is not None:
            rows.append(("checkpoint", relative(str(trainer.ckpt_path))))
        folders = [getattr(logger, "log_dir", None) or logger.save_dir for logger in trainer.loggers[:1]]
        rows += [("results", relative(str(folder))) for folder in folders if folder is not None]
        if training:
            rows.append(
                ("unlike one device", "\n".join(differences(trainer, size_of_share(trainer, size, first))) or "nothing")
            )
        return rows


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Return the number of all parameters and the number of trainable parameters.

    Lazy parameters are not counted before they are initialised, because their shapes are not known.
    """
    known = [p for p in module.parameters() if not isinstance(p, nn.UninitializedParameter)]
    return sum(p.numel() for p in known), sum(p.numel() for p in known if p.requires_grad)


def whole_network(trainer: Trainer, module: LightningModule, before: tuple[int, int]) -> tuple[int, int] | None:
    """Return the result of :func:`count_parameters` for the whole network.

    The result is None if this process never held the whole network.

    Args:
        trainer: The trainer.
        module: The module after the strategy's set-up.
        before: Result of :func:`count_parameters` before the strategy's set-up. It is (0, 0) if the module builds its
            network in ``configure_model``.
    """
    if before[0]:
        return before
    return None if facts_of(trainer.strategy).shards_parameters else count_parameters(module)


def devices(trainer: Trainer) -> str:
    """Return a text with the number and kind of the devices and the number of nodes, such as "2 GPUs on 1 node"."""
    kind = trainer.strategy.root_device.type
    world, nodes = trainer.world_size, trainer.num_nodes
    if kind == "cpu":
        name = "CPU process" if world == 1 else "CPU processes"
    else:
        name = {"cuda": "GPU"}.get(kind, kind.upper()) + ("" if world == 1 else "s")
    model = f" ({torch.cuda.get_device_name(trainer.strategy.root_device)})" if kind == "cuda" else ""
    return f"{world} {name}{model} on {nodes} node{'' if nodes == 1 else 's'}"


def training_batch(trainer: Trainer, size: int | None) -> Row:
    """Return the panel's row with the size of the global batch and the number of optimizer steps in an epoch.

    The row also shows the factors of the size: processes, samples in a process's batch, and accumulated batches.
    """
    accumulated, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
    count = loading(trainer, trainer.train_dataloader)
    each = "one batch of each" if size is None else str(size)
    samples = None if size is None else size * count * accumulated
    sampler = dealt(trainer)
    if sampler is not None and sampler.samples:
        sizes = {share for batch in sampler.step_of(0) for share in sampler.counts(batch)}
        each, samples = " or ".join(map(str, sorted(sizes))), sampler.samples
    factors = [
        f"{count} {_processes(trainer, count)} x " if count > 1 else "",
        each,
        f" x {accumulated} accumulated" if accumulated > 1 else "",
    ]
    text = "".join(factors)
    if samples is not None:
        total = f"{samples} image{'' if samples == 1 else 's'}"
        text = f"{total} = {text}" if count * accumulated > 1 else total
    if count == 1 < trainer.world_size:
        text += ", loaded by one process"
    if batches != float("inf"):
        text += f"; {math.ceil(batches / accumulated)} steps an epoch"
        if sampler is None:
            text += epoch_samples(trainer, trainer.train_dataloader, batches)
    return "global batch", text


def logging_interval(trainer: Trainer) -> list[Row]:
    """Return a row if an epoch has fewer batches than the trainer's logging interval.

    The row replaces Lightning's warning, which :mod:`cnnstrategies.commands.run.quiet` hides.
    """
    settings: Any = trainer  # The trainer gets some of its attributes outside of its class.
    interval, batches = settings.log_every_n_steps, trainer.num_training_batches
    if not trainer.loggers or settings.fast_dev_run or batches >= interval:
        return []
    text = f"values of steps are logged every {interval} steps, which is less than once an epoch; set "
    return [("logging", f"{text}trainer.log_every_n_steps={max(1, int(batches))} to see each epoch")]


def epoch_samples(trainer: Trainer, loader: Any, batches: float) -> str:
    """Return a text with the number of samples in an epoch, and the number of samples in the data set.

    The text is empty if the numbers are not known. It does not name the data set's number if the processes may have
    different data sets.

    Args:
        trainer: The trainer.
        loader: A user's loader.
        batches: Number of batches in an epoch.
    """
    size, count = getattr(loader, "batch_size", None), loading(trainer, loader)
    if not has_map(getattr(loader, "loader", loader)) or size is None:
        return ""
    sampler = next((entry for entry in samplers_of(loader) if isinstance(entry, DistributedSampler)), None)
    each = sized_len(loader.sampler if sampler is None else sampler)
    whole = sized_len(loader.dataset)
    if each is None or whole is None:
        return ""
    samples = min(each, int(batches) * size) * count
    if sampler is None:
        return f", {samples:,} samples" if count > 1 else f", {samples:,} of {whole:,} samples"
    return f", {min(samples, whole):,} of {whole:,} samples"


def evaluation_batch(trainer: Trainer, size: int | None, loader: Any) -> Row:
    """Return the panel's row with the number of processes that evaluate, and the size of a process's batch."""
    count = loading(trainer, loader)
    processes = f"{count} {_processes(trainer, count)} x " if count > 1 else ""
    return "batch", f"{processes}{'one batch' if size is None else f'{size} image' + 's' * (size > 1)}"


def images(trainer: Trainer) -> list[Row]:
    """Return the panel's rows on the data: number of images, classes, folders, ignored files, and preprocessing."""
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, ImageDataModule):
        return []
    part = PARTS[trainer.state.fn or TrainerFn.FITTING]
    lines = [data.describe(part), *([f"validation: {data.describe('val')}"] if part == "train" else [])]
    if left_out := [f"{count:,} {reason}" for reason, count in data.left_out.items() if count]:
        lines.append(f"left out: {', '.join(left_out)}")
    rows = [("images", "\n".join(lines))]
    if data.preprocessing is not None:
        resized = f"{getattr(data, 'resize', None)} to {data.image_shape[1]} pixels"
        rows.append(("preprocessing", f"{resized}, {data.preprocessing}"))
    elif data.not_prepared_as is not None:
        text = f"set by {type(data).__name__}; the pretrained weights expect"
        rows.append(("preprocessing", f"{text} {data.not_prepared_as.image_size} pixels, {data.not_prepared_as}"))
    return rows


def loading(trainer: Trainer, loader: Any) -> int:
    """Return the number of processes that load the data of a loader.

    In a pipeline only the ranks of the first stage load data, unless the user's code has divided the data among all
    ranks.
    """
    known: int | None = getattr(loader, "loading_processes", None)
    if known is not None:
        return known
    sampling = trainer.distributed_sampler_kwargs
    return 1 if sampling is None else int(sampling["num_replicas"])


def size_of_share(trainer: Trainer, size: int | None, loader: Any) -> int | None:
    """Return the mean number of samples that a process of the first stage has in a batch; None if it is not known.

    This is the size of a process's batch, unless the processes of other stages also load data and hand them over.
    """
    return None if size is None else size * loading(trainer, loader) // loading(trainer, None)


def _processes(trainer: Trainer, count: int) -> str:
    return "processes" if count == trainer.world_size else "loading processes"


def memory_row(peaks: "Sequence[PeakMemory]") -> Row:
    """Return the panel's row with the predicted peak memory of the devices, and the parts of the largest peak."""
    totals = [peak.total for peak in peaks]
    fullest = peaks[totals.index(max(totals))]
    decimals = 0 if fullest.total >= 2e7 else 1

    def megabytes(size: int) -> str:
        return f"{size / 1e6:,.{decimals}f}"

    least, most = megabytes(min(totals)), megabytes(max(totals))
    text = f"{most} MB" if least == most else f"{least} to {most} MB"
    parts = [f"{name} {megabytes(size)}" for name, size in fullest.parts().items() if size >= 5e5 / 10**decimals]
    return "memory", f"{text} of tensors, predicted{'' if least == most else f'; {most}'}: {', '.join(parts)}"


def counted_peak(device: torch.device) -> int:
    """Return the peak memory in bytes that torch's allocator has counted; 0 if the device does not count it."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def compared_peaks(predicted: int, real: int) -> str | None:
    """Return a line if a real peak differs much from the predicted one; None otherwise.

    Args:
        predicted: Predicted peak memory in bytes.
        real: Real peak memory in bytes; 0 if the device does not count it.
    """
    if not real or abs(real - predicted) <= DIFFERENT * predicted:
        return None
    return (
        f"Peak memory of rank 0 after {STEPS} batches: {real / 1e6:,.0f} MB, {abs(real / predicted - 1):.0%} "
        f"{'more' if real > predicted else 'less'} than the predicted {predicted / 1e6:,.0f} MB"
    )


def parameters(trainer: Trainer, whole: tuple[int, int] | None) -> str:
    """Return a text with the number of parameters of the whole network, if known, and of each device.

    Args:
        trainer: The trainer.
        whole: Result of :func:`whole_network`.
    """
    if whole is None:
        text = "not counted"
    else:
        text = f"{whole[0]:,}" if whole[0] == whole[1] else f"{whole[0]:,}, of which {whole[1]:,} are trained"
    world = trainer.world_size
    facts = facts_of(trainer.strategy)
    held = facts.parameters_per_device
    if held is not None:
        least, most = min(held), max(held)
        return f"{text}; {f'{least:,}' if least == most else f'{least:,} to {most:,}'} on a device"
    if facts.shards_parameters:
        return f"{text}; divided over {world} devices"
    return text if world == 1 else f"{text}; all of them on each device"


def precision(trainer: Trainer, module: nn.Module) -> str:
    """Return a text with the precision and the memory format of the weights."""
    last = any(p.ndim == 4 and not p.is_contiguous() and _channels_last(p) for p in module.parameters())
    slow = trainer.precision == "16-true" and trainer.strategy.root_device.type == "cpu"
    # Measured on a CPU without instructions for float16: a convolution takes 7 to 40 times as long as in float32.
    note = "; most CPUs compute float16 many times more slowly than bf16-true or 32-true" if slow else ""
    return f"{trainer.precision}, {'channels_last' if last else 'contiguous'}{note}"


def differences(trainer: Trainer, size: int | None) -> list[str]:
    """Return a line for each difference from a run on one device.

    Args:
        trainer: The trainer.
        size: Number of samples in one process's batch, or None if it is not known.
    """
    sampler = dealt(trainer)
    if sampler is not None and len(set(sampler.counts(0))) > 1:
        size = None
    return facts_of(trainer.strategy).differences(size)


def _channels_last(parameter: nn.Parameter) -> bool:
    return parameter.is_contiguous(memory_format=torch.channels_last)
