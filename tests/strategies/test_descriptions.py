"""What strategies say of themselves, and what they do in another way than one device."""

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import PlainCNN
from lightning.pytorch import LightningModule
from torch import nn

from cnnstrategies import ImageClassifier
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.pipeline.microbatches import Split
from cnnstrategies.strategies import CompressedDDPStrategy, HybridPipelineStrategy, ParameterServerStrategy
from cnnstrategies.strategies.differences import OWN_MEANS, RANK_ZERO, differences_of_replicas
from cnnstrategies.strategies.hybrid_pipeline.layout import differences_of_pipeline, warn_of_small_microbatches

NORMALISED = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
RANDOM = "random draws (as in dropout) are each process's own"


def test_replicas_normalise_apart_unless_they_synchronise():
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(NORMALISED))
    assert differences_of_replicas(NORMALISED, 1, 32, RANK_ZERO) == []
    assert differences_of_replicas(PlainCNN(), 2, 32, RANK_ZERO) == [RANDOM]
    assert differences_of_replicas(ImageClassifier(PlainCNN(), 10), 2, 32, RANK_ZERO) == [RANDOM]
    assert differences_of_replicas(LightningModule(), 2, 32, RANK_ZERO) == [OWN_MEANS, RANDOM]
    assert differences_of_replicas(LightningModule(), 1, 32, RANK_ZERO) == []
    assert differences_of_replicas(copy.deepcopy(NORMALISED).eval(), 2, 32, RANK_ZERO) == [RANDOM], "frozen"
    assert differences_of_replicas(synchronised, 2, 32, RANK_ZERO) == [RANDOM]
    assert differences_of_replicas(NORMALISED, 2, 32, RANK_ZERO) == [
        "BatchNorm normalises over each process's 32 images",
        "BatchNorm's running statistics are those of rank 0",
        RANDOM,
    ]
    unknown = differences_of_replicas(NORMALISED, 2, None, RANK_ZERO)
    assert unknown[0] == "BatchNorm normalises over each process's own images"


def test_a_pipeline_says_what_each_microbatch_does_by_itself():
    first, second = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)
    for norm in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        network = nn.Sequential(copy.deepcopy(first), nn.BatchNorm2d(2), norm(copy.deepcopy(second)))
        pipeline = SimpleNamespace(blueprint=SimpleNamespace(network=network))
        assert differences_of_pipeline(pipeline, "deferred", None) == [
            "BatchNorm normalises over each microbatch's own images",
            "spectral norm makes a power iteration for each microbatch",
            RANDOM,
        ]


def test_what_data_parallel_sends_in_another_way():
    powersgd = CompressedDDPStrategy(compression="powersgd", powersgd_rank=2, powersgd_start=100)
    for strategy, lines in (
        (CompressedDDPStrategy(compression="bf16"), ["gradients are sent as bf16"]),
        (powersgd, ["gradients are sent as rank-2 factors from step 100 on"]),
    ):
        strategy.connect(LightningModule())
        assert strategy.differences(32) == lines


def of_servers(workers=2, accumulated=1, **options):
    return ParameterServerStrategy(**options).options.differences(PlainCNN(), workers, 16, accumulated)


def test_a_parameter_server_says_how_old_its_gradients_may_be():
    assert of_servers() == [RANDOM]
    assert of_servers(workers=1, mode="async") == []
    update = "each update is one worker's gradient on 16 images"
    assert of_servers(mode="async") == [update, "of weights that may be any number of updates old", RANDOM]
    assert of_servers(mode="async", accumulated=3)[0] == "each update is one worker's gradient on 48 images"
    bounded = [update, "no worker is more than 4 steps ahead of the slowest", RANDOM]
    assert of_servers(mode="ssp", staleness=4) == bounded
    assert of_servers(mode="ssp", staleness=0) == [RANDOM], "as sync"
    local = ["each worker makes its own steps", "weights are averaged every 8 steps", RANDOM]
    assert of_servers(mode="local", sync_every=8) == local
    outer = of_servers(mode="local", sync_every=8, outer_lr=0.7, outer_momentum=0.9)[1]
    assert outer == "an outer step every 8 steps, on the mean of what they changed (outer_lr 0.7, outer_momentum 0.9)"
    assert of_servers(mode="async", data_dispatch="dynamic")[2] == "faster workers take more of the batches"


