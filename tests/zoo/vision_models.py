"""Vision models of Hugging Face's transformers, built from small configurations, under every strategy."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.zoo.trial import CLASSES, Entry, images_and_labels, part_of, try_all


class Logits(LightningModule):
    """A module that computes the loss of a model's logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        logits = self.model(images).logits
        loss = F.cross_entropy(logits, targets)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


class OwnLoss(Logits):
    """A module whose model computes the loss from the labels, as in transformers' examples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        loss: Tensor = self.model(pixel_values=images, labels=targets).loss
        self.log("train_loss", loss)
        return loss


LAYERS: Mapping[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "image_size": 32}
RESNET: Mapping[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
LABELS = "ResNet, loss of the model"
# By name of the configuration's class without "Config": options of the configuration, and the size of the images.
MODELS: dict[str, tuple[Mapping[str, Any], int]] = {
    "ResNet": ({**RESNET, "layer_type": "basic"}, 32),
    LABELS: ({**RESNET, "layer_type": "basic"}, 32),
    "RegNet": ({**RESNET, "groups_width": 8}, 32),
    "Bit": ({**RESNET, "hidden_sizes": [32, 64], "num_groups": 4}, 32),
    "ConvNextV2": ({"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]}, 32),
    "MobileNetV2": ({"depth_multiplier": 0.25, "image_size": 32}, 32),
    "ViT": ({**LAYERS, "intermediate_size": 32, "patch_size": 8}, 32),
    "Dinov2": ({**LAYERS, "mlp_ratio": 2, "patch_size": 8}, 32),
    "Swin": (
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4},
        32,
    ),
    "PoolFormer": ({"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]}, 32),
    "Cvt": ({"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3]}, 32),
    "Levit": (
        {
            "image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
        64,
    ),
    "FocalNet": (
        {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3]}, 32,
    ),
}  # fmt: skip


def network(name: str) -> nn.Module:
    kind = name.partition(",")[0]
    config = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, **MODELS[name][0])
    model: nn.Module = getattr(transformers, f"{kind}ForImageClassification")(config)
    return model


def model_entry(name: str) -> Entry:
    kind = OwnLoss if name == LABELS else Logits
    return Entry(lambda: kind(network(name)), lambda: images_and_labels(MODELS[name][1]))


@pytest.mark.parametrize("name", part_of(MODELS))
def test_models(name: str) -> None:
    try_all(f"transformers.{name}", model_entry(name))
