"""The engine on a simulated GPU computes what it computes on the CPU, and the host never waits for the device."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from simulated_cuda import simulate
from simulated_gpu import DEVICE
from torch import Tensor, nn

from cnnstrategies.pipeline.batch import Batch
from cnnstrategies.pipeline.engine import Pipeline
from cnnstrategies.pipeline.losses import PartialLoss, WeighedLoss, targets_of

STEPS = 3


class Network(nn.Module):
    """A shortcut over the cut, batch normalisation, what works in place, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))

    def forward(self, images: Tensor) -> Tensor:
        images = self.first(images)
        out: Tensor = self.head(images + self.second(images))
        return out


class OwnLoss(WeighedLoss):
    """That of a user's step, without a step."""

    def __init__(self) -> None:
        super().__init__(self._of)

    def _of(self, outputs: Tensor, microbatch: int | None) -> Tensor:
        targets: Tensor = self._batch.rest[0] if microbatch is None else targets_of(self._batch, microbatch)
        return F.cross_entropy(outputs, targets)


class Case(NamedTuple):
    """How a pipeline is run."""

    options: dict[str, Any] | None = None
    own_loss: bool = False
    channels_last: bool = False
    autocast: torch.dtype | None = None
    scale: float = 1.0
    odd: int = 0


class Trained(NamedTuple):
    """What came of it on one rank, and where the host waited in the last step and in an evaluation."""

    loss: float
    state: dict[str, Tensor]
    outputs: Tensor
    waits: Counter[str]
    evaluating: Counter[str]


def train(case: Case, replicas: tuple[int, ...], device: str) -> Trained:
    torch.manual_seed(0)
    network = Network()
    format_ = torch.channels_last if case.channels_last else torch.contiguous_format
    network = network.to(memory_format=format_)
    many = 8 * replicas[0] + case.odd
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(STEPS, many, 3, 6, 6, generator=generator)
    targets = torch.randint(0, 5, (STEPS, many), generator=generator)
    options: dict[str, Any] = {"bucket_bytes": 600, **(case.options or {})}
    with Pipeline(network, ["first"][: len(replicas) - 1], replicas, 4, device=device, **options) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters, lr=0.1, momentum=0.9)
        loss: Callable[..., Tensor] | PartialLoss = OwnLoss() if case.own_loss else F.cross_entropy
        scale = torch.full((), case.scale, device=device)
        torch.manual_seed(2)
        for step in range(STEPS):
            own = [part[step, pipeline.place.replica :: replicas[0]].contiguous() for part in (images, targets)]
            with DEVICE.waits_inside() as waits:
                own = [(one.pin_memory() if device == "cuda" else one).to(device, non_blocking=True) for one in own]
                with _autocast(case, device):
                    batch = pipeline.share(own[0].contiguous(memory_format=format_), own[1])
                    if isinstance(loss, OwnLoss):
                        loss.thorough = step == 0
                    gradients, made = pipeline.train(batch, loss, scale, gather=True)
                    outputs = pipeline.gather(batch, made)
                for parameter, gradient in zip(pipeline.parameters, gradients, strict=True):
                    parameter.grad = None if gradient is None else gradient / scale
                optimizer.step()
            value = pipeline.mean_loss()
        pipeline.module.eval()
        _evaluate(pipeline, own)
        with DEVICE.waits_inside() as evaluating:
            evaluated = _evaluate(pipeline, own)
        return Trained(value, pipeline.merge(), torch.cat([outputs.cpu(), evaluated.cpu()]), waits, evaluating)


def _evaluate(pipeline: Pipeline, own: list[Tensor]) -> Tensor:
    batch: Batch = pipeline.share(*own)
    outputs: Tensor = pipeline.gather(batch, pipeline.evaluate(batch))
    return outputs


def _autocast(case: Case, device: str) -> AbstractContextManager[object]:
    return nullcontext() if case.autocast is None else torch.autocast(device, case.autocast)


def on_both(cases: list[Case], replicas: tuple[int, ...]) -> tuple[list[Trained], list[Trained]]:
    """One rank's results on the CPU and on a simulated GPU."""
    host = [train(case, replicas, "cpu") for case in cases]
    with simulate():
        return host, [train(case, replicas, "cuda") for case in cases]


LAYOUTS = {
    (1,): [Case(own_loss=True)],
    (1, 1): [
        Case({"activation_checkpointing": "always"}, channels_last=True),
        Case({"batch_norm": "microbatch"}, own_loss=True),
        Case({"activation_checkpointing": "except_last"}, autocast=torch.float16, scale=1024.0),
        Case(own_loss=True, autocast=torch.bfloat16),
    ],
    (2, 1): [Case({"batch_norm": "microbatch", "schedule": "gpipe"}, odd=1), Case(autocast=torch.bfloat16)],
}


@pytest.mark.parametrize("replicas", LAYOUTS)
def test_trains_what_the_cpu_trains_and_no_step_waits(replicas: tuple[int, ...]) -> None:
    cases = LAYOUTS[replicas]
    for rank, (host, device) in enumerate(run_ranks(sum(replicas), on_both, cases, replicas)):
        for case, expected, actual in zip(cases, host, device, strict=True):
            assert actual.loss == expected.loss, (rank, case)
            torch.testing.assert_close(actual.state, expected.state, rtol=0, atol=0)
            torch.testing.assert_close(actual.outputs, expected.outputs, rtol=0, atol=0)
            assert sum(actual.waits.values()) <= case.own_loss, (rank, case, actual.waits)
            assert not actual.evaluating, (rank, case, actual.evaluating)
