"""One published network or module under every strategy: equal to one device, or refused in a line; else it fails."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conftest import ROOT
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cnnstrategies import ConfigurationError, verify
from cnnstrategies.pipeline.tracing import cut_positions, decide_by_shapes, ordered_nodes, trace
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.differences import OWN_MEANS

RESULTS = Path(os.environ.get("CNNSTRATEGIES_ZOO", ROOT / "build/zoo"))
CLASSES = 5
STRATEGIES: Mapping[str, tuple[Callable[[LightningModule, Tensor], Any], int]] = {
    "ddp": (lambda module, images: "ddp_find_unused_parameters_true", 2),
    "parameter_server": (lambda module, images: "parameter_server", 2),
    "hybrid_pipeline [1, 1]": (lambda module, images: pipeline([1, 1], module, images), 2),
    "hybrid_pipeline [2, 1]": (lambda module, images: pipeline([2, 1], module, images), 3),
}


def part_of(names: Iterable[str]) -> list[str]:
    """Those of a part of the zoo: every tenth from the third on, for `CNNSTRATEGIES_ZOO_PART=3/10`."""
    part, parts = map(int, os.environ.get("CNNSTRATEGIES_ZOO_PART", "1/1").split("/"))
    return list(names)[part - 1 :: parts]


def pipeline(replicas: list[int], module: LightningModule, images: Tensor) -> HybridPipelineStrategy:
    """Cut in the middle, which spares the profile, where it is known what is cut."""
    cuts = None
    if isinstance(module, Classifier):
        with contextlib.suppress(ConfigurationError):  # Which the strategy itself is to say.
            decide_by_shapes(module.network, lambda size: images[:size])
            traced = trace(module.network)
            positions = cut_positions(traced)
            cuts = [ordered_nodes(traced)[positions[len(positions) // 2] - 1].name]
    return HybridPipelineStrategy(replicas=replicas, cuts=cuts, microbatches=2, start_method="fork")


def try_all(
    name: str, make: Callable[[], LightningModule], data: Callable[[], DataLoader[Any]], is_mean: bool = True
) -> None:
    """Write down what became of it under each strategy, and fail where it is neither equal nor refused.

    Args:
        name: In the table.
        make: Makes the module.
        data: Makes its loader.
        is_mean: Whether its loss is a mean over images; else processes that each take their own come to another one.
    """
    results, wrong = {}, []
    for strategy, (chosen, devices) in STRATEGIES.items():
        try:
            torch.manual_seed(0)
            module = make()
            batch = next(iter(data()))
            images = batch["image"] if isinstance(batch, dict) else batch[0]
            verdict = verify(module, data(), chosen(module, images), devices=devices, steps=2)
            said = not is_mean and OWN_MEANS in str(verdict)
            results[strategy] = "equal" if verdict.equal else f"said: {OWN_MEANS}" if said else f"DIFFERENT: {verdict}"
        except ConfigurationError as error:
            results[strategy] = f"refused: {error}"
        except Exception as error:
            results[strategy] = f"FAILED: {str(error)[-2000:]}"
        if not results[strategy].startswith(("equal", "refused", "said")):
            wrong.append(f"{strategy}: {results[strategy]}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(results))
    assert not wrong, "\n".join(wrong)


class Classifier(LightningModule):
    """As in Lightning's examples."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, index: int) -> Tensor:
        images, targets = batch
        outputs = self.network(images)
        if isinstance(outputs, dict):
            outputs = outputs["out"]
        if isinstance(outputs, tuple):  # With auxiliary classifiers.
            outputs = outputs[0] + 0.3 * sum(one for one in outputs[1:] if one is not None)
        loss = F.cross_entropy(outputs, targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, 1e-3, momentum=0.9)


# Of one sample, as in a microbatch of half as many, torch 2.15's batch normalisation in evaluation has wrong gradients
# where the sample's strides are not those of its shape: XCiT's differ without this package, too.
def images_and_labels(size: int, masks: bool = False, channels: int = 3, batch: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(24, channels, size, size, generator=generator)
    targets = torch.randint(CLASSES, (24, size, size) if masks else (24,), generator=generator)
    return DataLoader(TensorDataset(images, targets), batch)
