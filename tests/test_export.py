"""An exported network is the checkpoint's, says what it takes, and needs nothing of this package."""

import json
from pathlib import Path

import pytest
import torch

from cnnstrategies import ConfigurationError, ImageClassifier, export
from cnnstrategies.data import SyntheticDataModule
from cnnstrategies.networks import SmallCNN


def parts():
    torch.manual_seed(0)
    data = SyntheticDataModule(num_samples=100, num_classes=3, image_size=8, channels=1, batch_size=6)
    return ImageClassifier(SmallCNN(3), 3), data


@pytest.mark.parametrize("kind", ["safetensors", "torch_export"])
def test_what_is_exported_is_the_network(kind):
    model, data = parts()
    with torch.no_grad():
        model.network(torch.randn(8, 1, 8, 8))  # Running statistics that are not those of a new network.
    found = export.export(model, data, Path("out"), kind)
    assert found.images == 10
    assert found.agreement == 1
    assert found.difference <= 1e-5
    described = json.loads(Path("out/export.json").read_text())
    assert described["class_names"] == ["0", "1", "2"]
    assert described["image_shape"] == [1, 8, 8]
    assert described["preprocessing"]["mean"] == [0.5]
    assert not Path("out.unfinished").exists()
    if kind == "torch_export":
        program = torch.export.load(f"out/{described['file']}")
        images = torch.randn(3, 1, 8, 8)
        torch.testing.assert_close(program.module()(images), model.network(images))
        operators = {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}
        assert operators == {"aten"}, "none but torch's own"
    with pytest.raises(ConfigurationError, match="out is there already"):
        export.export(model, data, Path("out"), kind)


def refuses(*_, **__):
    raise RuntimeError("a branch depends on the data\nand much more")


def test_what_cannot_be_exported_is_refused_and_nothing_is_left(monkeypatch):
    model, data = parts()
    with monkeypatch.context() as patched:
        patched.setattr(torch.export, "export", refuses)
        message = "cannot export SmallCNN: a branch depends on the data; export its weights with --format safetensors"
        with pytest.raises(ConfigurationError, match=message):
            export.export(model, data, Path("out"), "torch_export")
        patched.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigurationError, match="not here: pip install onnx onnxscript onnxruntime"):
            export.export(model, data, Path("out"), "onnx")
    monkeypatch.setattr(export, "_safetensors", lambda *_: lambda images: model.network(images) + 1)
    with pytest.raises(ConfigurationError, match="as safetensors gives other logits than the checkpoint, by up to 1:"):
        export.export(model, data, Path("out"), "safetensors")
    assert list(Path.cwd().iterdir()) == []
