"""Model card of an exported network: a README.md with how the network was trained, and how to load it."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning
import torch
import yaml
from lightning.pytorch import LightningDataModule
from torch import nn

from cnnstrategies.data import ImageDataModule

CARD = "README.md"
TASKS = {"acc": "image-classification", "miou": "image-segmentation"}
LOAD = {
    "torch_export": "import torch\n\nnetwork = torch.export.load({file!r}).module()",
    "onnx": "import onnxruntime\n\nsession = onnxruntime.InferenceSession({file!r})",
    "safetensors": "from safetensors.torch import load_model\n{build}\nload_model(network, {file!r})\nnetwork.eval()",
}
TEXT = """---
library_name: pytorch
{tag}tags: [cnnstrategies]
---

# {name}

{name} with {parameters:,} parameters, for images of shape {shape}.

| | |
| --- | --- |
{rows}

```python
{code}
```

The preprocessing of the images and the names of the classes are in `export.json`.
"""


def model_card(
    module: nn.Module,
    network: nn.Module,
    datamodule: LightningDataModule,
    description: Mapping[str, Any],
    comparison: str,
    checkpoint: tuple[Path, Mapping[str, Any]] | None,
) -> str:
    """Return the text of a model card in Markdown, with metadata for the Hugging Face Hub.

    Args:
        module: The module that was trained.
        network: The module's network.
        datamodule: The data module, after its ``setup``.
        description: Content of ``export.json``.
        comparison: Result of the comparison with the original network.
        checkpoint: Path and content of the checkpoint with the weights, or None. If the checkpoint is in the folder of
            its run, the configuration in this folder says how the network was trained.
    """
    data = type(datamodule).__name__
    if isinstance(datamodule, ImageDataModule):
        images = len(datamodule.train_source), len(datamodule.val_source)
        data += f", {images[0]:,} training images, {images[1]:,} validation images"
    names = description["class_names"] or []
    rows = {"Module": type(module).__name__, "Data": data, "Classes": ", ".join(map(str, names[:20]))}
    if len(names) > 20:
        rows["Classes"] += f" and {len(names) - 20} more"
    hyperparameters: Mapping[str, Any] = {}
    if checkpoint is not None:
        rows |= _training(*checkpoint)
        hyperparameters = checkpoint[1].get("hyper_parameters", {})
    rows["Versions"] = (
        f"cnnstrategies {version('cnnstrategies')}, torch {torch.__version__}, lightning {lightning.__version__}"
    )
    rows["Comparison with the checkpoint"] = comparison
    code = LOAD[description["format"]].format(
        file=description["file"], build=_build(hyperparameters.get("network"), type(network).__name__)
    )
    task = TASKS.get(getattr(module, "quality", ""))
    return TEXT.format(
        tag="" if task is None else f"pipeline_tag: {task}\n",
        name=type(network).__name__,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        shape=" x ".join(map(str, description["image_shape"])),
        rows="\n".join(f"| {title} | {text} |" for title, text in rows.items() if text),
        code=code,
    )


def _training(path: Path, checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the card about the training: checkpoint, metrics and strategy."""
    epoch = checkpoint.get("epoch", 0)
    rows = {"Checkpoint": f"{path.name}, after {checkpoint.get('global_step', 0):,} steps in epoch {epoch}"}
    history = checkpoint.get("callbacks", {}).get("TrainingSummary", {}).get("history", {})
    metrics = {name: value for name, value in history.get(epoch, {}).items() if name.startswith("val_")}
    rows["Metrics"] = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
    configuration = path.parent.parent / "config.yaml"
    if configuration.is_file():
        content = yaml.safe_load(configuration.read_text(encoding="utf-8"))
        trainer = content.get("trainer") if isinstance(content, Mapping) else None
        if isinstance(trainer, Mapping) and {"strategy", "num_nodes", "devices", "precision"} <= trainer.keys():
            name = trainer["strategy"]
            if isinstance(name, Mapping):
                name = name["class_path"].rpartition(".")[2]
            precision = trainer["precision"] or "32-true"
            rows["Strategy"] = f"{name}, {trainer['num_nodes']} x {trainer['devices']} devices, precision {precision}"
    return rows


def _build(network: Any, name: str) -> str:
    """Return the code that builds the network, from its part of the training's configuration if this is known."""
    if not isinstance(network, Mapping) or "class_path" not in network:
        return f"\nnetwork = ...  # Build the {name} as for training."
    arguments = {**(network.get("init_args") or {}), **(network.get("dict_kwargs") or {})}
    package, _, function = network["class_path"].rpartition(".")
    call = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"from {package} import {function}\n\nnetwork = {function}({call})"
