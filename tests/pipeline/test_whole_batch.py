"""Tests of calls of a divided network with a whole batch, whose loss may compare all samples."""

from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cnnstrategies.pipeline.channels import AHEAD
from cnnstrategies.pipeline.division import Division
from cnnstrategies.pipeline.stage_runner import StageRunner
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.pipeline.transport import Transport
from cnnstrategies.pipeline.whole_batch import CallArguments, WholeBatch
from cnnstrategies.placed import GlooLink, Places
from tests.runner.ranks import run_ranks

SAMPLES = 7


class Residual(nn.Module):
    """A network with a skip connection over a stage, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True))
        self.head, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        y = self.second(x) + x
        return {"embedding": self.head(y.mean((2, 3))), "map": y}


def contrastive(left: dict[str, Tensor], right: dict[str, Tensor]) -> Tensor:
    """Return a loss that compares each sample with all others."""
    similarity = left["embedding"] @ right["embedding"].T
    return nn.functional.cross_entropy(similarity, torch.arange(len(similarity))) + left["map"].square().mean()


def views() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, 3, 8, 8, dtype=torch.float64, generator=generator) for _ in range(2)]


def network_with_hook(seen: list[float]) -> Residual:
    torch.manual_seed(0)
    network = Residual().double()
    for parameter in network.parameters():
        parameter.register_hook(lambda gradient: seen.append(float(gradient.sum())))
    return network


def train_stage(cuts: list[str]) -> tuple[int, dict[str, Tensor | None], Any]:
    """Train one step on a rank, in which the network is called with two views of a batch."""
    seen: list[float] = []
    network = network_with_hook(seen)
    division = Division(network, list(cuts))
    transport = Transport(Placement((1,) * (len(cuts) + 1), microbatches=3), timedelta(minutes=1))
    runner, ranks = StageRunner(division, transport, AHEAD), range(len(cuts) + 1)
    places = Places(runner.stage, len(ranks), GlooLink(dist.new_group(ranks), runner.stage, len(ranks)))
    runner.watch(network, places, [(rank,) for rank in ranks])
    images = [view.requires_grad_() for view in views()]
    batches = [runner.begin(CallArguments(view if runner.stage == 0 else None, SAMPLES, True)) for view in images]
    gradients: list[list[Tensor | None]] = [[], []]
    if runner.last:
        results = [batch.header.unpack(batch.outputs(batch.header))[0] for batch in batches if batch.header]
        outputs = [{name: tensor.requires_grad_() for name, tensor in result.items()} for result in results]
        contrastive(*outputs).backward()
        gradients = [[tensor.grad for tensor in output.values()] for output in outputs]
    sums: dict[str, Any] = {}
    of_images: list[Any] = [None, None]
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    returned: list[ref[Tensor]] = []
    for index in (1, 0):
        parts, of_images[index] = WholeBatch.backward(batches[index], gradients[index])
        returned += [ref(part) for part in parts if part is not None]
        for parameter, part in zip(runner.parameters, parts, strict=True):
            name = names[id(parameter)]
            sums[name] = part if sums.get(name) is None else sums[name] + part
    del parts, part
    kept = {id(tensor) for tensor in sums.values()}
    gone = [reference() is None for reference in returned if id(reference()) not in kept]
    assert gone
    assert all(gone), "the calls keep no gradients, of which autograd would otherwise make copies"
    assert seen == [], "hooks wait for the whole batch's gradient"
    assert not any(runner.begin(CallArguments(images[0][:2], 2, False)).sizes[2:]), (
        "a small batch has fewer microbatches"
    )
    return runner.stage, sums, of_images


def test_a_loss_may_compare_all_samples_of_two_calls() -> None:
    network = network_with_hook([])
    images = [view.requires_grad_() for view in views()]
    contrastive(*map(network, images)).backward()
    expected = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    for cuts in (["first"], ["first.0", "second"]):
        results = run_ranks(len(cuts) + 1, train_stage, cuts)
        sums_of_all = {name: gradient for _, sums, _ in results for name, gradient in sums.items()}
        assert sums_of_all.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(sums_of_all[name], gradient, rtol=1e-12, atol=1e-12)
        for view, gradients in zip(images, results[0][2], strict=True):
            torch.testing.assert_close(gradients[0], view.grad, rtol=1e-12, atol=1e-12)
