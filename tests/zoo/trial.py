"""Try a published network or module under every strategy: it must equal one device, or be refused in one line."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ConfigurationError, verify
from cnnstrategies.models.detector import OWN_FOREGROUND
from cnnstrategies.pipeline.node_uses import ordered_nodes
from cnnstrategies.pipeline.tracing import cut_positions, decide_by_shapes, trace_open
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.differences import OWN_MEANS, OWN_OTHER_LOSSES
from tests.conftest import ROOT
from tests.zoo.refusals import REFUSED

T = TypeVar("T")
RESULTS = Path(os.environ.get("CNNSTRATEGIES_ZOO", ROOT / "build/zoo"))
CLASSES = 5


def pipeline(
    replicas: list[int], module: LightningModule, images: Tensor, submodule: str | None
) -> HybridPipelineStrategy:
    """Return a pipeline; a plain network is cut in the middle, so that it does not have to be profiled."""
    cuts = None
    if isinstance(module, Classifier):
        with contextlib.suppress(ConfigurationError):  # The strategy itself raises the error again.
            decide_by_shapes(module.network, lambda size: images[:size])
            traced = trace_open(module.network, training=True)
            positions = cut_positions(traced)
            cuts = [ordered_nodes(traced)[positions[len(positions) // 2] - 1].name]
    return HybridPipelineStrategy(
        replicas=replicas, cuts=cuts, microbatches=2, submodule=submodule, start_method="fork"
    )


# By name: a function that makes the strategy for a module, its images and the divided submodule; and the devices.
STRATEGIES: Mapping[str, tuple[Callable[[LightningModule, Tensor, str | None], Any], int]] = {
    "ddp": (lambda module, images, submodule: "ddp_find_unused_parameters_true", 2),
    "parameter_server": (lambda module, images, submodule: "parameter_server", 2),
    "hybrid_pipeline [1, 1]": (partial(pipeline, [1, 1]), 2),
    "hybrid_pipeline [2, 1]": (partial(pipeline, [2, 1]), 3),
}


def chosen_strategies(names: Iterable[str] = STRATEGIES) -> Iterable[str]:
    """Return the strategies to try: with `CNNSTRATEGIES_ZOO_STRATEGY=hybrid`, those whose names contain this text."""
    return [name for name in names if os.environ.get("CNNSTRATEGIES_ZOO_STRATEGY", "") in name]


def this_code() -> str:
    """Return the day and the commit of a result."""
    command = ["git", "-C", ROOT, "log", "-1", "--format=%h"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return f"{time.strftime('%d %B %Y').lstrip('0')}, {commit}"


def part_of(names: Iterable[T]) -> list[T]:
    """Return one part of names or pairs: with `CNNSTRATEGIES_ZOO_PART=3/10`, every tenth from the third on."""
    part, parts = map(int, os.environ.get("CNNSTRATEGIES_ZOO_PART", "1/1").split("/"))
    return list(names)[part - 1 :: parts]


@dataclass(frozen=True)
class Entry:
    """A network or module of the zoo.

    Attributes:
        make: Function that makes the module.
        data: Function that makes its loader.
        is_mean: Whether its loss is a mean over images. If it is not, processes that compute the loss of their own
            images have a different result.
        submodule: Path of the submodule that pipelines divide; None for their own choice.
    """

    make: Callable[[], LightningModule]
    data: Callable[[], DataLoader[Any]]
    is_mean: bool = True
    submodule: str | None = None

    def strategy(self, name: str) -> tuple[LightningModule, Any, int]:
        """Return the module, the strategy of this name for the module, and the number of devices."""
        chosen, devices = STRATEGIES[name]
        torch.manual_seed(0)
        module = self.make()
        batch = next(iter(self.data()))
        images = batch["image"] if isinstance(batch, dict) else batch[0]
        return module, chosen(module, images, self.submodule), devices


def try_all(name: str, entry: Entry) -> None:
    """Write the results of a module under each strategy to a file, and fail if a result is not acceptable.

    Acceptable results are equal to one device, announced as different before the run, or refused with an error message
    if `REFUSED` has the reason. The file keeps the results of strategies that are not tried.

    Args:
        name: Name of the module in the table.
        entry: The module.
    """
    file = RESULTS / f"{name}.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    wrong = []
    for strategy in chosen_strategies():
        try:
            module, chosen, devices = entry.strategy(strategy)
            verdict = verify(module, entry.data(), chosen, devices=devices, steps=2)
            texts = (OWN_MEANS, OWN_OTHER_LOSSES, OWN_FOREGROUND)
            announced = [text for text in texts if not entry.is_mean and text in str(verdict)]
            result = "equal" if verdict.equal else f"said: {announced[0]}" if announced else f"DIFFERENT: {verdict}"
        except ConfigurationError as error:
            result = f"refused: {error}"
        except Exception as error:
            result = f"FAILED: {str(error)[-2000:]}"
        results[strategy] = {"result": result, "measured": this_code()}
        expected = ("refused",) if name in REFUSED[strategy.split()[0]] else ("equal", "said")
        if not result.startswith(expected):
            wrong.append(f"{strategy}: expected {' or '.join(expected)} (see refusals.py): {result}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results))
    assert not wrong, "\n".join(wrong)


class Classifier(LightningModule):
    """A module with a training step like those in Lightning's examples."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, index: int) -> Tensor:
        images, targets = batch
        outputs = self.network(images)
        if isinstance(outputs, dict):
            outputs = outputs["out"]
        if isinstance(outputs, tuple):  # The network has auxiliary classifiers.
            outputs = outputs[0] + 0.3 * sum(logits for logits in outputs[1:] if logits is not None)
        loss = F.cross_entropy(outputs, targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, 1e-3, momentum=0.9)


# A smaller batch would have microbatches of one sample. For one sample with unusual strides, batch normalisation in
# evaluation mode has wrong gradients in torch 2.15: XCiT's gradients differ without this package as well.
def images_and_labels(size: int, masks: bool = False, channels: int = 3, batch: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(24, channels, size, size, generator=generator)
    targets = torch.randint(CLASSES, (24, size, size) if masks else (24,), generator=generator)
    return DataLoader(TensorDataset(images, targets), batch)
