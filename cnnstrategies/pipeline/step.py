"""One step or evaluation of a rank: the batch, what is computed with it, and what is kept on the way."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map

from cnnstrategies.pipeline.batch import Batch, Images
from cnnstrategies.pipeline.channels import Channels
from cnnstrategies.pipeline.losses import PartialLoss
from cnnstrategies.pipeline.recompute import RandomState


@dataclass
class Held:
    """What a rank keeps of a microbatch between its forward and its backward.

    Attributes:
        leaves: For each source stage the inputs whose gradients it wants.
        roots: For each target stage where the gradients that it sends enter the graph, None where they are not needed;
            in the last stage the loss's, under None. The outputs themselves are not held.
        arguments: The stage's arguments, where the forward runs again.
        random: The random numbers, where the forward runs again.
    """

    leaves: dict[int, list[Tensor]]
    roots: dict[int | None, list[GradientEdge | None]] = field(default_factory=dict)
    arguments: tuple[Any, ...] | None = None
    random: RandomState | None = None


@dataclass
class Step:
    """One batch on its way through a rank.

    Attributes:
        batch: The global batch.
        channels: The rank's traffic in this mode.
        device: Where the stage runs.
        loss: The loss of the batch in parts; not needed where nothing is trained.
        scale: Factor on the loss.
        held: The microbatches between forward and backward.
        outputs: In the last stage what the network returned for each of the rank's microbatches.
        loss_sum: In the last stage the sum of the parts so far.
    """

    batch: Batch
    channels: Channels
    device: torch.device
    loss: PartialLoss | None = None
    scale: float | Tensor = 1.0
    held: dict[int, Held] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    loss_sum: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.loss_sum = torch.zeros((), device=self.device)

    @cached_property
    def autocast(self) -> tuple[bool, torch.dtype]:
        """Whether the step runs in lower precision, and in which."""
        kind = self.device.type
        return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    @cached_property
    def _kind(self) -> tuple[Hashable, ...]:
        return self.batch.image_shape, self.batch.image_dtype, self.autocast, torch.is_grad_enabled()

    def size(self, microbatch: int) -> Hashable:
        """What the shapes and types of a microbatch's values depend on."""
        return self.batch.split.sizes[microbatch], *self._kind

    def images(self, microbatch: int) -> Images | None:
        """A microbatch's images, in the first stage."""
        if self.batch.images is None:
            return None
        start, stop = self.batch.split.bounds[microbatch]
        own: Images = tree_map(lambda images: images[start:stop], self.batch.images)
        return own

    def part_of_loss(self, outputs: Any, microbatch: int) -> Tensor:
        """What the microbatch adds to the loss of the global batch, times the scale."""
        assert self.loss is not None
        part = self.loss.part(outputs, microbatch)
        self.loss_sum = self.loss_sum + part.detach()
        return part * self.scale
