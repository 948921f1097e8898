"""Published networks whose predicted peak memory is compared with the real one."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import segmentation_models_pytorch
import timm
from torch import Tensor, nn
from torchvision.models import get_model

from cnnstrategies.networks import UNet

CLASSES = 10
SAMPLES = 16  # Samples of a global batch of small images.


class Training(NamedTuple):
    """A network, and the images with which it is trained.

    Attributes:
        make: Function that makes the network.
        size: Side of the images.
        samples: Number of samples of a global batch.
        has_maps: Whether each pixel has a class.
    """

    make: Callable[[], nn.Module]
    size: int
    samples: int = SAMPLES
    has_maps: bool = False


class Scores(nn.Module):
    """A segmentation network of torchvision that returns the scores of its classes.

    Args:
        name: Name of the network.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.network = get_model(name, num_classes=CLASSES, weights_backbone=None)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of each pixel (N, classes, H, W)."""
        scores: Tensor = self.network(images)["out"]
        return scores


# Networks of torchvision and timm, by the side of their images.
TORCHVISION = {
    64: "alexnet squeezenet1_1 resnet18 resnet34 resnet50 resnext50_32x4d densenet121 mobilenet_v2 mobilenet_v3_small "
    "mobilenet_v3_large efficientnet_b0 shufflenet_v2_x0_5 shufflenet_v2_x1_0 mnasnet0_5 mnasnet1_0 regnet_y_400mf "
    "regnet_x_400mf regnet_x_800mf convnext_tiny googlenet vgg11",
}
TIMM = {
    64: "resnet26d resnet14t seresnext26d_32x4d skresnet18 resnest14d ghostnet_100 rexnet_100 mixnet_s "
    "tf_efficientnet_lite0 fbnetc_100 spnasnet_100 semnasnet_100 lcnet_100 hardcorenas_a repvgg_a0 mobileone_s0 dla34 "
    "ese_vovnet19b_dw dpn48b",
}
MORE_ARGUMENTS = {"googlenet": {"aux_logits": False, "init_weights": False}}

NETWORKS = {
    **{
        f"torchvision.{name}": Training(
            partial(get_model, name, num_classes=CLASSES, **MORE_ARGUMENTS.get(name, {})), size
        )
        for size, names in TORCHVISION.items()
        for name in names.split()
    },
    **{
        f"timm.{name}": Training(partial(timm.create_model, name, num_classes=CLASSES), size)
        for size, names in TIMM.items()
        for name in names.split()
    },
}

# Networks that are trained with large images.
CLASSIFIERS = (
    "resnet18 resnet50 mobilenet_v2 efficientnet_b0 densenet121 convnext_tiny regnet_y_400mf shufflenet_v2_x1_0"
)
LARGE = {
    **{
        f"torchvision.{name}, 256 x 256": Training(partial(get_model, name, num_classes=CLASSES), 256, 4)
        for name in CLASSIFIERS.split()
    },
    **{
        f"timm.{name}, 256 x 256": Training(partial(timm.create_model, name, num_classes=CLASSES), 256, 4)
        for name in ("dla34", "seresnext26d_32x4d")
    },
    "UNet, 512 x 512": Training(partial(UNet, CLASSES, widths=(16, 32, 64, 128)), 512, 2, True),
    **{
        f"torchvision.{name}, 512 x 512": Training(partial(Scores, name), 512, 2, True)
        for name in ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large")
    },
    "smp.Unet (resnet18), 512 x 512": Training(
        partial(segmentation_models_pytorch.Unet, "resnet18", encoder_weights=None, classes=CLASSES), 512, 2, True
    ),
}
