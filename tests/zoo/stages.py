"""Published networks that are cut at random places into four stages; `make test-zoo` runs this file."""

import pytest

from tests.pipeline.test_stage import divide_and_compare
from tests.runner.ranks import run_apart
from tests.zoo.trial import part_of

TORCHVISION = (
    *("alexnet", "googlenet", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5"),
    *("squeezenet1_1", "convnext_tiny", "densenet121", "efficientnet_b0", "regnet_y_400mf", "resnet50"),
)
TIMM = ("convnextv2_atto", "resnet26d", "regnetz_b16", "res2net50_14w_8s", "inception_v3")
NETWORKS = {
    **{f"torchvision.{name}": ("torchvision", name) for name in TORCHVISION},
    **{f"timm.{name}": ("timm", name) for name in TIMM},
}


@pytest.mark.parametrize("name", part_of(NETWORKS))
def test_outputs_and_gradients_equal_the_whole_network(name: str) -> None:
    run_apart(divide_and_compare, *NETWORKS[name])
