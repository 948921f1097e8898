"""Tests of modules and options that a pipeline refuses by name, and of unusual steps that train as on one device."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn

from cnnstrategies._lightning_private import ScriptLauncher
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.hybrid_pipeline.checks import check_state
from tests.runner.ranks import run_apart
from tests.strategies.test_pipeline_ways_to_write import (
    CLASSES,
    Classifier,
    Module,
    OwnForward,
    Siamese,
    classifier,
    differ,
    fit,
)


def changed(name: str, change: Callable[[Any], object], base: type[Module] = Classifier) -> type[Module]:
    """Return a class of modules that are changed when they are made."""

    def init(self: Any) -> None:
        base.__init__(self)  # type: ignore[misc]
        change(self)

    return type(name, (base,), {"__init__": init})


UNFIT: tuple[tuple[int, dict[str, Any], str], ...] = (
    (2, {"replicas": [2, 1]}, r"replicas=\[2, 1\] need 3 devices"),
    (3, {"stages": 2}, "3 devices do not divide evenly into 2 stages"),
    (8, {"stages": 8}, "has 6 places to cut; use at most 7 stages"),
    (2, {"cuts": ["9"]}, "does not run a module or node '9'"),
    (4, {"replicas": [3, 1], "microbatches": 2, "cuts": ["2"]}, "microbatches=2 are fewer than the 3 replicas"),
    (3, {"stages": 3, "cuts": ["2"]}, "stages make 3, cuts make 2"),
    (2, {"schedule": "zigzag"}, "schedule='zigzag'"),
    (2, {"shares": "best"}, "shares='best': use auto, equal or a list"),
    (3, {"replicas": [2, 1], "cuts": ["2"], "shares": [3, 0, 1]}, r"shares=\[3, 0, 1\]: set a share above 0"),
    (
        3,
        {"replicas": [2, 1], "initial_shares": [3, 1, 1]},
        r"initial_shares=\[3, 1, 1\] has no effect with shares=equal",
    ),
    (
        3,
        {"replicas": [2, 1], "cuts": ["2"], "shares": [3, 1]},
        r"shares=\[3, 1\] has length 2, but there are 3 processes",
    ),
    (
        3,
        {"replicas": [2, 1], "cuts": ["2"], "microbatches": 4, "shares": [9, 1, 1]},
        r"microbatches=4: with the shares \[9, 1\] a replica of stage 0 would get no .*; use at least 10",
    ),
)
COMPILED = (
    (
        changed("Compiled", lambda module: setattr(module, "model", torch.compile(module.model, backend="eager"))),
        "Compiled.model is compiled: .* out torch.compile, and .* callback ComputeSettings",
    ),
)


def test_modules_and_options_that_cannot_run_are_refused_before_processes_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ScriptLauncher, "launch", lambda *args, **options: pytest.fail("it starts processes"))
    for devices, options, message in UNFIT:
        with pytest.raises(ConfigurationError, match=message):
            fit(Classifier, HybridPipelineStrategy(**options), devices)
    for kind, message in COMPILED:
        with pytest.raises(ConfigurationError, match=message):
            fit(kind, HybridPipelineStrategy(), 2)
    with pytest.raises(ConfigurationError, match=r"^Classifier is compiled: .* let the callback ComputeSettings"):
        check_state(from_compiled(torch.compile(Classifier(), backend="eager")), "model")
    monkeypatch.setattr(HybridPipelineStrategy, "root_device", torch.device("cuda", 0))
    with pytest.raises(ConfigurationError, match="process_group_backend=gloo: gloo sends no messages"):
        fit(Classifier, HybridPipelineStrategy(cuts=["2"], process_group_backend="gloo"), 2)


# By name of the module: the step's loss from images and labels.
STEPS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "ImagesAsTargets": lambda module, x, y: F.mse_loss(module(x).mean(1), x.mean((1, 2, 3))),
    "Twice": lambda module, x, y: F.cross_entropy(module(x) + module(x), y),
    "Sometimes": lambda module, x, y: F.cross_entropy(module(x if module.global_step == 0 else torch.zeros_like(x)), y),
}


class Swapping(Siamese):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = batch["image"], batch["other"]
        return (self.siamese(a, b) if batch_idx == 0 else self.siamese(b, a)).mean()


class Scalar(nn.Module):
    """A network that returns rows and a mean over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = classifier()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(x), x.pow(2).mean()


class MeanBeside(Module):
    cut = "model.0"

    def __init__(self) -> None:
        super().__init__()
        self.network = Scalar()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, mean = self.network(batch[0])
        return F.cross_entropy(rows, batch[1]) + mean


class Adding(Classifier):
    epochs = 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model[-1].parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.model[0].parameters())})


class StoppingAlone(Classifier):
    """A module in which only rank 1 stops after the first batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.global_rank == 1


def stepping(name: str, step: Callable[[Any, Tensor, Tensor], Tensor]) -> type[Module]:
    return type(name, (Classifier,), {"training_step": lambda self, batch, batch_idx: step(self, *batch)})


UNUSUAL: tuple[type[Module], ...] = (
    *(stepping(name, step) for name, step in STEPS.items()),
    changed("HeadBeside", lambda module: setattr(module, "head", nn.Linear(16, CLASSES)), OwnForward),
    Swapping,
    MeanBeside,
    Adding,
)


def test_unusual_modules_train_the_weights_of_one_device() -> None:
    """The cases of ``whole_step_cases`` are many more modules."""
    assert differ(UNUSUAL, [1, 1], 3) == {}


def refusals(kinds: Sequence[type[Module]], replicas: list[int]) -> list[str]:
    """Return each module's error message of fit, or "trained"."""
    messages = []
    for kind in kinds:
        strategy = HybridPipelineStrategy(replicas=replicas, microbatches=3, cuts=[kind.cut], start_method="fork")
        try:
            fit(kind, strategy, sum(replicas))
            messages.append("trained")
        except Exception as error:
            messages.append(str(error))
    return messages


def test_ranks_that_end_an_epoch_alone_are_refused() -> None:
    (message,) = run_apart(refusals, [StoppingAlone], [1, 1])
    assert re.search("rank 1 ended an epoch, or training, while rank 0 continued with another batch", message), message
