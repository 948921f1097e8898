"""Base of the data modules: loaders, sharding and the attributes that the rest of the package reads."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from cnnstrategies.cluster.environment import check_world
from cnnstrategies.data.decoding import of_image
from cnnstrategies.data.loading import BatchDataset, BatchLoader, Source, TensorSource, Transform
from cnnstrategies.data.preprocessing import Preprocessing
from cnnstrategies.data.sampling import OrderedBatches, ShuffledBatches
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares import Deals
from cnnstrategies.strategies.protocol import facts_of

TaskName = Literal["classes", "multilabel", "regression"]


class ImageDataModule(LightningDataModule):
    """Base of the data modules.

    A subclass sets ``train_transform`` and ``eval_transform``, and sets ``train_source``, ``val_source``,
    ``test_source`` and ``predict_source`` in ``setup``. Each batch is ``(images, targets)``: float32 (N, C, H, W) and
    int64 (N,), or masks (N, H, W). For predict the targets are replaced by the samples' indices.

    Attributes:
        num_classes: Number of classes.
        class_names: Name of each class.
        image_shape: (C, H, W) of one image.
        default_batch_size: ``batch_size`` if neither ``batch_size`` nor ``global_batch_size`` is set.
        ignore_index: Value of mask pixels that count neither in the loss nor in metrics; None if targets are classes of
            images.
        prefetch: Batches that each worker process prepares ahead.
        task: Task that the targets are for: ``classes``, ``multilabel`` or ``regression``.
        preprocessing: Resizing and normalisation of images, if the module can adapt them to a network's trained
            weights; else None.
        not_prepared_as: Preprocessing that a network's trained weights expect and that the module cannot apply, or
            None.
        places: Where the samples of each part are. A part without a place is held out of the training samples.
        left_out: Number of files that are not used, by reason.

    Args:
        batch_size: Samples per batch and process; by default 32, or the subclass's default.
        num_workers: Worker processes per process that load batches; they stay from epoch to epoch. 0 loads in the
            process itself.
        seed: Seed of the split, the shuffling and the augmentation.
        drop_last: Leave out a last, partial training batch.
        pin_memory: Copy batches to pinned memory first, which speeds up the transfer to a GPU. By default the module
            does so if the accelerator is not the CPU.
        global_batch_size: Samples of an optimizer step over all processes, in place of ``batch_size``. This number
            stays the same whatever the strategy and the number of devices. Each process that loads (under a pipeline
            the processes of the first stage) takes its share, to within one sample, of each of the
            ``trainer.accumulate_grad_batches`` batches. Evaluation uses the same division.

    Raises:
        ConfigurationError: A number is out of its range, or both sizes are given.
    """

    default_batch_size: ClassVar[int] = 32
    num_classes: int
    class_names: list[str]
    image_shape: tuple[int, int, int]
    train_source: Source
    val_source: Source
    test_source: Source
    predict_source: Source
    train_transform: Transform
    eval_transform: Transform
    ignore_index: int | None = None
    prefetch: int = 2
    task: TaskName = "classes"
    preprocessing: Preprocessing | None
    not_prepared_as: Preprocessing | None
    places: Mapping[str, str]
    left_out: Counter[str]

    def __init__(
        self,
        batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        drop_last: bool = False,
        pin_memory: bool | None = None,
        global_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size is not None and global_batch_size is not None:
            raise ConfigurationError(
                f"batch_size={batch_size} (per process) and global_batch_size={global_batch_size} (over all processes) "
                "are both set: set one of them to null"
            )
        for name, size in (("batch_size", batch_size), ("global_batch_size", global_batch_size)):
            if size is not None and size < 1:
                raise ConfigurationError(f"{name}={size}: a batch needs at least 1 sample")
        if num_workers < 0:
            raise ConfigurationError(f"num_workers={num_workers} is negative; 0 loads in the training process")
        self.preprocessing = self.not_prepared_as = None
        self.places = {}
        self.left_out = Counter()
        self.global_batch_size = global_batch_size
        self._batch_size = self.default_batch_size if batch_size is None else batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.drop_last = drop_last
        self.pin_memory = pin_memory

    @property
    def batch_size(self) -> int:
        """Samples per batch and process: the largest number if it differs between processes."""
        return self._share_under(self.trainer)

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        # Lightning's BatchSizeFinder sets it.
        if self.global_batch_size is not None:
            raise ConfigurationError(
                f"batch_size={size} cannot be set because global_batch_size={self.global_batch_size} determines it: "
                "leave out global_batch_size to have a batch size searched for"
            )
        self._batch_size = size

    def check_trainer(self, trainer: Trainer) -> None:
        """Refuse a trainer with more processes than the global batch has samples, before the processes start."""
        self._share_under(trainer)

    def _share_under(self, trainer: Trainer | None) -> int:
        if self.global_batch_size is None:
            return self._batch_size
        return share(self.global_batch_size, *division(trainer))

    def _step_under(self, trainer: Trainer | None, replicas: int) -> tuple[int, int]:
        """Return the samples of a step over all processes, and the number of batches in a step.

        With a schedule of accumulation the number of batches changes as training goes on: it then counts as 1.
        """
        if self.global_batch_size is not None:
            return self.global_batch_size, division(trainer)[1]
        accumulated = 1
        if trainer is not None and not schedules_accumulation(trainer):
            accumulated = trainer.accumulate_grad_batches
        return self._batch_size * replicas * accumulated, accumulated

    @abstractmethod
    def setup(self, stage: str) -> None:
        """Create the sources."""

    def set_sources(self, parts: Mapping[str, Source]) -> None:
        """Set the sources of all parts.

        The source of ``test`` is by default the source of ``val``, and the source of ``predict`` that of ``test``.
        """
        self.train_source, self.val_source = parts["train"], parts["val"]
        self.test_source = parts.get("test", self.val_source)
        self.predict_source = parts.get("predict", self.test_source)

    def prepare_as(self, trained: Preprocessing) -> None:
        """Prepare images as a network's trained weights expect them; to be called before ``setup``.

        A data module that cannot do so, such as one of small images, keeps its own preparation, and the start panel
        reports the difference.
        """
        self.not_prepared_as = trained

    def describe(self, part: str) -> str:
        """Return a text with the number of a part's images, their place and their classes, after ``setup``."""
        source = getattr(self, f"{part}_source")
        text, place = f"{len(source):,}", part
        for other in ("test", "val"):
            if source is getattr(self, f"{other}_source", None):
                place = other
        if place in self.places:
            text += f" in {self.places[place]}"
        elif "train" in self.places:
            text += f" held out of {self.places['train']}"
        targets = getattr(source, "targets", None)
        if part != "predict" and isinstance(targets, Tensor) and targets.ndim == 1:
            count = len(set(targets.tolist()))
            text += f", {count} classes" if count == self.num_classes else f", {count} of {self.num_classes} classes"
        if part == "test" and source is getattr(self, "val_source", None):
            text += "\nthe validation images, by which best.ckpt was chosen: there are no separate test images"
        return text

    def sample_name(self, index: int) -> str:
        """Return the name of a row of the predictions: the path of an image file, or else the index."""
        return str(getattr(self.predict_source, "name", str)(index))

    def mask_of_image(self, index: int, mask: Tensor) -> Tensor:
        """Return a predicted mask in the size of its image, without the padding."""
        image_size = getattr(self.predict_source, "image_size", None)
        return mask if image_size is None else of_image(mask, *image_size(index))

    def sharding(self) -> tuple[int, int]:
        """Return the number of processes that the samples are divided among, and the index of this process.

        The strategy is asked and not torch.distributed: with pipeline stages not every rank loads samples.
        """
        kwargs = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (1, 0) if kwargs is None else (kwargs["num_replicas"], kwargs["rank"])

    @property
    def on_accelerator(self) -> bool:
        """Whether a trainer moves the batches to a device other than the CPU."""
        return self.trainer is not None and not isinstance(self.trainer.accelerator, CPUAccelerator)

    def train_dataloader(self) -> BatchLoader:
        """Return the training loader, which shuffles over all processes in each epoch.

        Under ``overfit_batches`` the samples come in order.
        """
        replicas, rank = self.sharding()
        deals = deals_of(self.trainer)
        size = len(self.train_source)
        sampler: ShuffledBatches | OrderedBatches
        if getattr(self.trainer, "overfit_batches", 0) > 0:
            sampler = OrderedBatches(size, self.batch_size, replicas, rank, deals)
        else:
            samples, accumulated = self._step_under(self.trainer, replicas)
            sampler = ShuffledBatches(size, samples, self.seed, replicas, rank, self.drop_last, accumulated, deals)
            check_weights(sampler, self.trainer)
        return self._loader(BatchDataset(self.train_source, self.train_transform), sampler)

    def val_dataloader(self) -> BatchLoader:
        """Return the validation loader: every sample once over all processes."""
        return self._evaluation_loader(self.val_source)

    def test_dataloader(self) -> BatchLoader:
        """Return the test loader: every sample once over all processes."""
        return self._evaluation_loader(self.test_source)

    def predict_dataloader(self) -> BatchLoader:
        """Return the loader for predict: every sample once over all processes, with its index."""
        return self._evaluation_loader(self.predict_source, give_indices=True)

    def _evaluation_loader(self, source: Source, give_indices: bool = False) -> BatchLoader:
        replicas, rank = self.sharding()
        sampler = OrderedBatches(len(source), self.batch_size, replicas, rank, deals_of(self.trainer))
        return self._loader(BatchDataset(source, self.eval_transform, give_indices), sampler)

    def _loader(self, dataset: BatchDataset, sampler: ShuffledBatches | OrderedBatches) -> BatchLoader:
        options: dict[str, Any] = {}
        if self.num_workers:
            options = {"persistent_workers": True, "prefetch_factor": self.prefetch}
        return BatchLoader(
            dataset,
            sampler=sampler,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.on_accelerator if self.pin_memory is None else self.pin_memory,
            # With a generator of its own, the loader does not draw the workers' seeds from the global generator.
            generator=torch.Generator(),
            **options,
        )


