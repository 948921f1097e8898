"""Faults of data and augmentations that were written after the checks."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from data_faults import Divided
from programs import BATCH, UNSEEN, Data, Net, Program, fault, own_rank, program
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

USER = "user"
unseen = partial(fault, table=UNSEEN)


def with_data(make: Any, strategy: str = "ddp") -> Program:
    """Return a program with other data.

    Args:
        make: Function that makes the data module.
        strategy: Registered name of the strategy.
    """
    made = program(strategy)
    made.data = make()
    return made


class OwnEpoch(DistributedSampler[Any]):
    """Sampler whose order is that of another epoch on each rank."""

    def set_epoch(self, epoch: int) -> None:
        """Add the rank to the epoch."""
        super().set_epoch(epoch + own_rank())


@unseen(USER, partial(with_data, Divided), step=1)
def set_epoch_with_another_number_on_each_rank(program: Program) -> None:
    """`set_epoch` gets another number on each rank, so the ranks divide different orders."""
    program.data = Divided(sampler=OwnEpoch)


class NoisySamples(Dataset[tuple[Tensor, Tensor]]):
    """Samples with random noise.

    Args:
        samples: Images and targets.
    """

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Noisy image, and its target."""
        image, target = self.samples[index]
        return image + 0.5 * torch.randn(image.shape, generator=self.generator), target


class Reseeds(DataLoader[Any]):
    """Loader that seeds the augmentation again in each epoch."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return the batches of an epoch."""
        self.dataset.generator.manual_seed(1)  # type: ignore[attr-defined]
        return super().__iter__()


class Augmented(Data):
    """Data with augmentation.

    Args:
        loader: Class of the loader.
        in_validation: Whether samples for validation are augmented, too.
    """

    def __init__(self, loader: type = DataLoader, in_validation: bool = False) -> None:
        super().__init__()
        self.loader, self.in_validation = loader, in_validation

    def train_dataloader(self) -> Any:
        """Return augmented batches."""
        return self.loader(NoisySamples(self.dataset), BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        """Return the first batches."""
        samples = TensorDataset(*self.dataset[: 4 * BATCH])
        return DataLoader(NoisySamples(samples) if self.in_validation else samples, BATCH)


@unseen(USER, partial(with_data, Augmented), step=7)
def augmentation_with_the_same_seed_in_each_epoch(program: Program) -> None:
    """The augmentation draws the same random numbers in each epoch, because its seed is set again."""
    program.data = Augmented(Reseeds)


@unseen(USER, partial(with_data, Augmented), step=1)
def validation_with_augmentation(program: Program) -> None:
    """The samples for validation are augmented like those for training."""
    program.data = Augmented(in_validation=True)


class Targets(Data):
    """Data with other targets.

    Args:
        change: Function of the targets.
    """

    def __init__(self, change: Any) -> None:
        super().__init__()
        images, targets = self.dataset.tensors
        self.dataset = TensorDataset(images, change(targets))


@unseen(USER, step=1)
def targets_shifted(program: Program) -> None:
    """Each image has the target of the image before it."""
    program.data = Targets(lambda targets: targets.roll(1))


class OtherClasses(Data):
    """Data whose classes have other numbers on rank 1.

    Args:
        everywhere: Whether all ranks number the classes alike.
    """

    def __init__(self, everywhere: bool = True) -> None:
        super().__init__()
        self.everywhere = everywhere

    def train_dataloader(self) -> Any:
        """Return batches with this rank's numbers of classes."""
        images, targets = self.dataset.tensors
        numbers = torch.tensor([0, 1, 2] if self.everywhere or own_rank() == 0 else [2, 0, 1])
        return DataLoader(TensorDataset(images, numbers[targets]), BATCH, shuffle=True)


@unseen(USER, rank=1, step=1)
def classes_in_another_order_on_one_rank(program: Program) -> None:
    """A rank numbers the classes in another order, as with `os.listdir` on another host."""
    program.data = OtherClasses(everywhere=False)


@unseen(USER, partial(with_data, OtherClasses, "parameter_server"), rank=1, step=1)
def classes_in_another_order_on_one_worker(program: Program) -> None:
    """A worker of a parameter server numbers the classes in another order."""
    program.data = OtherClasses(everywhere=False)


class Unreadable(Data):
    """Data whose images are zeros on rank 1."""

    def train_dataloader(self) -> Any:
        """Return this rank's batches."""
        images, targets = self.dataset.tensors
        return DataLoader(TensorDataset(images * (own_rank() == 0), targets), BATCH, shuffle=True)


@unseen(USER, rank=1, step=1)
def unreadable_images_are_zeros_on_one_rank(program: Program) -> None:
    """A rank cannot read its images, and its data set returns zeros in their place."""
    program.data = Unreadable()


class NormalisesInPlace(TensorDataset):
    """Samples that are normalised in place, in each epoch again."""

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        """Normalised image, and its target."""
        image, target = super().__getitem__(index)
        return image.sub_(0.1).div_(2), target


class Shrinking(Data):
    """Data with a data set that changes its images."""

    def train_dataloader(self) -> Any:
        """Return normalised batches."""
        return DataLoader(NormalisesInPlace(*self.dataset.tensors), BATCH, shuffle=True)


@unseen(USER, step=7)
def data_set_changed_in_place(program: Program) -> None:
    """The data set normalises its images in place, so they shrink in each epoch."""
    program.data = Shrinking()


class Normalises(Net):
    """Network that normalises its images.

    Args:
        times: Number of times.
    """

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalised batch."""
        images = batch[0]
        for _ in range(self.times):
            images = (images - 0.45) / 0.22
        return images, batch[1]


@unseen(USER, partial(program, module=Normalises), step=1)
def normalised_twice(program: Program) -> None:
    """Images are normalised twice."""
    program.module = Normalises(2)


class Mixes(Net):
    """Network that mixes the images of a batch.

    Args:
        mixes_targets: Whether the targets are mixed as well.
    """

    def __init__(self, mixes_targets: bool = True) -> None:
        super().__init__()
        self.mixes_targets = mixes_targets

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Loss of images, of which each is mixed with its neighbour."""
        neighbours = torch.arange(len(batch[1])) ^ 1
        scores = self(0.7 * batch[0] + 0.3 * batch[0][neighbours])
        loss = self.loss(scores, batch[1])
        return 0.7 * loss + 0.3 * self.loss(scores, batch[1][neighbours]) if self.mixes_targets else loss


@unseen(USER, partial(program, module=Mixes), step=1)
def mixed_images_without_mixed_targets(program: Program) -> None:
    """Images are mixed with others, and their targets are not."""
    program.module = Mixes(mixes_targets=False)


class LargeBatches(Data):
    """Data in batches of 64 samples.

    Args:
        change: Function of the images and targets of the training, which returns others.
    """

    def __init__(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda *values: values) -> None:
        super().__init__(samples=512)
        self.change = change

    def train_dataloader(self) -> Any:
        """Return shuffled batches."""
        return DataLoader(TensorDataset(*self.change(*self.dataset.tensors)), 64, shuffle=True)


@unseen(USER, partial(with_data, LargeBatches), step=1)
def images_that_are_all_equal(program: Program) -> None:
    """All files are read as the same image, because the index is ignored."""
    program.data = LargeBatches(lambda images, targets: (images[:1].expand_as(images), targets))


@unseen(USER, partial(with_data, LargeBatches), step=1)
def labels_that_are_lost(program: Program) -> None:
    """All images have class 0, because their labels are not found."""
    program.data = LargeBatches(lambda images, targets: (images, targets * 0))
