"""Modules as people write them train as on one device, or are refused by name: never other weights in silence."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from ranks import run_apart, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.strategies import HybridPipelineStrategy


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(32, 1, 6, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(images, torch.randint(3, (32,), generator=generator)), 16)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(*layers).double()


class Module(LightningModule):
    """What a user writes."""

    cut = "1"

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)


class Probed(nn.Module):
    """A linear probe, with a second head on what is before it."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.body, self.head = whole[:4], whole[5]
        self.other = copy.deepcopy(whole[5])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x).flatten(1)
        return self.head(x.detach()), self.other(x)


class Probe(Module):
    """What no gradient reaches decays no weight, until the second head is trained, too."""

    cut = "body.1"

    def __init__(self, network: nn.Module) -> None:
        super().__init__(Probed(network))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        probed, other = self.network(batch[0])
        loss = F.cross_entropy(probed, batch[1])
        return loss + F.cross_entropy(other, batch[1]) if self.global_step == 3 else loss


class Unfreezing(Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        network[0].requires_grad_(False)
        network[2].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.network.requires_grad_(True)


class UnfreezingLate(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.network.requires_grad_(False)


class Adding(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.network[-1].parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.network[0].parameters())})


class StoppingAlone(Module):
    """After the first of two batches, which the rest of the ranks do not see."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.global_rank == 1


class OtherImages(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.network(torch.zeros(16, 1, 6, 6)), batch[1])


class OnTheDevice(Module):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].flip(-1), batch[1]


class Reader(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        float(batch[0].mean())


class Tied(nn.Module):
    """Two layers with one weight; the one that runs first was registered last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.b, self.stem = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(1, 4, 3)
        self.a, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(64, 3)
        self.a.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(torch.tanh(self.stem(x))))))
        return self.head(x.flatten(1))


class TiedModule(Module):
    cut = "stem"

    def __init__(self, network: nn.Module) -> None:
        super().__init__(Tied().double())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Scalar(nn.Module):
    """Returns a mean over the samples beside the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.conv(x))
        return self.head(x.flatten(1)), x.pow(2).mean()


class ScalarModule(Module):
    cut = "conv"

    def __init__(self, network: nn.Module) -> None:
        super().__init__(Scalar().double())

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], targets) + outputs[1]


class NormalisingLayer(nn.Conv2d):
    """A layer that stays whole, and normalises twice."""

    def __init__(self) -> None:
        super().__init__(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(torch.relu(self.norm(super().forward(x)))))


class NormalisingLayerModule(Module):
    cut = "0"

    def __init__(self, network: nn.Module) -> None:
        super().__init__(nn.Sequential(NormalisingLayer(), nn.Flatten(), nn.Linear(64, 3)).double())


def trained(kind: Any, replicas: Any, callbacks: Any = ()) -> Any:
    """The weights; a refusal as text."""
    strategy: Any = "auto"
    if replicas is not None:
        strategy = HybridPipelineStrategy(replicas=replicas, cuts=[kind.cut], microbatches=4, start_method="fork")
    trainer = Trainer(
        accelerator="cpu", devices=1 if replicas is None else sum(replicas), strategy=strategy, max_epochs=2,
        logger=False, barebones=True, use_distributed_sampler=False, precision="64-true", callbacks=list(callbacks),
    )  # fmt: skip
    model = kind(network())
    try:
        trainer.fit(model, loader())
    except Exception as error:
        return str(error)
    return model.state_dict()


def all_trained(kinds: Any, replicas: Any) -> list[Any]:
    return [trained(kind, replicas) for kind in kinds]


@pytest.mark.parametrize(("kinds", "replicas"), [([Probe], [1, 1]), ([Unfreezing, OnTheDevice, TiedModule], [1, 2])])
def test_trains_as_one_device_does(kinds: Any, replicas: Any) -> None:
    expected, actual = run_apart(all_trained, kinds, None), run_apart(all_trained, kinds, replicas)
    for kind, one, other in zip(kinds, expected, actual, strict=True):
        assert isinstance(other, dict), (kind, other)
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-12)


REFUSED = (
    (OtherImages, r"called with a tensor of shape \(16, 1, 6, 6\) that is not the images of the batch"),
    (ScalarModule, r"returns a tensor of shape \(\) for 4 samples: .* one row per sample"),
    (NormalisingLayerModule, "0.norm normalises several times in one call of the layer that contains it"),
    (Adding, "SGD has other parameters than configure_optimizers gave it: .*BaseFinetuning"),
    (StoppingAlone, "rank 1 ended an epoch, or training, where rank 0 went on with a further batch"),
    (UnfreezingLate, "frozen or unfrozen in the middle of an epoch"),
)


def test_what_would_train_other_weights_is_refused() -> None:
    found = run_apart(all_trained, [kind for kind, _ in REFUSED], [1, 1])
    for (kind, message), said in zip(REFUSED, found, strict=True):
        assert re.search(message, str(said)), (kind, said)


def test_a_callback_that_reads_the_images_sees_no_zeros() -> None:
    assert "computes with the images of the batch (mean)" in run_apart(trained, Module, [1, 1], [Reader()])


class Odd(nn.Module):
    """Has a head that the loss ignores, and buffers besides BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(1, 4, 3)
        self.middle = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3, padding=1))
        self.norm = nn.InstanceNorm2d(4, track_running_stats=True)
        self.aux, self.head = nn.Linear(64, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.middle(torch.tanh(self.conv(x)))).flatten(1)
        return self.head(x), self.aux(x)


class NormOfEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(64, 3)
        self.train_norm, self.eval_norm = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.train_norm(x) if self.training else self.eval_norm(x)
        return self.head(x.flatten(1))


def tracked_batches() -> list[int]:
    pipeline = Pipeline(NormOfEvaluation(), ["train_norm"], [1, 1], 2)
    batch = pipeline.share(torch.randn(8, 1, 6, 6), torch.randint(3, (8,)))
    pipeline.train(batch, F.cross_entropy)
    pipeline.close()
    return [int(value) for name, value in pipeline.module.named_buffers() if name.endswith("tracked")]


def test_a_batch_norm_that_training_does_not_reach_is_left_alone() -> None:
    assert sorted(run_ranks(2, tracked_batches)[0]) == [0, 1]


def share_of_other_sizes() -> str:
    pipeline = Pipeline(network().float(), ["1"], [2, 1], 4)
    size = 6 + 2 * dist.get_rank()
    try:
        pipeline.share(torch.randn(8, 1, size, size), torch.randint(3, (8,)))
    except ValueError as error:
        return str(error)
    return ""


def test_images_of_different_sizes_in_one_step_are_refused_on_every_rank() -> None:
    for message in run_ranks(3, share_of_other_sizes):
        assert "images of different sizes in one step, [(1, 6, 6), (1, 8, 8)]" in message


def steps_of_replicas() -> tuple[list[bool], dict[str, Tensor]]:
    """Which parameters of this rank's stage have a gradient, and its buffers."""
    pipeline = Pipeline(Odd(), ["conv"], [1, 2], 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        images, targets = torch.randn(8, 1, 6, 6, generator=generator), torch.randint(3, (8,), generator=generator)
        batch = pipeline.share(images if dist.get_rank() == 0 else None, targets)
        gradients, _ = pipeline.train(batch, lambda outputs, targets: F.cross_entropy(outputs[0], targets))
    buffers = {name: buffer.clone() for name, buffer in pipeline.module.named_buffers()}
    pipeline.close()
    return [gradient is not None for gradient in gradients], buffers


def test_a_replicated_stage_has_no_gradient_where_one_device_has_none_and_one_set_of_buffers() -> None:
    (first, _), (used, one), (also_used, other) = run_ranks(3, steps_of_replicas)
    assert first == [True, True]
    # bias and weight of the middle and of the head; none of the auxiliary head.
    assert used == also_used
    assert used.count(False) == 2
    assert one.keys() == other.keys()
    assert any("running" in name for name in one)
    assert any("parametrizations" in name for name in one)
    for name, buffer in one.items():
        assert torch.equal(other[name], buffer), name


def test_a_rank_that_has_no_further_batch_is_named_on_every_rank() -> None:
    def said(pipeline: Pipeline, ends: bool) -> str | None:
        images = torch.zeros(8, 1, 6, 6, dtype=torch.float64)
        try:
            if ends:
                pipeline.end_together()
            else:
                pipeline.share(images)
        except ConfigurationError as error:
            return str(error)
        return None

    def run() -> list[str | None]:
        pipeline = Pipeline(network(), ["1", "3"], [1, 1, 1], 2)
        rank = dist.get_rank()
        found = [said(pipeline, ends) for ends in (True, rank > 0, rank == 0)]
        pipeline.close()
        return found

    alone = "ended an epoch, or training, where rank{} went on with a further batch"
    for one in run_ranks(3, run):
        assert one[0] is None, "all end together"
        assert "ranks 1, 2 " + alone.format(" 0") in str(one[1])
        assert "rank 0 " + alone.format("s 1, 2") in str(one[2])
