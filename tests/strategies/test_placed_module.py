"""Tests of parameters outside of the divided network, in a program that all ranks run."""

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from cnnstrategies.placed import GlooLink, Places
from cnnstrategies.strategies.hybrid_pipeline.placed_module import PlacedModule
from tests.pipeline.test_placed_network import placed
from tests.runner.ranks import run_ranks


class Module(LightningModule):
    """A module with a parameter outside of the network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))


def train_with_copies_that_differ() -> list[Tensor]:
    """Return the gradients on this rank after a step whose loss differs between the replicas of the last stage."""
    rank, size = dist.get_rank(), dist.get_world_size()
    places = Places(rank, size, GlooLink(dist.new_group(range(size)), rank, size))
    module = Module()
    with placed(module.net, ["0"], (1, 2), places, microbatches=2) as network:
        placed_module = PlacedModule(module, network, places)
        factor = places.give(torch.full((), 1.0 + rank, dtype=torch.float64), network.ranks[-1])
        outputs = module.net(torch.ones(4, 4, dtype=torch.float64))
        (outputs.square().mean() * module.scale * factor).backward()
        places.settle_gradients(module.parameters())
        placed_module.finish_gradients()
        with places.local():
            gradients = [module.scale.grad, *(p.grad for p in module.net[1].parameters())] if rank else []
            result = [gradient.clone() for gradient in gradients if gradient is not None]
    places.messages.close()
    return result


def test_replicas_use_the_first_replicas_gradients_of_parameters_outside_of_the_network() -> None:
    """On a GPU, copies of a loss may differ in the last bit. The replicas' parameters must not."""
    module = Module()
    outputs = module.net(torch.ones(4, 4, dtype=torch.float64))
    (2.0 * outputs.square().mean() * module.scale).backward()
    _, first, second = run_ranks(3, train_with_copies_that_differ)
    torch.testing.assert_close(first[0], module.scale.grad, rtol=1e-12, atol=1e-12)
    assert len(first) == 3
    for gradient, other in zip(first, second, strict=True):
        assert torch.equal(gradient, other)
