"""Try a published network or module under every strategy: it must equal one device, or be refused in one line."""

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
from cnnstrategies.pipeline.node_uses import ordered_nodes
from cnnstrategies.pipeline.tracing import cut_positions, decide_by_shapes, trace
from cnnstrategies.strategies import HybridPipelineStrategy
from cnnstrategies.strategies.differences import OWN_MEANS, OWN_OTHER_LOSSES

RESULTS = Path(os.environ.get("CNNSTRATEGIES_ZOO", ROOT / "build/zoo"))
CLASSES = 5
STRATEGIES: Mapping[str, tuple[Callable[[LightningModule, Tensor], Any], int]] = {
    "ddp": (lambda module, images: "ddp_find_unused_parameters_true", 2),
    "parameter_server": (lambda module, images: "parameter_server", 2),
    "hybrid_pipeline [1, 1]": (lambda module, images: pipeline([1, 1], module, images), 2),
    "hybrid_pipeline [2, 1]": (lambda module, images: pipeline([2, 1], module, images), 3),
}


def part_of(names: Iterable[str]) -> list[str]:
    """Return one part of the names: with `CNNSTRATEGIES_ZOO_PART=3/10`, every tenth name from the third on."""
    part, parts = map(int, os.environ.get("CNNSTRATEGIES_ZOO_PART", "1/1").split("/"))
    return list(names)[part - 1 :: parts]


def pipeline(
    replicas: list[int],
    module: LightningModule,
    images: Tensor,
    kind: type[HybridPipelineStrategy] = HybridPipelineStrategy,
) -> HybridPipelineStrategy:
    """Return a pipeline; a plain network is cut in the middle, so that it does not have to be profiled."""
    cuts = None
    if isinstance(module, Classifier):
        with contextlib.suppress(ConfigurationError):  # The strategy itself raises the error again.
            decide_by_shapes(module.network, lambda size: images[:size])
            traced = trace(module.network)
            positions = cut_positions(traced)
            cuts = [ordered_nodes(traced)[positions[len(positions) // 2] - 1].name]
    return kind(replicas=replicas, cuts=cuts, microbatches=2, start_method="fork")


def try_all(
    name: str, make: Callable[[], LightningModule], data: Callable[[], DataLoader[Any]], is_mean: bool = True
) -> None:
    """Write the results of a module under each strategy to a file, and fail if a result is not acceptable.

    Acceptable results are equal to one device, refused with an error message, or announced as different before the run.

    Args:
        name: Name of the module in the table.
        make: Function that makes the module.
        data: Function that makes its loader.
        is_mean: Whether its loss is a mean over images. If it is not, processes that compute the loss of their own
            images have a different result.
    """
    results, wrong = {}, []
    for strategy, (chosen, devices) in STRATEGIES.items():
        try:
            torch.manual_seed(0)
            module = make()
            batch = next(iter(data()))
            images = batch["image"] if isinstance(batch, dict) else batch[0]
            verdict = verify(module, data(), chosen(module, images), devices=devices, steps=2)
            announced = [text for text in (OWN_MEANS, OWN_OTHER_LOSSES) if not is_mean and text in str(verdict)]
            results[strategy] = (
                "equal" if verdict.equal else f"said: {announced[0]}" if announced else f"DIFFERENT: {verdict}"
            )
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
