"""Tests of copies of a divided network, made before and after its division, in a program that all ranks run."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cnnstrategies.pipeline.network_copies import adopt_copies, find_copies
from cnnstrategies.pipeline.placed_network import PlacedNetwork
from cnnstrategies.placed import ForeignTensor, GlooLink, Places, RefusedError, hide_foreign_gradients
from tests.pipeline.test_placed_network import check_equal, placed
from tests.pipeline.test_whole_batch import views
from tests.runner.ranks import run_ranks


class Network(nn.Module):
    """A network with batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


class Program(nn.Module):
    """A program with a mean teacher, a second learner and averaged weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = Network().double()
        self.teacher = copy.deepcopy(self.network).requires_grad_(False).eval()
        self.read: list[Any] = []

    def begin(self) -> None:
        """Make further copies, after the network has been divided."""
        self.peers = nn.ModuleList(copy.deepcopy(nn.ModuleList([self.network])))
        self.again = copy.deepcopy(self.teacher)
        self.average = AveragedModel(self.network, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
        self.unused = copy.deepcopy(self.network)
        with torch.no_grad():
            for parameter in self.peers.parameters():
                parameter.mul_(1.1)
        self.optimizer = torch.optim.AdamW([*self.network.parameters(), *self.peers.parameters()], 0.01)

    def run(self) -> None:
        left, right = views()
        peer = self.peers[0]
        best = (float("inf"), self.network.state_dict())
        for step in range(3):
            with torch.no_grad():
                target = self.teacher(right)
            output, other = self.network(left), peer(left)
            loss = (output - target).square().mean() + (output - other.detach()).square().mean()
            loss = loss + nn.functional.kl_div(other.log_softmax(1), output.detach().softmax(1)) + other.mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            self.optimizer.step()
            with torch.no_grad():
                for p, q in zip(self.network.parameters(), self.teacher.parameters(), strict=True):
                    q.mul_(0.9).add_(p, alpha=0.1)
                for p, q in zip(self.network.buffers(), self.teacher.buffers(), strict=True):
                    q.copy_(p)
            self.average.update_parameters(self.network)
            if loss < best[0]:
                best = (loss.item(), copy.deepcopy(self.network.state_dict()))
            self.read += [loss.item(), float(self.distance()), self.network.training, self.teacher.training]
            self.again.load_state_dict(self.teacher.state_dict() if step else best[1])
        self.read += [self.again(left).sum().item(), self.average.eval()(right).norm().item()]
        self.network.load_state_dict(best[1])
        file = io.BytesIO()
        torch.save({"network": self.network, "loss": loss.detach()}, file)
        file.seek(0)
        whole = torch.load(file, weights_only=False)["network"]
        assert not isinstance(whole.forward, PlacedNetwork)
        self.read += [value.sum().item() for value in whole.state_dict().values()]
        self.read.append(whole.eval()(torch.ones_like(left)).sum().item())

    def distance(self) -> Tensor:
        p, q = (nn.utils.parameters_to_vector(n.parameters()) for n in (self.network, self.teacher))
        return (p - q).norm()


def run_program(cuts: list[str], replicas: tuple[int, ...]) -> tuple[dict[str, Tensor], list[Any]]:
    """Run the program on a rank of a pipeline."""
    size = dist.get_world_size()
    places = Places(dist.get_rank(), size, GlooLink(dist.new_group(range(size)), dist.get_rank(), size))
    program = Program()

    def install(network: PlacedNetwork) -> None:
        vars(network.division.network)["forward"] = network

    with placed(program.network, cuts, replicas, places) as network:
        network.runner.microbatches = 1  # Batch normalization is that of the whole batch.
        adopt_copies(program, network, install)
        assert any(isinstance(parameter, ForeignTensor) for parameter in program.teacher.parameters())
        program.begin()
        hide_foreign_gradients(places, program.optimizer)
        program.run()
        assert len(network.copies) == 5
        pickled = copy.copy(program.network)
        assert pickled.forward is network
        state = {name: places.everywhere(tensor.detach()) for name, tensor in program.state_dict().items()}
        vars(program.unused.forward)["_network"] = None
        with pytest.raises(RefusedError, match=r"a copy of Network, which is divided .* copy.deepcopy"):
            program.unused(views()[0])
    places.messages.close()
    return state, program.read


def check_layout(cuts: list[str], replicas: tuple[int, ...]) -> None:
    program = Program()
    program.begin()
    program.run()
    expected = [dict(program.state_dict()), program.read]
    for results in run_ranks(sum(replicas), run_program, cuts, replicas):
        check_equal(results, expected)


def test_copies_of_a_network_are_divided_as_well() -> None:
    check_layout(["stem"], (1, 1))


@pytest.mark.cluster
def test_copies_of_a_network_are_divided_as_well_with_replicas() -> None:
    check_layout(["stem", "body.0"], (1, 2, 1))


@pytest.mark.light
def test_copies_are_found_by_class_and_shapes() -> None:
    network, other = Network(), nn.Sequential(nn.Linear(2, 2))
    module = nn.ModuleDict({"a": network, "b": nn.Sequential(copy.deepcopy(network)), "c": other})
    module["shared"] = copy.copy(network)
    module["d"] = Network().double()
    assert list(find_copies(module, network)) == [module["b"][0]]
