"""What a pipeline cannot train as one device does is refused by name: never other weights in silence."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.utilities.compile import from_compiled
from ranks import run_apart
from test_pipeline_ways_to_write import CLASSES, Classifier, Module, Normalising, OwnForward, Siamese, classifier, fit
from torch import Tensor, nn

from cnnstrategies._lightning_private import ScriptLauncher
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline.contract import check_module
from cnnstrategies.strategies.hybrid_pipeline.stand_ins import ImagesElsewhere


class HeadBeside(OwnForward):
    """With trained parameters that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, CLASSES)


class Gan(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = classifier()


class Detector(Module):
    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import detection

        self.model = detection.ssdlite320_mobilenet_v3_large(weights_backbone=None)


class Compiled(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(self.model, backend="eager")


class CompiledLayer(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model[0].compile(backend="eager")


UNFIT: tuple[tuple[int, dict[str, Any], str], ...] = (
    (2, {"replicas": [2, 1]}, r"replicas=\[2, 1\] need 3 devices"),
    (3, {"stages": 2}, "3 devices do not divide evenly into 2 stages"),
    (8, {"stages": 8}, "has 6 places to cut; use at most 7 stages"),
    (2, {"cuts": ["9"]}, "no module or node '9'"),
    (4, {"replicas": [3, 1], "microbatches": 2, "cuts": ["2"]}, "microbatches=2 are fewer than the 3 replicas"),
    (3, {"stages": 3, "cuts": ["2"]}, "stages make 3, cuts make 2"),
    (2, {"schedule": "zigzag"}, "schedule='zigzag'"),
)
REFUSED_BEFORE = (
    (HeadBeside, r"HeadBeside has trainable parameters that its forward does not use \(head.weight, head.bias\): call"),
    (Gan, "automatic_optimization=False"),
    (Detector, r"Detector.model is a SSD of torchvision: it takes lists of images and boxes"),
    (Compiled, "Compiled.model is compiled: .* out torch.compile, and .* by the callback ComputeSettings"),
    (CompiledLayer, "CompiledLayer.model.0 is compiled"),
)


def test_what_cannot_run_is_refused_before_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptLauncher, "launch", lambda *args, **options: pytest.fail("it starts processes"))
    for devices, options, message in UNFIT:
        with pytest.raises(ConfigurationError, match=message):
            fit(Classifier, HybridPipelineStrategy(**options), devices)
    for kind, message in REFUSED_BEFORE:
        with pytest.raises(ConfigurationError, match=message):
            fit(kind, HybridPipelineStrategy(), 2)
    monkeypatch.setattr(HybridPipelineStrategy, "root_device", torch.device("cuda", 0))
    with pytest.raises(ConfigurationError, match="process_group_backend=gloo: gloo sends no messages"):
        fit(Classifier, HybridPipelineStrategy(cuts=["2"], process_group_backend="gloo"), 2)


def test_compiled_modules_are_refused_whole_and_in_training() -> None:
    module = from_compiled(torch.compile(Classifier(), backend="eager"))
    with pytest.raises(ConfigurationError, match=r"^Classifier is compiled: .* by the callback ComputeSettings"):
        check_module(module)
    step = torch.compile(torch.square, backend="eager")
    with pytest.raises(RuntimeError, match=r"a step, or .*, is compiled: .* by the callback ComputeSettings"):
        step(ImagesElsewhere.like(2, (1, 4, 4), torch.float32, torch.device("cpu")))


class ImagesAsTargets(Module):
    def __init__(self) -> None:
        super().__init__()
        self.auto = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        return F.mse_loss(self.auto(x), x)


class WithOption(Siamese):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.siamese(batch["image"], batch["other"], scale=2.0).sum()


class Twice(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]) + self(batch[0]), batch[1])


class Swapping(Siamese):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = batch["image"], batch["other"]
        return (self.siamese(a, b) if batch_idx == 0 else self.siamese(b, a)).mean()


class OtherName(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.networks = [self.model]

    def forward(self, x: Tensor) -> Any:
        return self.networks[0](x)


class Penalised(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1]) + sum(p.square().sum() for p in self.model.parameters())


class GatheringLoss(Classifier):
    """As contrastive losses do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(gather(self(batch[0])), gather(batch[1]))


class GatheringInputs(Classifier):
    """As momentum contrast does, to shuffle images among the processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(gather(batch[0])[: len(batch[0])]), batch[1])


def gather(tensor: Tensor) -> Tensor:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.cat(gathered)


class OtherImages(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(torch.zeros(6, 1, 6, 6)), batch[1])


