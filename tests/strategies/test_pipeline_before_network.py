"""What a step does with the images before it calls the network: the first stage does it, as one device would."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_pipeline_refusals import are_refused
from test_pipeline_ways_to_write import Module, classifier, differ
from torch import Tensor

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.stand_ins import ImagesElsewhere


class Normalising(Module):
    """Normalises, in place and by buffers, and evaluates so."""

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()
        self.model.contrast = 3
        self.register_buffer("mean", torch.full((1, 1, 1), 0.3))

    def prepare(self, x: Tensor) -> Tensor:
        x = (x - self.mean) * self.model.contrast
        x[:, :, 0].mul_(2.0)
        return x.clamp(-4.0, 4.0)[..., 1:]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(self.prepare(x)), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.model(self.prepare(x)), y), batch_size=len(x))


class Bytes(Normalising):
    """Images as they are stored, and a step that is another one in each batch and epoch."""

    kind = "images"
    epochs = 2

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.strength = 1.0 + batch_idx

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch * 50).to(torch.uint8)

    def prepare(self, x: Tensor) -> Tensor:
        return x.double() / 255 * getattr(self, "strength", 1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.model(self.prepare(batch.flip(3) if self.current_epoch and batch_idx else batch))
        return F.mse_loss(outputs, torch.ones_like(outputs))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_mean", self.model(self.prepare(batch)).mean(), batch_size=6)


def test_a_step_that_uses_the_images_trains_as_on_one_device() -> None:
    assert differ((Normalising, Bytes), [1, 1], 3) == {}
    assert differ((Normalising,), [2, 1], 4) == {}, "each replica of the first stage with its images"


class Deciding(Normalising):
    def prepare(self, x: Tensor) -> Tensor:
        return x / 255 if x.max() > 1 else x


class Reading(Normalising):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("brightness", batch[0].mean())
        return loss


class Reconstructing(Normalising):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0] * 2
        return (self.model(x).mean(1) - x.mean((1, 2, 3))).square().mean()


class TwoViews(Normalising):
    def prepare(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.flip(3)])


class Mixup(Normalising):
    def prepare(self, x: Tensor) -> Tensor:
        return 0.3 * x + 0.7 * x[torch.randperm(len(x))]


class Sometimes(Normalising):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.prepare(batch[0])
        return F.cross_entropy(self.model(x if batch_idx == 0 else x + torch.rand(())), batch[1])


REFUSED = (
    (Deciding, r"computes with the images of the batch \(.*but neither read values from them nor decide by them"),
    (Reading, r"computes with the images of the batch"),
    (Reconstructing, "loss that is computed from the images of the batch"),
    (TwoViews, r"TwoViews.[a-z_]+ gives the network a tensor of shape \(12, 1, 8, 8\) for a batch of 6 samples"),
    (Mixup, r"Mixup.[a-z_]+ draws random numbers before it calls the network.* do it in on_after_batch_transfer"),
    (Sometimes, "training_step draws random numbers before it calls the network"),
)


def test_what_needs_images_or_draws_elsewhere_is_refused() -> None:
    are_refused(REFUSED, [1])


class Whitening(Normalising):
    def prepare(self, x: Tensor) -> Tensor:
        return (x - x.mean()) / x.std()


def test_replicas_that_would_compute_something_else_are_refused() -> None:
    others = "depends on the other samples of the batch, of which each of the 2 replicas of the first stage has"
    are_refused([(Whitening, others)], [2, 1])


@pytest.mark.light
def test_a_stand_in_gives_no_values_and_changes_none() -> None:
    images = ImagesElsewhere.like(4, (1, 3, 3), torch.float32, torch.device("cpu"), computes=True)
    changed = images.clone()
    changed[:, :, 0].sub_(1.0)
    assert images.is_as_loaded
    assert not changed.is_as_loaded, "a view of it was changed"
    assert [tuple(one.shape) for one in (images.mean((2, 3)), images @ images, *images.chunk(2))] == [
        (4, 1), (4, 1, 3, 3), (2, 1, 3, 3), (2, 1, 3, 3),
    ]  # fmt: skip
    total = torch.zeros(4, 1, 3, 3)
    for use in (
        lambda: total.add_(images),
        lambda: torch.add(total, images, out=total),
        lambda: images.mean().item(),
        lambda: bool(images.max() > 1),
        lambda: images[images > 0],
        lambda: images.numpy(),
        lambda: images.tolist(),
        lambda: images.data,
        lambda: float(images.sum()),
    ):
        with pytest.raises(ConfigurationError, match="computes with the images"):
            use()
    assert not total.any()
