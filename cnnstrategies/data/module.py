"""Base class of the data modules.

It builds the loaders, and divides batches among the processes. The command line, the models and the start panel read
its attributes.
"""

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
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.shares.history import ShareHistory
from cnnstrategies.shares.samplers import OrderedBatches, ShuffledBatches
from cnnstrategies.strategies.protocol import facts_of

TaskName = Literal["classes", "multilabel", "regression"]


class ImageDataModule(LightningDataModule):
    """Base class of the data modules.

    A subclass sets ``train_transform`` and ``eval_transform``, and in ``setup`` it sets ``train_source``,
    ``val_source``, ``test_source`` and ``predict_source``. A batch is ``(images, targets)`` with images float32
    (N, C, H, W) and targets int64 (N,), or int64 (N, H, W) for masks. For predict a batch is ``(images, indices)``.

    Attributes:
        num_classes: Number of classes.
        class_names: Name of each class.
        image_shape: (C, H, W) of one image.
        default_batch_size: Number of samples in a batch of each process if neither ``batch_size`` nor
            ``global_batch_size`` is set.
        ignore_index: Value of mask pixels that the loss and the metrics ignore; None if the module has no masks.
        prefetch: Number of batches that each worker process prefetches.
        task: Learning task of the targets: ``classes``, ``multilabel`` or ``regression``.
        preprocessing: Resizing and normalisation of the images, which can be adapted to pretrained weights. None if the
            module cannot change its preprocessing.
        not_prepared_as: Preprocessing that a network's pretrained weights expect, if this module cannot change its own
            preprocessing; otherwise None.
        places: Folder or file of each split's samples, for the start panel. A split that is not in this mapping is held
            out of the training samples.
        bits: Number of bits that images with 16 bits per pixel use; None if there are no such images.
        left_out: Numbers of ignored files; keys are the reasons.

    Args:
        batch_size: Number of samples in a batch of each process; by default 32, or the subclass's default.
        num_workers: Number of worker processes that load batches for each process. The workers persist over all epochs.
            With 0 the process loads the batches itself.
        seed: Seed of the split into training and validation, the shuffling and the augmentation.
        drop_last: Whether to leave out the last training batch of an epoch if it is smaller than the others.
        pin_memory: Whether to copy batches to pinned memory, which speeds up their transfer to a GPU. By default
            batches are copied to pinned memory unless the accelerator is the CPU.
        global_batch_size: Number of samples of an optimizer step over all processes. Set this instead of
            ``batch_size`` if the number must not depend on the strategy and the number of devices. A step has
            ``trainer.accumulate_grad_batches`` batches. Each batch is divided equally among the processes that load
            data: the processes' numbers of samples differ by at most one. Under a pipeline, only the processes of the
            first stage load data. Evaluation batches are divided like training batches.

    Raises:
        ConfigurationError: A number is out of its range, or ``batch_size`` and ``global_batch_size`` are both set.
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
    bits: int | None = None
    prefetch: int = 2
    task: TaskName = "classes"
    preprocessing: Preprocessing | None
    not_prepared_as: Preprocessing | None
    places: Mapping[str, str]
    left_out: Counter[str]
    dataset_class: ClassVar[type[BatchDataset]] = BatchDataset

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
                f"batch_size={batch_size} (for each process) and global_batch_size={global_batch_size} (for all "
                "processes) are both set: set one of them to null"
            )
        for name, size in (("batch_size", batch_size), ("global_batch_size", global_batch_size)):
            if size is not None and size < 1:
                raise ConfigurationError(f"{name}={size}: a batch needs at least 1 sample")
        if num_workers < 0:
            raise ConfigurationError(f"num_workers={num_workers} is negative; use 0 to load in the training process")
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
        """Number of samples in a batch of one process.

        If the processes have batches of different sizes, this is the largest size.
        """
        return self._share_under(self.trainer)

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        # Lightning's BatchSizeFinder sets this property to search for a batch size.
        if self.global_batch_size is not None:
            raise ConfigurationError(
                f"batch_size={size} cannot be set, because global_batch_size={self.global_batch_size} determines the "
                "batch size: set global_batch_size to null to search for a batch size"
            )
        self._batch_size = size

    def check_trainer(self, trainer: Trainer) -> None:
        """Raise a ConfigurationError if the global batch has too few samples for the trainer's processes.

        Call this before the processes start.
        """
        self._share_under(trainer)

    def _share_under(self, trainer: Trainer | None) -> int:
        if self.global_batch_size is None:
            return self._batch_size
        return share(self.global_batch_size, *division(trainer))

    def _step_under(self, trainer: Trainer | None, replicas: int) -> tuple[int, int]:
        """Return the number of samples in a step over all processes, and the number of accumulated batches in a step.

        With a GradientAccumulationScheduler the number of accumulated batches is not constant. The second result is
        then 1.
        """
        if self.global_batch_size is not None:
            return self.global_batch_size, division(trainer)[1]
        accumulated = 1
        if trainer is not None and not schedules_accumulation(trainer):
            accumulated = trainer.accumulate_grad_batches
        return self._batch_size * replicas * accumulated, accumulated

    @abstractmethod
    def setup(self, stage: str) -> None:
        """Create the sources of all splits."""

    def set_sources(self, parts: Mapping[str, Source]) -> None:
        """Set the source of each split, from a mapping with the keys ``train``, ``val``, ``test`` and ``predict``.

        Without a source for ``test``, the validation samples are used for testing. Without a source for ``predict``,
        the test samples are used.
        """
        self.train_source, self.val_source = parts["train"], parts["val"]
        self.test_source = parts.get("test", self.val_source)
        self.predict_source = parts.get("predict", self.test_source)

    def prepare_as(self, trained: Preprocessing) -> None:
        """Set the preprocessing that a network's pretrained weights expect. Call this before ``setup``.

        Some data modules, such as the modules for small images, cannot change their preprocessing. The start panel then
        shows the preprocessing of the data module and the preprocessing that the weights expect.
        """
        self.not_prepared_as = trained

    def describe(self, part: str) -> str:
        """Return a text for the start panel: a split's number of images, their folder and their number of classes.

        Call this after ``setup``.
        """
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
        if part == "train" and self.bits is not None:
            text += f", {self.bits} of 16 bits used"
        if part == "test" and source is getattr(self, "val_source", None):
            text += "\nthe validation images, by which best.ckpt was chosen: there are no separate test images"
        return text

    def sample_name(self, index: int) -> str:
        """Return the name of a predicted sample: the path of the image file, or else the sample's index."""
        return str(getattr(self.predict_source, "name", str)(index))

    def mask_of_image(self, index: int, mask: Tensor) -> Tensor:
        """Remove the padding from a predicted mask, and scale the mask to the size of the image file."""
        image_size = getattr(self.predict_source, "image_size", None)
        return mask if image_size is None else of_image(mask, *image_size(index))

    def sharding(self) -> tuple[int, int]:
        """Return the number of processes that load samples, and the index of this process among them.

        The numbers come from the strategy and not from torch.distributed, because in a pipeline only some ranks load
        samples.
        """
        kwargs = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (1, 0) if kwargs is None else (kwargs["num_replicas"], kwargs["rank"])

    @property
    def on_accelerator(self) -> bool:
        """Whether the trainer moves the batches to an accelerator other than the CPU."""
        return self.trainer is not None and not isinstance(self.trainer.accelerator, CPUAccelerator)

    def train_dataloader(self) -> BatchLoader:
        """Return the training loader. In each epoch all samples are shuffled and divided among the processes.

        With ``overfit_batches`` the samples are not shuffled.
        """
        replicas, rank = self.sharding()
        history = share_history_of(self.trainer)
        size = len(self.train_source)
        sampler: ShuffledBatches | OrderedBatches
        if getattr(self.trainer, "overfit_batches", 0) > 0:
            sampler = OrderedBatches(size, self.batch_size, replicas, rank, history)
        else:
            samples, accumulated = self._step_under(self.trainer, replicas)
            sampler = ShuffledBatches(size, samples, self.seed, replicas, rank, self.drop_last, accumulated, history)
            check_weights(sampler, self.trainer)
        return self._loader(self.dataset_class(self.train_source, self.train_transform), sampler)

    def val_dataloader(self) -> BatchLoader:
        """Return the validation loader. Each sample is evaluated exactly once, by one of the processes."""
        return self._evaluation_loader(self.val_source)

    def test_dataloader(self) -> BatchLoader:
        """Return the test loader. Each sample is evaluated exactly once, by one of the processes."""
        return self._evaluation_loader(self.test_source)

    def predict_dataloader(self) -> BatchLoader:
        """Return the loader for predict. Each sample is predicted exactly once, by one of the processes."""
        return self._evaluation_loader(self.predict_source, give_indices=True)

    def _evaluation_loader(self, source: Source, give_indices: bool = False) -> BatchLoader:
        replicas, rank = self.sharding()
        sampler = OrderedBatches(len(source), self.batch_size, replicas, rank, share_history_of(self.trainer))
        return self._loader(self.dataset_class(source, self.eval_transform, give_indices), sampler)

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
            # Without this generator, the loader would draw the workers' seeds from torch's global generator, and so
            # change the random numbers of the training.
            generator=torch.Generator(),
            **options,
        )


