"""CIFAR-10."""

from torchvision import datasets

from cnnstrategies.data.torchvision_sets import TorchvisionDataModule


class CIFAR10DataModule(TorchvisionDataModule):
    """60 000 colour images of 32 x 32 pixels in 10 classes (Krizhevsky 2009).

    Args:
        root: Directory of the data set.
        download: Download it when it is not there.
        batch_size: Samples per batch and process; by default 128.
        global_batch_size: Samples of an optimizer step over all processes, in place of ``batch_size``.
        val_split: Share of the training images that is held out for validation.
        augment: Mirror training images and shift them by up to 4 pixels.
        transforms: Further transforms of training images, one uint8 (C, H, W) at a time, after the others.
        num_workers: Worker processes that load batches, per process; 0 loads in the process itself.
        seed: Seed of the split, the shuffling and the augmentation.
        drop_last: Leave out a last, partial training batch.
        persistent_workers: Keep the workers from epoch to epoch.
        pin_memory: Copy batches to pinned memory first; by default where the accelerator is not the CPU.
    """

    dataset_class = datasets.CIFAR10
    num_classes = 10
    image_shape = (3, 32, 32)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    flip, shift = True, 4
