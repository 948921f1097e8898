"""Fashion-MNIST."""

from torchvision import datasets

from cnnstrategies.data.torchvision_sets import TorchvisionDataModule


class FashionMNISTDataModule(TorchvisionDataModule):
    """70 000 grey pictures of clothes, 28 x 28 pixels in 10 classes (Xiao et al. 2017).

    Args:
        root: Directory of the data set.
        download: Download it when it is not there.
        batch_size: Samples per batch and process; by default 128.
        global_batch_size: Samples of an optimizer step over all processes, in place of ``batch_size``.
        val_split: Share of the training images that is held out for validation.
        augment: Mirror training images and shift them by up to 2 pixels.
        transforms: Further transforms of training images, one uint8 (C, H, W) at a time, after the others.
        num_workers: Worker processes that load batches, per process; 0 loads in the process itself.
        seed: Seed of the split, the shuffling and the augmentation.
        drop_last: Leave out a last, partial training batch.
        persistent_workers: Keep the workers from epoch to epoch.
        pin_memory: Copy batches to pinned memory first; by default where the accelerator is not the CPU.
    """

    dataset_class = datasets.FashionMNIST
    num_classes = 10
    image_shape = (1, 28, 28)
    mean, std = (0.2860,), (0.3530,)
    flip, shift = True, 2