def split(size: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split the indices 0 to ``size - 1`` at random into training and validation.

    Args:
        size: Number of samples.
        fraction: Fraction of the samples for validation.
        seed: Seed of the random split.

    Returns:
        The indices for training and the indices for validation, each in ascending order.

    Raises:
        ConfigurationError: The fraction leaves no sample for training or for validation.
    """
    held_out = round(size * fraction)
    if not 0 < held_out < size:
        raise ConfigurationError(
            f"val_split={fraction} of {size} samples gives {size - held_out} samples for training and {held_out} for "
            "validation: use a fraction that gives at least 1 sample for each; 0.1 to 0.2 is usual"
        )
    permutation = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return permutation[held_out:].sort().values, permutation[:held_out].sort().values


def split_source(images: Tensor, targets: Tensor, fraction: float, seed: int) -> tuple[TensorSource, TensorSource]:
    """Split samples in memory at random into a training source and a validation source; see :func:`split`."""
    training, validation = split(len(images), fraction, seed)
    return TensorSource(images[training], targets[training]), TensorSource(images[validation], targets[validation])


def division(trainer: Trainer | None) -> tuple[int, int]:
    """Return the number of processes and the number of batches among which an optimizer step's samples are divided.

    Returns:
        The number of processes that load data (in a pipeline, the replicas of the first stage), and the number of
        accumulated batches in a step.

    Raises:
        ConfigurationError: A GradientAccumulationScheduler changes the number of accumulated batches.
    """
    if trainer is None:
        return 1, 1
    if schedules_accumulation(trainer):
        raise ConfigurationError(
            "global_batch_size cannot be used with GradientAccumulationScheduler, which changes the number of samples "
            "in a step: set batch_size (for each process), and set global_batch_size to null"
        )
    check_world(trainer)
    # Use the sampler's number of replicas and not the world size, because in a pipeline only some processes load data.
    sampling = trainer.distributed_sampler_kwargs
    return 1 if sampling is None else sampling["num_replicas"], trainer.accumulate_grad_batches


def share_history_of(trainer: Trainer | None) -> ShareHistory | None:
    """Return the ranks' shares, by which the trainer's strategy divides each batch.

    The result is None if all ranks have equal shares.
    """
    return None if trainer is None else facts_of(trainer.strategy).batch_shares


def schedules_accumulation(trainer: Trainer) -> bool:
    """Whether a GradientAccumulationScheduler changes the number of accumulated batches during training."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set outside the class
    return any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)


