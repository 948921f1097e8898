"""Tests of the differences from one device that strategies report."""

import copy
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies import ImageClassifier
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.pipeline.timetable import Placement
from cnnstrategies.strategies import HybridPipelineStrategy, ParameterServerStrategy
from cnnstrategies.strategies.differences import OWN_MEANS, OWN_OTHER_LOSSES, RANK_ZERO, differences_of_replicas
from cnnstrategies.strategies.hybrid_pipeline.descriptions import differences_of_pipeline, warn_of_small_microbatches
from tests.conftest import PlainCNN

NORMALISED = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
RANDOM = "random draws (as in dropout) are each process's own"


def test_replicas_report_separate_batch_norm_unless_it_is_synchronised():
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(NORMALISED))
    assert differences_of_replicas(NORMALISED, 1, 32, RANK_ZERO) == []
    assert differences_of_replicas(PlainCNN(), 2, 32, RANK_ZERO) == [RANDOM]
    assert differences_of_replicas(ImageClassifier(PlainCNN(), 10), 2, 32, RANK_ZERO) == [RANDOM]
    assert differences_of_replicas(LightningModule(), 2, 32, RANK_ZERO) == [OWN_MEANS, RANDOM]
    assert differences_of_replicas(LightningModule(), 2, 32, RANK_ZERO, weighted=True) == [OWN_OTHER_LOSSES, RANDOM]
    assert differences_of_replicas(LightningModule(), 1, 32, RANK_ZERO) == []
    assert differences_of_replicas(copy.deepcopy(NORMALISED).eval(), 2, 32, RANK_ZERO) == [RANDOM], (
        "frozen layers use running statistics"
    )
    assert differences_of_replicas(synchronised, 2, 32, RANK_ZERO) == [RANDOM]
    assert differences_of_replicas(NORMALISED, 2, 32, RANK_ZERO) == [
        "BatchNorm normalises over each process's 32 images",
        "BatchNorm's running statistics are those of rank 0",
        RANDOM,
    ]
    unknown = differences_of_replicas(NORMALISED, 2, None, RANK_ZERO)
    assert unknown[0] == "BatchNorm normalises over each process's own images"
    assert differences_of_replicas(NORMALISED, 2, 1, RANK_ZERO, owner="group") == [
        "BatchNorm normalises over each group's 1 image",
        "BatchNorm's running statistics are those of rank 0",
        "random draws (as in dropout) are each group's own",
    ]


class Codebook(nn.Module):
    """A layer with an average of its inputs, a constant, a value that is set once, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("means", "sizes", "positions", "first"):
            self.register_buffer(name, torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.first.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.means.data.mul_(0.9).add_(0.1 * x.mean())
        self.sizes[0] = x.size(0)
        return x + self.positions + self.first


class InheritedCodebook(Codebook):
    """A layer whose base class updates the buffers."""


def test_replicas_report_buffers_that_a_users_layer_updates():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), InheritedCodebook())
    line = "(InheritedCodebook.means, InheritedCodebook.sizes) are those of rank 0"
    text = f"buffers that layers update from each process's own images {line}"
    assert differences_of_replicas(network, 2, 32, RANK_ZERO) == [RANDOM, text]
    assert differences_of_replicas(network, 1, 32, RANK_ZERO) == []


def test_a_pipeline_reports_what_each_microbatch_computes_separately():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    assert differences_of_pipeline(network, Placement((1, 1)), None) == [
        "BatchNorm normalises over each microbatch's own images",
        "random draws of the network (as in dropout) are each microbatch's own",
    ]


def of_servers(workers=2, accumulated=1, **options):
    return ParameterServerStrategy(**options).options.differences(PlainCNN(), workers, 16, accumulated)


def test_a_parameter_server_reports_stale_and_rounded_values():
    assert of_servers() == [RANDOM]
    assert of_servers(workers=1, mode="async") == []
    update = "each update is one worker's gradient on 16 images"
    assert of_servers(mode="async") == [
        update,
        "a gradient may come from weights that are any number of updates old",
        RANDOM,
    ]
    assert of_servers(mode="async", accumulated=3)[0] == "each update is one worker's gradient on 48 images"
    bounded = [update, "no worker is more than 4 steps ahead of the slowest", RANDOM]
    assert of_servers(mode="ssp", staleness=4) == bounded
    assert of_servers(mode="ssp", staleness=0) == [RANDOM], "staleness 0 behaves like mode sync"
    local = ["each worker makes its own steps", "weights are averaged every 8 steps", RANDOM]
    assert of_servers(mode="local", sync_every=8) == local
    outer = of_servers(mode="local", sync_every=8, outer_lr=0.7, outer_momentum=0.9)[1]
    assert (
        outer == "an outer step every 8 steps, on the mean of the workers' changes (outer_lr 0.7, outer_momentum 0.9)"
    )
    assert of_servers(mode="async", data_dispatch="dynamic")[2] == "faster workers take more of the batches"
    assert of_servers(compression="fp16", pull_compression="onebit")[:2] == [
        "gradients are sent as fp16",
        "forward and backward use weights that are sent as one bit per element, with error feedback",
    ]


def test_small_microbatches_with_batch_norm_lead_to_a_warning():
    with pytest.warns(UserWarning, match="BatchNorm normalises over 3 to 4 images: a batch of 28 is cut into 8"):
        warn_of_small_microbatches(NORMALISED, [4] * 4 + [3] * 4)
    with pytest.warns(UserWarning, match="BatchNorm normalises over 1 image: a batch of 3 is cut into 8"):
        warn_of_small_microbatches(NORMALISED, [1] * 3 + [0] * 5)
    with warnings.catch_warnings(action="error"):
        warn_of_small_microbatches(NORMALISED, [8] * 8)
        warn_of_small_microbatches(PlainCNN(), [1] * 8)


@pytest.mark.parametrize("strategy", [HybridPipelineStrategy, ParameterServerStrategy])
def test_an_argument_that_would_do_nothing_is_refused(strategy):
    for name in ("takeover", "find_unused_parameters", "ddp_comm_hook"):
        with pytest.raises(
            ConfigurationError, match=rf"{strategy.__name__}\({name}=\.\.\.\): the strategy has no such option"
        ):
            strategy(**{name: 1})
    assert strategy(parallel_devices=[torch.device("cpu")]).root_device.type == "cpu"