class Scalar(nn.Module):
    """Returns a mean over the samples beside the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(144, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.conv(x))
        return self.head(x.flatten(1)), x.pow(2).mean()


class MeanBeside(Module):
    cut = "conv"

    def __init__(self) -> None:
        super().__init__()
        self.network = Scalar()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, mean = self.network(batch[0])
        return F.cross_entropy(rows, batch[1]) + mean


class NormalisingLayer(nn.Conv2d):
    """A layer that stays whole, and normalises twice."""

    def __init__(self) -> None:
        super().__init__(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(torch.relu(self.norm(super().forward(x)))))


class NormalisingTwice(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(NormalisingLayer(), nn.Flatten(), nn.Linear(144, CLASSES))


class Adding(Classifier):
    epochs = 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model[-1].parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.model[0].parameters())})


class StoppingAlone(Classifier):
    """After the first batch, which the other rank does not see."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.global_rank == 1


class FreezingLate(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.model.requires_grad_(False)


class Reader(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        float(batch[0].mean())


class WithReader(Classifier):
    def configure_callbacks(self) -> Any:
        return [Reader()]


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


REFUSED_IN_A_STEP = (
    (GatheringLoss, r"GatheringLoss.training_step calls a collective of torch.distributed \(allgather\)"),
    (GatheringInputs, r"GatheringInputs.training_step calls a collective of torch.distributed \(allgather\)"),
    (ImagesAsTargets, r"computes with the images of the batch \(mse_loss\).* a second time, as targets"),
    (WithOption, r"self.siamese is called with scale=2.0 besides the images: .* set it in its __init__"),
    (Swapping, r"called with another tensor of the batch as 'left' than in the first step"),
    (Twice, "make one call of it with several inputs"),
    (OtherName, r"the whole Sequential is called, which is divided"),
    (Penalised, "computed from the weights themselves"),
    (OtherImages, r"called with a tensor of shape \(6, 1, 6, 6\) that is not the images of the batch"),
    (MeanBeside, r"returns a tensor of shape \(\) for 2 samples: .* one row per sample"),
    (NormalisingTwice, "0.norm normalises several times in one call of the layer that contains it"),
    (Adding, "SGD has other parameters than configure_optimizers gave it: .*BaseFinetuning"),
    (FreezingLate, "frozen or unfrozen in the middle of an epoch"),
    (WithReader, r"computes with the images of the batch \(mean\)"),
    (Deciding, r"computes with the images of the batch \(.*but neither read values from them nor decide by them"),
    (Reading, r"computes with the images of the batch"),
    (Reconstructing, "loss that is computed from the images of the batch"),
    (TwoViews, r"TwoViews.[a-z_]+ gives the network a tensor of shape \(12, 1, 8, 8\) for a batch of 6 samples"),
    (Mixup, r"Mixup.[a-z_]+ draws random numbers before it calls the network.* do it in on_after_batch_transfer"),
    (Sometimes, "training_step draws random numbers before it calls the network"),
)


def refusals(kinds: Sequence[type[Module]], replicas: list[int]) -> list[str]:
    """What a fit of each says, on one rank here, on several in processes of their own."""
    said = []
    for kind in kinds:
        options: dict[str, Any] = {"cuts": [kind.cut], "start_method": "fork"} if len(replicas) > 1 else {}
        strategy = HybridPipelineStrategy(replicas=replicas, microbatches=3, **options)
        try:
            fit(kind, strategy, sum(replicas))
            said.append("trained")
        except Exception as error:
            said.append(str(error))
    return said


def are_refused(expected: Sequence[tuple[type[Module], str]], replicas: list[int]) -> None:
    found = run_apart(refusals, [kind for kind, _ in expected], replicas)
    for (kind, message), said in zip(expected, found, strict=True):
        assert re.search(message, said), (kind, said)


def test_a_step_that_a_pipeline_cannot_follow_is_refused_by_name() -> None:
    are_refused(REFUSED_IN_A_STEP, [1])
    alone = "rank 1 ended an epoch, or training, where rank 0 went on with a further batch"
    are_refused([(StoppingAlone, alone)], [1, 1])


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
    shapes = [tuple(one.shape) for one in (images.mean((2, 3)), images @ images, *images.chunk(2))]
    assert shapes == [(4, 1), (4, 1, 3, 3), (2, 1, 3, 3), (2, 1, 3, 3)]
    total = torch.zeros(4, 1, 3, 3)
    for use in (
        lambda: total.add_(images),
        lambda: torch.add(total, images, out=total),
        lambda: images.mean().item(),
        lambda: images[images > 0],
        lambda: images.numpy(),
        lambda: images.tolist(),
        lambda: images.data,
        lambda: float(images.sum()),
    ):
        with pytest.raises(ConfigurationError, match="computes with the images"):
            use()
    assert not total.any()
