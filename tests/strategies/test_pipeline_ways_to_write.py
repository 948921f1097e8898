"""Tests of LightningModules written in common ways: a pipeline trains the weights of one device."""

import itertools
import os
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, default_collate
from torchmetrics.classification import MulticlassAccuracy

from cnnstrategies.strategies import HybridPipelineStrategy
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart, run_ranks

SAMPLES = 15  # The three steps have 6, 6 and 3 samples.
SIZE = 8
CLASSES = 3


def convolutions(*channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers)


def classifier() -> nn.Sequential:
    return nn.Sequential(convolutions(1, 4, 4), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))


class Data(Dataset[Any]):
    """Images with labels and masks; the value 255 of a mask is ignored."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kind = kind
        self.images = torch.randn(2, SAMPLES, 1, SIZE, SIZE, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        pixels = torch.randint(CLASSES + 1, (SAMPLES, SIZE, SIZE), generator=generator)
        self.pixels = torch.where(pixels == CLASSES, 255, pixels)
        self.pixels[6:12] = self.pixels[6:12].masked_fill(torch.rand(6, SIZE, SIZE, generator=generator) < 0.8, 255)
        self.pixels[12] = 255  # A microbatch without counted pixels.

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        image, other = self.images[:, index]
        label, pixels = self.labels[index], self.pixels[index]
        return {
            "labels": (image, label),
            "dict": {"name": f"{index}.png", "label": label, "image": image, "other": other, "size": (SIZE, SIZE)},
            "tasks": (image, {"class": label, "pixels": pixels, "angle": image.mean()}),
        }[self.kind]


class Module(LightningModule):
    kind = "labels"
    cut = "0"
    epochs = 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


class Classifier(Module):
    """A module in the style of Lightning's examples, with a metric, a list of outputs, counters and several logs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.training_step_outputs: list[Tensor] = []
        self.meters = {"loss": Meter()}
        self.steps = 0
        self.compute = self.shared_step

    def forward(self, x: Tensor) -> Any:
        return self.model(x)

    def shared_step(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self(x)
        self.steps += 1
        self.seen += len(y)
        self.accuracy(logits, y)
        loss = F.cross_entropy(logits, y)
        self.meters["loss"].update(float(loss))
        self.training_step_outputs.append(loss.detach())
        # The factor grows with the steps; each step must count once.
        return loss * self.steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.compute(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"train_acc": self.accuracy}, on_step=False, on_epoch=True)
        return loss

    def counted(self) -> dict[str, Any]:
        meter = self.meters["loss"]
        return {"steps": self.steps, "seen": int(self.seen), "outputs": self.training_step_outputs, **vars(meter)}


