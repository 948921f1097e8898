"""Vision models of Hugging Face's transformers, built from small configurations, under every strategy."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.zoo.trial import CLASSES, Entry, images_and_labels, part_of, try_all

DETR = "Detr"


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


class Detects(LightningModule):
    """A module with a detector that computes its loss from boxes, as RF-DETR and other descendants of DETR do."""

    def __init__(self) -> None:
        super().__init__()
        backbone = transformers.ResNetConfig(**RESNET, layer_type="basic", out_features=["stage2"])
        layers = {f"{part}_{option}": 2 for part in ("encoder", "decoder") for option in ("layers", "attention_heads")}
        widths = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "dropout": 0.0}
        config = transformers.DetrConfig(
            backbone_config=backbone, use_timm_backbone=False, num_labels=CLASSES, num_queries=6, **layers, **widths
        )
        self.model = transformers.DetrForObjectDetection(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, boxes = batch
        loss: Tensor = self.model(pixel_values=images, labels=boxes).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9)


def images_with_boxes() -> DataLoader[Any]:
    """Return images with one box each. The loss divides by the number of boxes, so it is a mean over images."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        (
            torch.rand(3, 32, 32, generator=generator),
            {
                "class_labels": torch.tensor([number % CLASSES]),
                "boxes": torch.rand(1, 4, generator=generator) / 4 + 0.3,
            },
        )
        for number in range(16)
    ]
    return DataLoader(rows, 8, collate_fn=collated)  # type: ignore[arg-type]  # a list is a data set


def collated(rows: list[tuple[Tensor, dict[str, Tensor]]]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    return torch.stack([image for image, _ in rows]), [boxes for _, boxes in rows]


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
    if name == DETR:
        return Entry(Detects, images_with_boxes, submodule="model.model.backbone")
    kind = OwnLoss if name == LABELS else Logits
    return Entry(lambda: kind(network(name)), lambda: images_and_labels(MODELS[name][1]))


@pytest.mark.parametrize("name", part_of([*MODELS, DETR]))
def test_models(name: str) -> None:
    try_all(f"transformers.{name}", model_entry(name))