def test_a_parameter_server_says_what_is_rounded():
    assert of_servers(compression="fp16", pull_compression="bf16")[:2] == [
        "gradients are sent as fp16",
        "forward and backward use weights rounded to bf16",
    ]
    assert of_servers(mode="local", compression="bf16")[2] == "differences are sent as bf16"
    assert of_servers(compression="topk")[0] == "0.01 of all gradients is sent, the rest later"
    assert of_servers(compression="onebit")[0] == "gradients are sent as one bit a value, the rest later"
    changes = of_servers(compression="topk", pull_compression="topk", compression_ratio=0.05)
    assert changes[1] == "forward and backward use weights of which 0.05 is renewed in a step"
    assert "one bit a value" in of_servers(pull_compression="onebit")[0]
    assert of_servers(compression="auto", pull_compression="auto")[:2] == [
        "gradients may be sent as bf16, or as one bit a value, the rest later",
        "forward and backward may use weights rounded to fp16, or that change by one bit a value, the rest later",
    ]
    own = of_servers(pull_compression="auto", mode="async")
    assert "forward and backward may use weights rounded to fp16" in own, "nobody else has the same"


SHARES = [
    ({}, 1, "1 (on this node), 1.2 MB of parameters each"),
    ({"servers": 2}, 2, "4 (2 on each of 2 nodes), 0 to 0.4 MB of parameters each"),
    ({"servers": 2, "replication": 2}, 1, "2 (on this node), 1.2 MB of parameters each; each part is on 2 of them"),
    (
        {"endpoints": ["tcp://10.0.0.5:7700"], "coordinator": "tcp://10.0.0.1:7000", "security": "none"},
        3,
        "1 (dedicated), 1.2 MB of parameters each",
    ),
]


def test_servers_say_which_share_each_holds():
    """Three parameters of 0.4 MB, each whole in one slice."""
    parameters = [(str(index), nn.Parameter(torch.zeros(100_000))) for index in range(3)]
    optimizer = torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)
    for options, nodes, text in SHARES:
        asked = ParameterServerStrategy(**options).options
        counts = {"servers": asked.server_count(nodes), "replication": asked.replication}
        specification = Specification.of(parameters, optimizer, 2, **counts)
        assert asked.describe(specification, nodes) == [("mode", "sync"), ("servers", text)]


def test_small_normalised_microbatches_are_warned_of():
    with pytest.warns(UserWarning, match="BatchNorm normalises over 3 to 4 images: a batch of 28 is cut into 8"):
        warn_of_small_microbatches(NORMALISED, Split((28,), 8))
    with pytest.warns(UserWarning, match="BatchNorm normalises over 1 image: a batch of 3 is cut into 8"):
        warn_of_small_microbatches(NORMALISED, Split((3,), 8))


@pytest.mark.filterwarnings("error")
def test_others_are_not():
    warn_of_small_microbatches(NORMALISED, Split((64,), 8))
    warn_of_small_microbatches(PlainCNN(), Split((8,), 8))


@pytest.mark.parametrize("strategy", [HybridPipelineStrategy, ParameterServerStrategy])
def test_an_argument_that_would_do_nothing_is_refused(strategy):
    for name in ("takeover", "find_unused_parameters", "ddp_comm_hook"):
        with pytest.raises(ConfigurationError, match=rf"{strategy.__name__}\({name}=\.\.\.\): it has no such argument"):
            strategy(**{name: 1})
    assert strategy(parallel_devices=[torch.device("cpu")]).root_device.type == "cpu"
