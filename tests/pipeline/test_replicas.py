"""What the replicas of a stage have alike, and what the ranks agree on before they compute."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.engine import Pipeline


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(*layers).double()


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


def test_unequal_image_sizes_are_refused_on_every_rank() -> None:
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


def test_a_replicated_stage_has_gradients_and_buffers_of_one() -> None:
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
