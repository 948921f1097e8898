"""Published networks whose predicted peak memory is compared with the real one."""

from collections.abc import Callable
from functools import partial

import timm
from torch import nn
from torchvision.models import get_model

CLASSES = 10
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

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{
        f"torchvision.{name}": (partial(get_model, name, num_classes=CLASSES, **MORE_ARGUMENTS.get(name, {})), size)
        for size, names in TORCHVISION.items()
        for name in names.split()
    },
    **{
        f"timm.{name}": (partial(timm.create_model, name, num_classes=CLASSES), size)
        for size, names in TIMM.items()
        for name in names.split()
    },
}
