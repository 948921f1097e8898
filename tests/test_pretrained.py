"""Pretrained weights are loaded by name from torchvision's cache, and the network gets a new head."""

import logging
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import get_model, get_model_weights

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.commands.run.start_from import check_trained
from cnnstrategies.data.preprocessing import IMAGENET, Preprocessing
from cnnstrategies.pretrained import new_heads, pretrained, trained_with, without_values

pytestmark = pytest.mark.light


@pytest.fixture
def squeezenet(monkeypatch):
    """Write random weights to torchvision's cache, and return them with their path."""
    monkeypatch.setenv("TORCH_HOME", "torch_home")
    network = get_model("squeezenet1_1")
    file = Path("torch_home/hub/checkpoints", Path(get_model_weights("squeezenet1_1").DEFAULT.url).name)
    file.parent.mkdir(parents=True)
    torch.save(network.state_dict(), file)
    return network.state_dict(), file


def new_and_kept(network, state):
    now = network.state_dict()
    assert now.keys() == state.keys()
    new = {name for name in now if now[name].shape != state[name].shape or not torch.equal(now[name], state[name])}
    return new, now.keys() - new


def test_torchvision_weights_by_name_and_file_with_a_new_head(squeezenet):
    state, file = squeezenet
    head = {"classifier.1.weight", "classifier.1.bias"}
    for weights in ("DEFAULT", "IMAGENET1K_V1", str(file)):
        network = pretrained("squeezenet1_1", 7, weights, frozen=True)
        new, kept = new_and_kept(network, state)
        assert new == head
        assert len(kept) == 50
        assert {name for name, p in network.named_parameters() if p.requires_grad} == head
    assert trained_with(network) == IMAGENET
    assert network.eval()(torch.zeros(2, 3, 64, 64)).shape == (2, 7)
    assert new_and_kept(pretrained("squeezenet1_1", 1000), state)[0] == set()
    torch.save(network.state_dict(), "mine.pth")
    assert new_and_kept(pretrained("squeezenet1_1", 7, "mine.pth"), network.state_dict())[0] == set()
    assert new_and_kept(pretrained("squeezenet1_1", 5, "mine.pth"), network.state_dict())[0] == head