def share(global_batch_size: int, processes: int, accumulated: int) -> int:
    """Return the number of samples in a batch of one process.

    If the processes have batches of different sizes, return the largest size.

    Args:
        global_batch_size: Number of samples in an optimizer step over all processes.
        processes: Number of processes that load data.
        accumulated: Number of accumulated batches in an optimizer step.

    Raises:
        ConfigurationError: There is less than one sample for each process and accumulated batch.
    """
    parts = processes * accumulated
    if global_batch_size < parts:
        by = f"{processes} processes that load data"
        if accumulated > 1:
            by += f" x accumulate_grad_batches={accumulated}"
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} is less than one sample for each of {by}: set it to at least "
            f"{parts}, or use fewer devices"
        )
    return -(-global_batch_size // parts)


def check_weights(sampler: ShuffledBatches, trainer: Trainer | None) -> None:
    """Raise a ConfigurationError if samples in small batches would have a larger weight than other samples.

    This is the case if the batches have unequal sizes, and the strategy gives the mean gradients of all ranks equal
    weights. The callback ``SampleWeights`` corrects the weights, so with this callback no error is raised.
    """
    unequal = {count for batch in sampler.step_of(0) for count in sampler.counts(batch)}
    if trainer is None or len(unequal) == 1 or facts_of(trainer.strategy).gradient_weighting != "equal":
        return
    if not any(getattr(callback, "weighs_samples", False) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"with global_batch_size={sampler.samples} some batches have {min(unequal)} and others {max(unequal)} "
            "samples: add cnnstrategies.callbacks.SampleWeights() to the Trainer's callbacks, so that all samples have "
            "the same weight"
        )
