"""Tests of the warning that other cuts would be faster, after some batches; layers advance a simulated clock."""

import ctypes
import os
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, fx, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ImageClassifier
from cnnstrategies.planning import measure_nodes
from cnnstrategies.runtime import stopwatch
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline import stage_times
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_ranks

LOSS = 6
seconds = [100.0] * 6 + [0.0]  # Seconds of each layer, and of the loss, for a sample; real seconds are negligible.
# The seconds of the simulated clock. What a forward stores in a Python variable would count once for a batch.
now = ctypes.c_double(0.0)


def spend(time: float) -> None:
    now.value += time


@fx.wrap
def layer(values: Tensor, scale: Tensor, number: int) -> Tensor:
    result, time = values * scale, len(values) * seconds[number]
    spend(time)
    if result.requires_grad:
        result.register_hook(lambda gradient: spend(2 * time))
    return result


class Spending(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        return layer(images, self.scale, self.number)


class Own(HybridPipelineStrategy):
    """A user's subclass, which the proposed configuration must not replace."""


class Classifier(ImageClassifier):
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        spend(len(outputs) * seconds[LOSS])
        return super().loss(outputs, targets)

    def loss_weight(self, targets: Tensor) -> int:
        return len(targets)


def fit(then: dict[int, float], batches: int = 9, measured: int = 8, **options: Any) -> list[str]:
    """Train on one rank and return the warnings that name cuts.

    The last of an epoch's three batches has fewer samples.

    Args:
        then: By number of the layer, its seconds from the start of the training on.
        batches: Number of steps.
        measured: Number of the last batch that is measured. The default measures both sizes of batches.
        options: Options of the strategy.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world)}
    measure_nodes.time = stopwatch.time = SimpleNamespace(perf_counter=lambda: now.value, monotonic=time.monotonic)  # type: ignore[assignment]
    stage_times.BATCHES = measured
    strategy = (Own if LOSS in then else HybridPipelineStrategy)(microbatches=8, **options)
    begin = LambdaCallback(on_train_start=lambda *_: [seconds.__setitem__(*item) for item in then.items()])
    trainer = quiet_trainer(strategy, world, max_epochs=-1, max_steps=batches, callbacks=[begin])
    network = nn.Sequential(*map(Spending, range(LOSS)), nn.Flatten(), nn.Linear(16, 2))
    images = TensorDataset(torch.randn(22, 1, 4, 4), torch.randint(2, (22,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Classifier(network, 2), DataLoader(images, 8 // strategy.placement.replicas[0]))
    return [text for item in caught if "cuts: [" in (text := str(item.message))]


@pytest.mark.parametrize(
    ("then", "options", "cuts"),
    [
        # The stages' times become 9 and 3; with other cuts they are 6 and 6.
        ({1: 700}, {"measured": stage_times.BATCHES, "batches": 21}, "layer_1"),
        ({LOSS: 1200}, {}, "layer_4"),  # The loss takes as long as four layers and stays in the last stage.
        (
            {5: 300},
            {"replicas": [2, 1], "shares": "auto"},
            "layer_4",
        ),  # The balancing of shares measures times as well.
        ({}, {}, None),
        pytest.param(  # All layers are slower.
            dict.fromkeys(range(LOSS), 200), {"activation_checkpointing": "always"}, None, marks=pytest.mark.cluster
        ),
        ({1: 700}, {"batches": 7}, None),
        ({1: 700}, {"cuts": ["layer_1"]}, None),
    ],
)
def test_better_cuts_are_reported_as_options_of_fit(
    run_cli: Any, then: dict[int, float], options: dict[str, Any], cuts: str | None
) -> None:
    texts, *others = run_ranks(sum(options.get("replicas", [1, 1])), partial(fit, then, **options))
    assert (len(texts), any(others)) == (cuts is not None, False), "only rank 0 warns, and only once"
    if cuts is not None:
        Path("cuts.yaml").write_text(texts[0].splitlines()[-1])
        strategy = (
            "--trainer.strategy=hybrid_pipeline" if "replicas" in options else "--config=strategy/hybrid_pipeline"
        )
        code, output = run_cli("fit", "--config=quickstart", strategy, "--config=cuts.yaml", "--print_config")
        assert code == 0, output
        taken = yaml.safe_load(output)["trainer"]["strategy"]
        assert taken["init_args"]["cuts"] == [cuts]
        assert taken["class_path"].rpartition(".")[2] == ("Own" if LOSS in then else "HybridPipelineStrategy")
