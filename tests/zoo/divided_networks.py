"""Published networks that train on divided images: those of the zoo, and more of timm, torchvision, smp,
torchgeo and torch-uncertainty.

Images are higher than wide, so that several ranks have rows of them in the last layers, and the number of rows is not a
multiple of the number of ranks. Networks that accept only one size get images of that size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import segmentation_models_pytorch
import timm
import torchgeo.models
from torch import nn
from torch_uncertainty.models.segmentation import small_unet
from torchvision.models import get_model

from tests.zoo.catalogue import SEGMENTATION, SEGMENTATION_MODELS, TIMM, TORCHVISION

CLASSES = 5
ROWS, COLUMNS = 224, 64
# Networks in which pixels far from each other are mixed by attention, or by something that takes its place.
ATTENTION = """
    timm.cait_xxs24_224 timm.coat_tiny timm.convit_tiny timm.cpubone_nano timm.crossvit_tiny_240 timm.csatv2
    timm.davit_tiny timm.deit_tiny_patch16_224 timm.edgenext_xx_small timm.efficientformer_l1
    timm.efficientformerv2_s0 timm.efficientvim_m1 timm.efficientvit_b0 timm.efficientvit_m0
    timm.eva02_tiny_patch14_224 timm.gcvit_xxtiny timm.gmlp_ti16_224 timm.halonet_h1 timm.hiera_tiny_224
    timm.iformer_t timm.levit_128s timm.lowformer_b0 timm.mobilevit_xxs timm.mvitv2_tiny timm.nest_tiny
    timm.nextvit_small timm.pit_ti_224 timm.pvt_v2_b0 timm.sam2_hiera_tiny timm.sequencer2d_s timm.shvit_s1
    timm.swiftformer_xs timm.swin_tiny_patch4_window7_224 timm.swinv2_cr_tiny_224 timm.swinv2_tiny_window8_256
    timm.test_coatnet timm.test_vit timm.test_vit_relpos timm.tiny_vit_5m_224 timm.tnt_s_legacy_patch16_224
    timm.twins_svt_small timm.vit_tiny_r_s16_p8_224 timm.vitamin_small_224 timm.volo_d1_224
    timm.xcit_nano_12_p8_224 torchvision.maxvit_t torchvision.swin_t torchvision.swin_v2_t torchvision.vit_b_32
    timm.mixer_s32_224 timm.resmlp_12_224 timm.gcresnet33ts
"""
# Networks that need wider images, or that take long, in rows and columns.
SHAPES = {
    "torchvision.deeplabv3_resnet50": (96, 64),
    "torchvision.vgg11_bn": (96, 64),
    "segmentation_models_pytorch.PAN": (224, 128),
    "timm.inception_resnet_v2": (224, 96),
    "timm.inception_v3": (224, 96),
    "timm.inception_v4": (224, 96),
    "torchvision.inception_v3": (299, 299),
}
MORE_TIMM = """
    resnet18 resnet26d resnet50 resnet50_gn seresnext26d_32x4d ecaresnet26t gcresnet33ts nf_resnet26 nf_regnet_b0
    efficientnet_b0 efficientnet_lite0 mixnet_s mobilenetv1_100 mobilenetv2_050 mobilenetv3_small_050
    mobilenetv4_conv_small_050 tinynet_e fbnetc_100 spnasnet_100 semnasnet_075 repvgg_a0 gernet_s regnety_002
    regnetz_b16 convnext_atto convnextv2_atto convnext_atto_rms hgnet_tiny dla34 res2net50_26w_4s cspresnet50
    cspdarknet53 darknet53 ese_vovnet39b xception41 ghostnetv2_100 ghostnetv3_050 mobileone_s0 resnet14t
    resnetblur18 resnetaa34d resnext50_32x4d efficientnet_es tf_mixnet_s tf_efficientnetv2_b0 hardcorenas_a
    mobilenet_edgetpu_v2_xs rexnetr_100 poolformer_s12 mambaout_femto mixer_s32_224 resmlp_12_224
    efficientnet_b0_gn regnetv_040
"""
MORE_TORCHVISION = ["resnet50", "vgg11_bn", "densenet169", "mobilenet_v3_large", "regnet_x_800mf", "efficientnet_b1"]
ENCODERS = """
    resnext50_32x4d efficientnet-b0 mobilenet_v2 densenet121 vgg11_bn xception inceptionv4 dpn68 se_resnet50
    timm-mobilenetv3_small_minimal_100 timm-regnetx_002 timm-res2net50_26w_4s timm-gernet_s mobileone_s0
    tu-convnext_atto mit_b0
"""
OTHER_ENCODERS = [
    ("FPN", "efficientnet-b0"), ("DeepLabV3Plus", "mobilenet_v2"), ("Linknet", "densenet121"),
    ("UnetPlusPlus", "timm-regnetx_002"), ("PSPNet", "mobilenet_v2"), ("Segformer", "resnet18"),
    ("Segformer", "mit_b0"),
]  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A published network.

    Attributes:
        make: Function that makes the network, with random weights.
        shape: Rows and columns of its images.
        kind: `segmentation`, `classification`, or `attention` for classification with attention.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, int]
    kind: str


def _classifiers(package: str, make: Callable[..., nn.Module], names: list[str], size: dict[str, int]) -> None:
    for name in names:
        title = f"{package}.{name}"
        is_attention = title in ATTENTION.split()
        length = size.get(name, ROWS)
        shape = (length, length) if is_attention else SHAPES.get(title, (ROWS, COLUMNS))
        kind = "attention" if is_attention else "classification"
        NETWORKS[title] = Published(partial(make, name, num_classes=CLASSES), shape, kind)


def _segmenter(name: str, make: Callable[[], nn.Module]) -> None:
    NETWORKS[name] = Published(make, SHAPES.get(name, (ROWS, COLUMNS)), "segmentation")


def _smp(architecture: str, encoder: str) -> None:
    kind: Callable[..., nn.Module] = getattr(segmentation_models_pytorch, architecture)
    title = f"segmentation_models_pytorch.{architecture}" + ("" if encoder == "resnet18" else f", {encoder}")
    _segmenter(title, partial(kind, encoder, encoder_weights=None, in_channels=3, classes=CLASSES))


NETWORKS: dict[str, Published] = {}
_classifiers("timm", timm.create_model, [*TIMM, *MORE_TIMM.split()], TIMM)
_classifiers("torchvision", get_model, [*TORCHVISION, *MORE_TORCHVISION], TORCHVISION)
for _name in (*SEGMENTATION, "deeplabv3_resnet50"):
    _segmenter(f"torchvision.{_name}", partial(get_model, _name, weights_backbone=None, num_classes=CLASSES))
for _name in SEGMENTATION_MODELS:
    _smp(_name, "resnet18")
for _name in ENCODERS.split():
    _smp("Unet", _name)
for _name, _encoder in OTHER_ENCODERS:
    _smp(_name, _encoder)
_segmenter("torchgeo.FCN", partial(torchgeo.models.FCN, 3, CLASSES))
_segmenter("torchgeo.FarSeg", partial(torchgeo.models.FarSeg, "resnet18", CLASSES, False))
_segmenter("torch_uncertainty.small_unet", partial(small_unet, 3, CLASSES))
