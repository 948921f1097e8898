"""Published networks: the smallest network of each of timm's families, and one of each of torchvision's and smp's.

Networks with more than 80 million parameters are left out, except vgg11, because their trials would take minutes and
gigabytes. Visformer is left out, too: its values grow beyond 1e60 in a step in which batch normalisation uses its
running statistics.
"""

from collections.abc import Mapping


def by_name(networks: Mapping[int, str]) -> dict[str, int]:
    """Return the image size of each network, by its name, from names by size.

    The size is small, unless the network accepts only the size for which it was designed.
    """
    return {name: size for size, names in networks.items() for name in names.split()}


TIMM = by_name(
    {
        96: """
            test_byobnet convmixer_768_32 test_convnext cpubone_nano csatv2 cs3darknet_focus_s
            cspnext_tiny davit_tiny densenet121 dla46x_c dpn48b edgenext_xx_small mnasnet_small
            efficientvim_m1 efficientvit_b0 fasternet_t0 fastvit_t8 focalnet_tiny_srf ghostnet_050
            hardcorenas_b hgnetv2_b0 sam2_hiera_tiny hrnet_w18_small iformer_t inception_next_atto
            inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small lowformer_b0 test_mambaout
            poolformerv2_s12 lcnet_035 mobilevit_xxs nextvit_small test_nfnet pvt_v2_b0 rdnet_tiny
            regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d test_resnet resnetv2_18
            rexnet_100 selecsls42 legacy_seresnet18 shvit_s1 skresnet18 starnet_s050 tiny_vit_5m_224
            tresnet_m vgg11 ese_vovnet19b_slim_dw legacy_xception xception41p
        """,
        160: "test_coatnet test_vit test_vit_relpos",
        224: """
            cait_xxs24_224 coat_tiny convit_tiny deit_tiny_patch16_224 efficientformer_l1
            efficientformerv2_s0 efficientvit_m0 eva02_tiny_patch14_224 gcvit_xxtiny hiera_tiny_224
            levit_128s gmlp_ti16_224 mvitv2_tiny nest_tiny pit_ti_224 sequencer2d_s swiftformer_xs
            swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 tnt_s_legacy_patch16_224 twins_svt_small
            vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xcit_nano_12_p8_224
        """,
        240: "crossvit_tiny_240",
        256: "halonet_h1 swinv2_tiny_window8_256",
    }
)
TORCHVISION = by_name(
    {
        96: """
            convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet mnasnet0_5
            mobilenet_v2 mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnext50_32x4d
            shufflenet_v2_x0_5 squeezenet1_1 swin_t swin_v2_t wide_resnet50_2
        """,
        224: "alexnet maxvit_t vit_b_32",
        299: "inception_v3",
    }
)
SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
SEGMENTATION_MODELS = by_name(
    {
        64: "Unet UnetPlusPlus FPN PSPNet Linknet MAnet DeepLabV3 DeepLabV3Plus UPerNet",
        128: "PAN",
    }
)