def test_timm_weights_by_the_name_of_their_configuration(monkeypatch):
    state = timm.create_model("test_vit").state_dict()
    save_file(state, "weights.safetensors")
    requested = []
    download = lambda repo_id, **_: requested.append(repo_id) or "weights.safetensors"  # noqa: E731
    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
    head = {"head.weight", "head.bias"}
    for name, weights in (("test_vit", "DEFAULT"), ("test_vit", "r160_in1k"), ("test_vit.r160_in1k", "DEFAULT")):
        network = pretrained(name, 7, weights, frozen=True)
        assert new_and_kept(network, state)[0] == head
        assert {name for name, p in network.named_parameters() if p.requires_grad} == head
    assert {*requested} == {"timm/test_vit.r160_in1k"}
    assert network.eval()(torch.zeros(2, 3, 160, 160)).shape == (2, 7)
    assert trained_with(network) == Preprocessing(160, 168, "bicubic", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert new_and_kept(pretrained("test_vit", 1000), state)[0] == set()
    with pytest.raises(ConfigurationError, match="already has 1000 classes and keeps its head"):
        pretrained("test_vit", 1000, frozen=True)
    monkeypatch.setattr("timm.models._hub.hf_hub_download", offline)
    with pytest.raises(
        ConfigurationError, match=r"weights of test_vit cannot be downloaded \(no route to host\): build"
    ):
        pretrained("test_vit", 7)


LARGE = Preprocessing(480, 480, "bicubic", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
VIT = Preprocessing(224, 248, "bicubic", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("builder", "arguments", "expected"),
    [
        ("torchvision.models.efficientnet_v2_l", {"weights": "IMAGENET1K_V1"}, LARGE),
        ("torchvision.models.efficientnet_v2_l", {"weights": "EfficientNet_V2_L_Weights.DEFAULT"}, LARGE),
        ("torchvision.models.resnet50", {"weights": get_model_weights("resnet50").DEFAULT}, Preprocessing(resize=232)),
        ("torchvision.models.resnet50", {"weights": None}, None),
        ("torchvision.models.segmentation.fcn_resnet50", {"weights": "DEFAULT"}, None),
        ("torchvision.models.resnet.ResNet", {"weights": "DEFAULT"}, None),
        ("timm.create_model", {"model_name": "vit_tiny_patch16_224", "pretrained": True}, VIT),
        ("timm.create_model", {"model_name": "vit_tiny_patch16_224", "pretrained": False}, None),
        ("mine.network", {"pretrained": True}, None),
    ],
)
def test_the_preprocessing_of_pretrained_weights_is_known(builder, arguments, expected):
    network = torch.nn.Identity()
    if "model_name" in arguments:
        with torch.device("meta"):
            network = timm.create_model(arguments["model_name"])
    assert trained_with(network, builder, arguments) == expected


MISTAKES = {
    "no network 'resnet5' in torchvision or timm; did you mean 'resnet50'": ("resnet5", 7),
    "timm has no weights 'in22k' for resnet18: set weights to one of .*a1_in1k": ("resnet18.in22k", 7),
    "name=resnet18.a1_in1k and weights=a2_in1k both name weights": ("resnet18.a1_in1k", 7, "a2_in1k"),
    "timm has no weights 'DEFAULT' for coatnet_0_224: choose a network of": ("coatnet_0_224", 7),
    r"no file .*nowhere.pth: set model": ("resnet18", 7, "nowhere.pth"),
    "torchvision has no weights 'IMAGENET22K' for resnet18": ("resnet18", 7, "IMAGENET22K"),
    "the weights in other.pth do not fit the network shufflenet_v2_x0_5": ("shufflenet_v2_x0_5", 7, "other.pth"),
    "text.pt is not a file of weights": ("shufflenet_v2_x0_5", 7, "text.pt"),
    r"weights of resnet18 cannot be downloaded \(no route to host\): .* copy the file, and set weights": (
        "resnet18",
        7,
    ),
    r"^raft_small cannot be built for 7 classes \(.*\): choose a network that classifies images": ("raft_small", 7),
}


def offline(*_, **__):
    raise OSError("no route to host")


def test_a_mistake_is_refused(squeezenet, monkeypatch):
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    torch.save({"weight": torch.zeros(3, 4)}, "other.pth")
    Path("text.pt").write_text("no weights")
    for message, arguments in MISTAKES.items():
        with pytest.raises(ConfigurationError, match=message):
            pretrained(*arguments)
    with pytest.raises(ConfigurationError, match=r"leaves no layer to train, .* keeps its head: set frozen"):
        pretrained("squeezenet1_1", 1000, frozen=True)


# By name of a network of torchvision: its heads.
HEADS = {
    "alexnet": "classifier.6",
    "convnext_tiny": "classifier.2",
    "densenet121": "classifier",
    "efficientnet_b0": "classifier.1",
    "efficientnet_v2_s": "classifier.1",
    "fcn_resnet50": "classifier.4 aux_classifier.4",
    "googlenet": "aux1.fc2 aux2.fc2 fc",
    "inception_v3": "AuxLogits.fc fc",
    "lraspp_mobilenet_v3_large": "classifier.low_classifier classifier.high_classifier",
    "maxvit_t": "classifier.5",
    "mnasnet1_0": "classifier.1",
    "mobilenet_v2": "classifier.1",
    "mobilenet_v3_small": "classifier.3",
    "regnet_y_400mf": "fc",
    "resnet50": "fc",
    "resnext50_32x4d": "fc",
    "shufflenet_v2_x0_5": "fc",
    "squeezenet1_1": "classifier.1",
    "swin_v2_t": "head",
    "vgg16_bn": "classifier.6",
    "vit_b_16": "heads.head",
    "wide_resnet50_2": "fc",
}


@pytest.mark.parametrize("name", HEADS)
def test_only_the_heads_are_replaced(name):
    network = without_values(name, 256)  # Many of these networks have other layers with 256 outputs.
    before = {key: tuple(parameter.shape) for key, parameter in network.named_parameters()}
    heads = new_heads(network, without_values(name, 7), 7, name)
    assert len(heads) == len(HEADS[name].split())
    now = {key: tuple(parameter.shape) for key, parameter in network.named_parameters()}
    changed = {key for key in before if before[key] != now[key]}
    assert now.keys() == before.keys()
    assert {key.rpartition(".")[0] for key in changed} == set(HEADS[name].split())
    assert all(now[key] == (7, *before[key][1:]) for key in changed)


def test_layers_as_wide_as_there_are_classes_keep_their_weights():
    """A network for 64, 128 or 256 classes has other layers with as many outputs."""
    torch.manual_seed(0)
    for name, head in (("squeezenet1_1", "classifier.1"), ("shufflenet_v2_x0_5", "fc")):
        for classes in (48, 64, 128, 256):
            state = get_model(name, num_classes=classes).state_dict()
            torch.save(state, "own.pth")
            network = pretrained(name, 5, "own.pth", frozen=True)
            assert new_and_kept(network, state)[0] == {f"{head}.weight", f"{head}.bias"}
            assert {key.rpartition(".")[0] for key, p in network.named_parameters() if p.requires_grad} == {head}
            assert network.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 5)


class Own(nn.Module):
    """A network whose head is not the last of its layers, and not the only layer with its width."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(64, classes, bias=False)
        self.pixels = nn.Conv2d(64, classes, 1)
        self.features = nn.ModuleList([nn.Conv2d(3, 64, 1), nn.Linear(64, 64), nn.Linear(64, 128)])


def test_heads_of_an_own_network():
    for classes in (64, 128):
        network = Own(classes)
        before = [*network.features]
        assert new_heads(network, Own(7), 7, "Own") == [network.head, network.pixels]
        assert [*network.features] == before
        assert (network.head.weight.shape, network.head.bias) == ((7, 64), None)
    assert new_heads(network, Own(7), 7, "Own") == []


def test_a_network_whose_outputs_are_not_the_classes_is_refused():
    detects, wanted = (without_values("ssd300_vgg16", classes) for classes in (91, 7))
    with pytest.raises(
        ConfigurationError, match=r"^ssd: the outputs of head\S*\.0 depend on the number of classes, but"
    ):
        new_heads(detects, wanted, 7, "ssd")


def test_random_weights_are_not_evaluated(caplog):
    def with_weights():
        torch.manual_seed(0)
        return ImageClassifier(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), 2)

    with caplog.at_level(logging.INFO):
        check_trained("validate", with_weights(), with_weights)
    assert "so ImageClassifier uses the weights it was built with" in caplog.text
    new_head = with_weights()
    nn.init.normal_(new_head.network[2].weight)
    with pytest.raises(ConfigurationError, match=r"validate without ckpt_path: network\.2\.weight has random values"):
        check_trained("validate", new_head, with_weights)