def split(size: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split ``range(size)`` at random.

    Returns:
        The indices of both parts, each in ascending order.
    """
    held_out = round(size * fraction)
    if not 0 < held_out < size:
        raise ConfigurationError(
            f"val_split={fraction} of {size} samples leaves {size - held_out} for training and {held_out} for "
            "validation; 0.1 to 0.2 is usual"
        )
    permutation = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return permutation[held_out:].sort().values, permutation[:held_out].sort().values


def split_source(images: Tensor, targets: Tensor, fraction: float, seed: int) -> tuple[TensorSource, TensorSource]:
    """Split samples in memory at random into training and validation; see :func:`split`."""
    training, validation = split(len(images), fraction, seed)
    return TensorSource(images[training], targets[training]), TensorSource(images[validation], targets[validation])


def division(trainer: Trainer | None) -> tuple[int, int]:
    """Return the numbers by which a trainer divides the samples of an optimizer step.

    Returns:
        The number of processes that load (with pipeline stages: the replicas of the first stage), and the number of
        accumulated batches.

    Raises:
        ConfigurationError: The number of accumulated batches changes by a schedule.
    """
    if trainer is None:
        return 1, 1
    if schedules_accumulation(trainer):
        raise ConfigurationError(
            "global_batch_size with GradientAccumulationScheduler: the schedule changes the samples of a step; "
            "set batch_size, which counts per process, and set global_batch_size to null"
        )
    check_world(trainer)
    # The strategy is asked and not the size of the world: with pipeline stages not every process loads.
    sampling = trainer.distributed_sampler_kwargs
    return 1 if sampling is None else sampling["num_replicas"], trainer.accumulate_grad_batches


def deals_of(trainer: Trainer | None) -> Deals | None:
    """Return the shares by which a trainer's strategy divides batches; None for equal shares."""
    return None if trainer is None else facts_of(trainer.strategy).batch_shares


def schedules_accumulation(trainer: Trainer) -> bool:
    """Whether the number of batches that make a step changes as training goes on."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
    return any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)


def share(global_batch_size: int, processes: int, accumulated: int) -> int:
    """Return the samples of a batch of one process: the largest number if it differs between processes.

    Raises:
        ConfigurationError: There is less than one sample for each process and accumulated batch.
    """
    parts = processes * accumulated
    if global_batch_size < parts:
        by = f"{processes} processes that load"
        if accumulated > 1:
            by += f" x accumulate_grad_batches={accumulated}"
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} is less than one sample for each of {by}: use at least {parts}, "
            "or fewer devices"
        )
    return -(-global_batch_size // parts)


def check_weights(sampler: ShuffledBatches, trainer: Trainer | None) -> None:
    """Refuse unequal batches in a run in which the means of all processes count equally."""
    unequal = {count for batch in sampler.step_of(0) for count in sampler.counts(batch)}
    if trainer is None or len(unequal) == 1 or facts_of(trainer.strategy).gradient_weighting != "equal":
        return
    if not any(getattr(callback, "weighs_samples", False) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"global_batch_size={sampler.samples} gives batches of {min(unequal)} and of {max(unequal)} samples: add "
            "cnnstrategies.callbacks.SampleWeights() to the Trainer's callbacks, so that all samples count equally"
        )
