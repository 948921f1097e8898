"""The rows of a batch that each microbatch of a call contains."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cnnstrategies._torch_private import writes
from cnnstrategies.pipeline.microbatches import Split
from cnnstrategies.pipeline.tensor_headers import memory_format_of
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.placed.partial import PartialTensor
from cnnstrategies.shares.dealing import deal


@dataclass(frozen=True)
class BatchRows:
    """The rows of a batch that each microbatch of a call contains.

    If the first stage has one replica, a microbatch contains consecutive rows. If it has several replicas, a microbatch
    contains rows that the loader of its replica loads, so that replicas need not send each other images. The loaders
    take the samples of a batch in turn, so these rows are not consecutive.

    Attributes:
        sizes: Number of samples of each microbatch, 0 for a microbatch that is not run.
        split: The rows of the microbatches; None if the microbatches contain consecutive rows.
    """

    sizes: tuple[int, ...]
    split: Split | None = None

    @classmethod
    def of(cls, samples: int, placement: Placement, parts: int, usual: int = 0) -> "BatchRows":
        """Divide a batch among microbatches.

        Args:
            samples: Number of samples of the batch.
            placement: Placement of the ranks.
            parts: Number of microbatches that may get samples.
            usual: Number of samples of a batch of the usual size; 0 if it is not known. A smaller batch is divided into
                fewer microbatches.
        """
        replicas = placement.replicas[0]
        if replicas > 1 and parts == placement.microbatches > 1:
            split = Split(deal(samples, placement.loads), placement.runs[0], usual // replicas)
            return cls(split.sizes, split)
        unused = (0,) * (placement.microbatches - parts)
        return cls((*Split((samples,), (0,) * parts, usual).sizes, *unused))

    @property
    def samples(self) -> int:
        """Number of samples of the batch."""
        return sum(self.sizes)

    @property
    def is_one_microbatch(self) -> bool:
        """Whether only one microbatch has samples."""
        return sum(size > 0 for size in self.sizes) == 1

    def of_microbatch(self, tensor: Tensor, microbatch: int) -> Tensor:
        """Return a microbatch's rows of a tensor, which may have several rows for each sample.

        Consecutive rows are returned as a view. If the batch is one microbatch, the tensor need not have rows.
        """
        size = self.sizes[microbatch]
        if size == self.samples:
            return tensor
        if self.split is None:
            start = sum(self.sizes[:microbatch])
            per_sample = len(tensor) // self.samples
            return tensor[start * per_sample : (start + size) * per_sample]
        return self._chosen(tensor, self.split.global_rows(microbatch, device=tensor.device))

    def of_image(self, image: Tensor, microbatch: int) -> Tensor:
        """Return a microbatch's rows of a tensor in the images, on a rank that runs the microbatch in the first stage.

        Args:
            image: A tensor, or a partial tensor whose rows on this rank are those that :meth:`has_all` requires.
            microbatch: The microbatch.
        """
        if not isinstance(image, PartialTensor):
            return self.of_microbatch(image, microbatch)
        assert self.split is not None
        assert image.rows is not None
        start, stop = self.split.bounds[microbatch]
        return image.rows[start:stop]

    def warn_of_changes(self, images: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Warn if a forward has changed copies of rows in place, because the images themselves do not change.

        Args:
            images: The tensors in the images.
            parts: A microbatch's rows of these tensors, from :meth:`of_image`.
        """
        if self.split is None or self.is_one_microbatch:
            return  # The parts are views.
        copies = [p for image, p in zip(images, parts, strict=True) if not isinstance(image, PartialTensor)]
        if any(not part.is_inference() and writes(part) for part in copies):
            warnings.warn(
                "the network's forward changes its images in place, but the first stage has several replicas, so the "
                "images that the step has do not change: let forward compute new tensors, as in x = x - mean, or use "
                "one replica of the first stage",
                stacklevel=2,
            )

    def has_all(self, image: PartialTensor) -> bool:
        """Whether each replica of the first stage has the rows of its microbatches. All replicas return the same."""
        return image.rows is not None and self.split is not None and image.counts == self.split.rows

    def in_order(self, tensor: Tensor) -> Tensor:
        """Return the rows of a batch in their order.

        Args:
            tensor: The rows of the first microbatch, followed by those of the second microbatch, and so on. There may
                be several rows for each sample.
        """
        if self.split is None or self.is_one_microbatch:
            return tensor
        order = self.split.global_rows(*range(len(self.sizes)), device=tensor.device)
        return self._chosen(tensor, torch.argsort(order))

    def _chosen(self, tensor: Tensor, samples: Tensor) -> Tensor:
        """Return the rows of some samples."""
        if len(tensor) == self.samples:
            return _select(tensor, samples)
        by_sample = tensor.reshape(self.samples, len(tensor) // self.samples, *tensor.shape[1:])
        return by_sample.index_select(0, samples).flatten(0, 1)


def _select(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a tensor as a new tensor with the same memory format."""
    if memory_format_of(tensor) == torch.contiguous_format:
        return tensor.index_select(0, rows)
    # `index_select` returns contiguous tensors, and is fast for contiguous tensors.
    return tensor.movedim(1, -1).index_select(0, rows).movedim(-1, 1)
