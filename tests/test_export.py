"""An exported network equals the checkpoint's, describes its inputs, and does not need this package."""

import importlib.util
import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_model
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.data import SyntheticDataModule
from cnnstrategies.deploy import export
from cnnstrategies.deploy.inference import images_of
from cnnstrategies.networks import SmallCNN
from tests.asking_data import AskingData
from tests.loads_elsewhere import BARRED

HERE = all(map(importlib.util.find_spec, export.NEEDS["onnx"]))
SKIPPED = pytest.mark.skipif(not HERE, reason="onnx or onnxruntime is not installed")
ONNX = pytest.param("onnx", marks=[pytest.mark.extra, SKIPPED])


def parts():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )
    data = SyntheticDataModule(num_samples=100, num_classes=3, image_size=8, channels=1, batch_size=6)
    return ImageClassifier(network, 3), data


@pytest.mark.warm
@pytest.mark.parametrize("kind", ["torch_export", ONNX])
def test_an_exported_network_runs_without_the_training_packages(kind):
    model, data = parts()
    with torch.no_grad():
        model.network(torch.randn(8, 1, 8, 8))  # Changes the running statistics from their initial values.
    report = export.export(model, data, Path("out"), kind)
    assert report.images == 10
    assert report.agreement == 1
    assert report.difference <= 1e-5
    described = json.loads(Path("out/export.json").read_text())
    assert described["class_names"] == ["0", "1", "2"]
    assert described["image_shape"] == [1, 8, 8]
    assert described["preprocessing"]["mean"] == [0.5]
    assert [path.name for path in Path().iterdir()] == ["out"]
    if kind == "torch_export":
        program = torch.export.load(f"out/{described['file']}")
        operators = {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}
        assert operators == {"aten"}, "only torch's own operators"
    images = torch.randn(3, 1, 8, 8)
    np.save("out/images.npy", images)
    np.save("out/logits.npy", model.network(images).detach())
    command = [sys.executable, str(Path(__file__).with_name("loads_elsewhere.py")), "out"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.stdout == f"3 images, without {', '.join(BARRED)}\n", run.stderr
    with pytest.raises(ConfigurationError, match="out exists already"):
        export.export(model, data, Path("out"), kind)


def test_a_data_module_may_ask_its_trainer_and_yield_three_tensors(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")  # In a job the command runs in one process as well.
    monkeypatch.setenv("SLURM_JOB_NAME", "job")
    data = AskingData(samples=24)
    report = export.export(ImageClassifier(SmallCNN(10), 10), data, Path("out"), "torch_export")
    assert (report.images, report.agreement) == (96, 1)
    for batch, message in (
        ({"image": 1}, "export: a batch of the data module is a dict, but must begin with the images: let the loaders"),
        (["name", 1], "export: a batch of the data module is a list of str, but must begin"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            images_of(batch, "export")


def test_weights_in_safetensors_load_again_equal():
    model, data = parts()
    with torch.no_grad():
        model.network(torch.randn(8, 1, 8, 8))
    report = export.export(model, data, Path("out"), "safetensors")
    assert report.difference == 0
    assert report.agreement == 1
    loaded = parts()[0].network
    load_model(loaded, "out/model.safetensors")
    for name, value in model.network.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    card = Path("out/README.md").read_text()
    parameters = sum(parameter.numel() for parameter in loaded.parameters())
    assert f"Sequential with {parameters} parameters, for images of shape 1 x 8 x 8." in card
    assert "| Data | SyntheticDataModule, 100 training images, 10 validation images |\n| Classes | 0, 1, 2 |" in card
    assert "| Comparison with the checkpoint | On 10 validation images the logits differ by at most 0 " in card
    assert "network = ...  # Build the Sequential as for training." in card


def refuses(*_, **__):
    raise RuntimeError("a branch depends on the data\nand much more")


def test_a_failed_export_is_refused_and_leaves_no_files(monkeypatch):
    model, data = parts()
    with monkeypatch.context() as patched:
        patched.setattr(torch.export, "export", refuses)
        message = "cannot export Sequential: a branch depends on the data; use the weights in the checkpoint"
        with pytest.raises(ConfigurationError, match=message):
            export.export(model, data, Path("out"), "torch_export")
        patched.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigurationError, match="not installed: pip install onnx onnxscript onnxruntime"):
            export.export(model, data, Path("out"), "onnx")
    monkeypatch.setattr(export, "to_torch_export", lambda *_: lambda images: model.network(images) + 1)
    with pytest.raises(
        ConfigurationError,
        match="network exported to torch_export differ from those of the original network by up to 1:",
    ):
        export.export(model, data, Path("out"), "torch_export")
    assert list(Path.cwd().iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing():
    """The test limits the size of files: beyond the limit the system refuses writes, as on a full disk."""
    model, data = parts()
    with torch.no_grad():
        model.network.append(torch.nn.Linear(3, 200_000)).append(torch.nn.Linear(200_000, 3))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    with pytest.raises(ConfigurationError, match=r"^cannot write out: File too large; free some space"):
        export.export(model, data, Path("out"), "torch_export")
    assert not list(Path().iterdir())