class Heads(nn.Module):
    """A network with several outputs: a map of the images' size, a coarser map, and values of single samples.

    torchvision's segmentation networks return such maps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk = convolutions(1, 4, 4)
        self.pixels, self.classes, self.angle = nn.Conv2d(4, CLASSES, 1), nn.Linear(4, CLASSES), nn.Linear(4, 1)
        self.rough, self.unused = nn.Conv2d(4, CLASSES, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        shape = x.shape[-2:]
        x = self.trunk(x)
        pooled = x.mean((2, 3))
        result: dict[str, Any] = OrderedDict()
        result["pixels"] = self.pixels(x).contiguous(memory_format=torch.channels_last)
        result["rough"] = F.interpolate(self.rough(F.avg_pool2d(x, 2)), size=shape, mode="bilinear")
        # These have one row or one number for each sample.
        result["others"] = self.classes(pooled), self.angle(pooled)[:, 0], self.unused(pooled)
        return result


class MultiTask(Module):
    """A module with losses of different divisors, an unused output, and images of a different size in each batch."""

    kind = "tasks"
    cut = "trunk.1"

    def __init__(self) -> None:
        super().__init__()
        self.network = Heads()
        self.loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64), ignore_index=255)

    def batches(self) -> DataLoader[Any]:
        data, loaded = Data("tasks"), []
        for start, size in ((0, 8), (6, 6), (12, 4)):
            image, targets = default_collate([data[index] for index in range(start, min(start + 6, SAMPLES))])
            loaded.append((image[..., :size], {**targets, "pixels": targets["pixels"][..., :size]}))
        return DataLoader(loaded, batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, targets = batch
        outputs = self.network(x)
        classes, angle, _ = outputs["others"]
        target = targets["pixels"]
        losses = {
            "pixels": self.loss(outputs["pixels"], target) + 0.5 * self.loss(outputs["rough"], target),
            "class": F.cross_entropy(classes, targets["class"]),
            "angle": 0.01 * ((angle - targets["angle"]) ** 2).sum(),
        }
        self.log_dict(losses)
        return {"loss": sum(losses.values()), **{name: loss.detach() for name, loss in losses.items()}}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = classifier(), nn.Linear(CLASSES, CLASSES)

    def forward(self, left: Tensor, right: Tensor, scale: float | None = None) -> Tensor:
        difference = self.head((self.embed(left) - self.embed(right)).abs())
        if scale is not None:
            difference = difference * scale
        return difference


class Siamese(Module):
    """A module for batches that are dicts of two images and a name for each sample; some samples do not count."""

    kind = "dict"
    cut = "embed"

    def __init__(self) -> None:
        super().__init__()
        self.siamese = Pair()

    def rows(self, batch: Any) -> Tensor:
        return self.siamese(batch["image"], right=batch["other"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        counts = torch.tensor([int(name.split(".")[0]) % 3 > 0 for name in batch["name"]])
        losses = F.nll_loss(F.log_softmax(self.rows(batch), dim=1), batch["label"], reduction="none")
        assert len(batch["size"]) == 2
        return losses[counts].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", (self.rows(batch).argmax(1) == batch["label"]).double().mean(), batch_size=6)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"name": batch["name"], "logits": self.rows(batch), "label": batch["label"]}


class Normalised(Classifier):
    """A module with batch normalisation, which needs at least two samples: one microbatch takes a last batch of 3.

    The first stage has no parameters, but still has a backward.
    """

    cut = "flat"

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            OrderedDict(flat=nn.Flatten(), fc=nn.Linear(SIZE**2, 4), norm=nn.BatchNorm1d(4), head=nn.Linear(4, CLASSES))
        )

    def batches(self) -> DataLoader[Any]:
        return DataLoader(Subset(Data("labels"), range(3)), 6)


class Shared(nn.Module):
    """A network with one layer under two names, like CoaT's position encodings, and two layers that share a weight.

    Of the two layers, the layer that runs first was registered last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(4, 4, 3, padding=1)
        self.b, self.first = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(1, 4, 3, padding=1)
        self.a, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(16, CLASSES)
        self.a.weight = self.b.weight
        self.block = nn.ModuleDict({"mix": self.mix, "act": nn.Tanh()})
        self.pool = nn.AdaptiveAvgPool2d(2)

    def forward(self, x: Tensor) -> Any:
        x = self.block["act"](self.block["mix"](self.first(x)))
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.last(self.pool(x).flatten(1))


class SharesLayers(Module):
    cut = "block.act"

    def __init__(self) -> None:
        super().__init__()
        self.model = Shared()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        state = self.trainer.strategy.lightning_module_state_dict()
        if self.trainer.is_global_zero:
            assert torch.equal(state["model.mix.weight"], state["model.block.mix.weight"])
            assert torch.equal(state["model.a.weight"], state["model.b.weight"])


