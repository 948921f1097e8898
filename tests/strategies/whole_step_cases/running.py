"""Run cases on one device or on the ranks of a strategy, and compare what they leave."""

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies.hybrid_pipeline.loading import PlacedLoader
from tests.conftest import quiet_trainer
from tests.runner.ranks import run_apart, run_ranks
from tests.strategies.whole_step_cases.base import Case

# Makes a strategy from the case's layout: a case and the number of replicas of each stage.
MakeStrategy = Callable[[Case, Sequence[int]], Any]
TOLERANCE = 1e-12
# Largest number of bytes of a tensor of a batch of which all ranks get copies: labels, but not images. With the
# default, all ranks would have copies of images as small as those of the cases.
COPIED = 200


class Refused(dict[str, Tensor]):
    """The result of a case that was refused: no tensors, and the message."""

    def __init__(self, message: str = "") -> None:
        super().__init__()
        self.message = message


def train(case: Case, strategy: Any, devices: int) -> dict[str, Tensor]:
    """Run a case in this process, and return what can be compared, by name.

    The result has all weights and buffers of the module, the values that it has logged, the values in its list
    ``history``, and its predictions.
    """
    torch.set_default_dtype(torch.float64)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    module = case.module()
    options = {"max_epochs": case.epochs, "callbacks": case.callbacks(), **case.trainer}
    trainer = quiet_trainer(strategy, devices, **options)
    parts = strategy.loading_processes(devices) if devices > 1 else 1
    part = dist.get_rank() % parts if devices > 1 else 0
    evaluation = case.evaluation_loader(parts, part)
    loaders = () if case.loads_itself else (case.training_loader(parts, part), evaluation if case.validates else None)
    trainer.fit(module, *loaders)
    logged = dict(trainer.callback_metrics)
    predictions: Any = []
    for name in case.then:
        if name == "predict":
            predictions = trainer.predict(module, evaluation)
        else:
            getattr(trainer, name)(module, evaluation, verbose=False)
            logged |= {f"{name}: {key}": value for key, value in trainer.callback_metrics.items()}
    result = {f"state {name}": value.detach().clone() for name, value in module.state_dict().items()}
    result |= {f"logged {name}": torch.as_tensor(value).detach().clone() for name, value in logged.items()}
    result |= {f"predicted {number}": torch.as_tensor(leaf) for number, leaf in enumerate(tree_leaves(predictions))}
    return {**result, "history": torch.tensor(module.history)}


def train_all(
    cases: Sequence[Case], make: MakeStrategy | None, replicas: Sequence[int], raises: bool = False
) -> list[dict[str, Tensor]]:
    """Return the results of cases on this rank, or on one device if there is no strategy.

    Args:
        cases: The cases.
        make: Makes the strategy; None for one device.
        replicas: Number of replicas of each stage.
        raises: Whether a refusal is raised. By default it is the case's result.
    """
    devices = sum(replicas)
    if make is not None:
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": str(devices)}
    PlacedLoader.__init__.__defaults__ = (COPIED, False)  # Each run has processes of its own.
    results: list[dict[str, Tensor]] = []
    for case in cases:
        try:
            strategy = "auto" if make is None else make(case, replicas)
            results.append(train(case, strategy, max(devices, 1)))
        except ConfigurationError as error:
            if raises:
                raise
            results.append(Refused(str(error)))
    return results


def on_one_device(cases: Sequence[Case]) -> list[dict[str, Tensor]]:
    """Return the results of cases on one device."""
    results: list[dict[str, Tensor]] = run_apart(train_all, cases, None, ())
    return results


def on_ranks(
    cases: Sequence[Case], make: MakeStrategy, replicas: Sequence[int], raises: bool = False
) -> list[list[dict[str, Tensor]]]:
    """Return each case's results on all ranks of a strategy, in rank order. The arguments are those of `train_all`."""
    by_rank = run_ranks(sum(replicas), train_all, cases, make, replicas, raises)
    return [list(results) for results in zip(*by_rank, strict=True)]


def differences(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> dict[str, str]:
    """Return what differs from one device by more than the tolerance, by name."""
    wrong = dict.fromkeys(expected.keys() - actual.keys(), "missing")
    wrong |= dict.fromkeys(actual.keys() - expected.keys(), "not on one device")
    for name in expected.keys() & actual.keys():
        left, right = expected[name].double(), actual[name].double()
        if left.shape != right.shape:
            wrong[name] = f"shape {tuple(right.shape)} instead of {tuple(left.shape)}"
        elif left.numel():
            distance = (left - right).abs().nan_to_num(float("inf")).max().item()
            if torch.equal(left.isnan(), right.isnan()):
                distance = (left - right).nan_to_num().abs().max().item()
            # Values in the history may be counts or sums, so the tolerance grows with the largest value.
            if not distance <= TOLERANCE * max(1.0, left.nan_to_num().abs().max().item()):
                wrong[name] = f"{distance:.1e}"
    return dict(sorted(wrong.items()))


def verdict(expected: dict[str, Tensor], on_each_rank: Sequence[dict[str, Tensor]]) -> str:
    """Return ``equal``, or how the ranks' results differ from one device."""
    for rank, actual in enumerate(on_each_rank):
        if isinstance(actual, Refused):
            return f"refused: {actual.message}"
        # Rank 0 has the predictions of all samples, and the other ranks have no predictions.
        names = {name for name in expected if not rank or not name.startswith("predicted")}
        known = {name: value for name, value in actual.items() if name in names or name not in expected}
        if wrong := differences({name: expected[name] for name in names}, known):
            some = ", ".join(f"{name}: {text}" for name, text in list(wrong.items())[:4])
            return f"differs on rank {rank} in {len(wrong)} of {len(expected)}: {some}"
    return "equal"