class Probed(nn.Module):
    """A linear probe, and a second head whose gradient reaches the body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = convolutions(1, 4, 4), nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).mean((2, 3))
        return self.head(x.detach()), self.other(x)


class Probe(Module):
    """A module in which gradients reach the body and the second head in some steps only.

    The other steps must not change body and second head. Weight decay and momentum would change them if their gradients
    were zero instead of missing.
    """

    cut = "body.1"
    epochs = 2

    def __init__(self) -> None:
        super().__init__()
        self.network = Probed()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        probed, other = self.network(batch[0])
        loss = F.cross_entropy(probed, batch[1])
        return loss + F.cross_entropy(other, batch[1]) if self.global_step in (1, 3) else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class Thawing(Classifier):
    """A module that trains its convolutions in the second epoch only."""

    cut = "0.1"
    epochs = 2

    def on_train_epoch_start(self) -> None:
        self.model[0].requires_grad_(self.current_epoch > 0)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].flip(-1), batch[1]


class OwnForward(Module):
    """A module whose ``forward`` calls several submodules and uses a method, a parameter and a buffer of the module.

    The submodules are not called in the order in which they are made, and some submodules are not called at all.
    """

    cut = "encoder.2"

    def __init__(self) -> None:
        super().__init__()
        self.teacher = classifier().requires_grad_(False)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.decoder = nn.Linear(16, CLASSES)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.encoder = convolutions(1, 4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.tensor(0.1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.pool = nn.AdaptiveAvgPool2d(2)

    def normalise(self, x: Tensor) -> Tensor:
        return x - self.mean

    def forward(self, x: Tensor) -> Any:
        return self.decoder(self.pool(self.encoder(self.normalise(x))).flatten(1)) * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.seen += len(y)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_epoch=True)
        loss: Tensor = self.criterion(logits, y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), on_epoch=True)

    def on_after_backward(self) -> None:
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            parameter.grad.clamp_(-0.05, 0.05)
        self.encoder[0].weight_is_first = True


def fit(
    kind: type[Module], strategy: Any, devices: int, loading: int = 1
) -> tuple[Any, dict[str, Tensor], dict[str, Any], list[Any]]:
    """Return the trained module, its weights, its logged values and its predictions.

    Args:
        kind: Class of the module.
        strategy: Strategy of the Trainer.
        devices: Number of ranks.
        loading: Number of ranks that load samples.
    """
    torch.manual_seed(0)
    model = kind().double()
    # If a single rank loads samples, a distributed sampler must change nothing.
    options = {"max_epochs": kind.epochs, "precision": "64-true", "use_distributed_sampler": loading == 1}
    trainer = quiet_trainer(strategy, devices, **options)
    data = Data(kind.kind)
    shard = 0 if loading == 1 else dist.get_rank() % loading

    def load(some: Dataset[Any]) -> DataLoader[Any]:
        sampler = DistributedSampler(some, loading, shard, shuffle=False) if loading > 1 else None
        return DataLoader(some, 6 // loading, sampler=sampler)

    loader = load(data)
    trainer.fit(model, model.batches() if hasattr(model, "batches") else loader, loader)
    predicted = trainer.predict(model, load(Subset(data, range(12)))) if "predict_step" in vars(kind) else []
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return model, model.state_dict(), logged, predicted or []


def trained(kinds: Any, replicas: list[int], microbatches: int) -> list[Any]:
    """Return the results of training each module on this rank, or on one device if there are no replicas."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank() if replicas else 0), "NODE_RANK": "0"}
    os.environ["WORLD_SIZE"] = str(max(sum(replicas), 1))
    results = []
    for kind in kinds:
        strategy: Any = "auto"
        if replicas:
            strategy = HybridPipelineStrategy(replicas=replicas, cuts=[kind().cut], microbatches=microbatches)
        model, weights, logged, predicted = fit(kind, strategy, max(sum(replicas), 1), *replicas[:1])
        names = [batch.pop("name") for batch in predicted]
        counted = model.counted() if hasattr(model, "counted") else {}
        results.append((weights, (logged, predicted, counted), names))
    return results


def differ(kinds: Any, replicas: list[int], microbatches: int) -> dict[str, str]:
    """Return the differences from one device by name of the module."""
    expected = run_apart(trained, kinds, [], 0)
    actual = run_ranks(sum(replicas), trained, kinds, replicas, microbatches)[0]
    wrong = {}
    for kind, (weights, values, names), (divided, divided_values, divided_names) in zip(
        kinds, expected, actual, strict=True
    ):
        assert list(weights) == list(divided)
        assert names == divided_names
        try:
            torch.testing.assert_close(divided, weights, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(divided_values, values, rtol=1e-12, atol=1e-14)
        except AssertionError as error:
            wrong[kind.__name__] = str(error)
    return wrong


@pytest.mark.parametrize(
    ("kinds", "replicas", "microbatches"),
    [
        ((OwnForward, Normalised), [1, 1], 3),
        ((Siamese,), [2, 1], 4),
        ((MultiTask, Thawing), [1, 2], 4),
        pytest.param((SharesLayers, Probe), [1, 2], 4, marks=pytest.mark.cluster),
    ],
    ids=["two stages", "replicas of the first", "replicas of the last", "more with replicas of the last"],
)
def test_ordinary_modules_train_the_weights_of_one_device(kinds: Any, replicas: Any, microbatches: int) -> None:
    assert differ(kinds, replicas, microbatches) == {}
