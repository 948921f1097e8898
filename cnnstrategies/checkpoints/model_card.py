"""A model card: what a network that was exported is, what it can do, and where it comes from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningDataModule
from torch import nn

from cnnstrategies.models.metric_names import is_of_epochs

CARD = "README.md"
MOST_CLASSES = 20  # that are listed; export.json has all.
SECTIONS = ("seed_everything", "model", "data", "trainer", "checkpoint")
LOADED = {
    "torch_export": 'import torch\n\nnetwork = torch.export.load("{file}").module()\nlogits = network(images)',
    "onnx": (
        'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{file}")\n'
        'logits = session.run(["logits"], {{"images": images}})[0]'
    ),
    "safetensors": (
        "from safetensors.torch import load_model\n\n"
        'load_model(network, "{file}")  # A {network}, as the configuration below makes it.\n'
        "logits = network.eval()(images)"
    ),
}


@dataclass(frozen=True)
class Origin:
    """Where a network comes from.

    Attributes:
        checkpoint: The file's name.
        epoch: In which it was written.
        step: After how many steps of the optimizer.
        metrics: What the run had logged then.
        trained_on: Strategy, devices and versions, by name.
        configuration: Of the run, as far as it is known.
    """

    checkpoint: str
    epoch: int
    step: int
    metrics: Mapping[str, float]
    trained_on: Mapping[str, str]
    configuration: Mapping[str, Any]


def origin_of(path: Path, checkpoint: Mapping[str, Any]) -> Origin:
    """What a checkpoint says, and the configuration that its run has left beside it.

    Args:
        path: The checkpoint's.
        checkpoint: Its content.
    """
    summary = checkpoint.get("callbacks", {}).get("TrainingSummary", {})
    beside = path.absolute().parents[1] / "config.yaml"
    if beside.is_file():
        whole = yaml.safe_load(beside.read_text(encoding="utf-8")) or {}
        configuration = {section: whole[section] for section in SECTIONS if section in whole}
    else:
        known = dict(checkpoint.get("hyper_parameters", {}))
        configuration = {"model": {"class_path": known.pop("_class_path", None), "init_args": known}} if known else {}
    return Origin(
        path.name,
        int(checkpoint.get("epoch", 0)),
        int(checkpoint.get("global_step", 0)),
        summary.get("history", {}).get(checkpoint.get("epoch"), {}),
        summary.get("trained_on", {}),
        configuration,
    )


def model_card(
    description: Mapping[str, Any],
    comparison: str,
    network: nn.Module,
    datamodule: LightningDataModule,
    origin: Origin | None,
) -> str:
    """The card, as Markdown.

    Args:
        description: What ``export.json`` says.
        comparison: How far the file's logits are from the checkpoint's.
        network: The network.
        datamodule: What it was trained with, after ``setup``.
        origin: Its checkpoint; None where there is none.
    """
    name, kind = type(network).__name__, description["format"]
    shape = ", ".join(map(str, description["image_shape"]))
    parameters = sum(parameter.numel() for parameter in network.parameters())
    lines = [f"# {name}", ""]
    lines += [
        f"{parameters:,} parameters{' in int8' if description['int8'] else ''}, in `{description['file']}` ({kind}). "
        "Intended use, limitations and licence are for whom publishes it to add.",
        "",
        "## Use",
        "",
        "```python",
        LOADED[kind].format(file=description["file"], network=name),
        "```",
        "",
        f"`images` is float32 (N, {shape}); `export.json` says how they are prepared, and what the classes are called.",
        "",
        "## Metrics",
        "",
    ]
    if origin is not None and origin.metrics:
        measured = [(key, f"{value:.4f}") for key, value in origin.metrics.items() if is_of_epochs(key)]
        lines += [f"The run's, in epoch {origin.epoch}, after {origin.step:,} steps (`{origin.checkpoint}`):", ""]
        lines += [*_table(measured), ""]
    lines += [f"{comparison}.", "", "## Data", "", *_table(_data(description, datamodule)), ""]
    if origin is not None and origin.trained_on:
        lines += ["## Strategy and hardware", "", *_table(origin.trained_on.items()), ""]
    if origin is not None and origin.configuration:
        written = yaml.safe_dump(_given(origin.configuration), sort_keys=False, allow_unicode=True).rstrip()
        lines += ["## Configuration", "", "What was left at null is left out.", "", "```yaml", written, "```", ""]
    return "\n".join(lines)


def _data(description: Mapping[str, Any], datamodule: LightningDataModule) -> list[tuple[str, str]]:
    rows = [("data module", type(datamodule).__name__)]
    for part, title in (("train", "training"), ("val", "validation"), ("test", "test")):
        if part == "test" and getattr(datamodule, "tests_on_validation", False):
            rows.append(("test images", "none but those of validation, by which the checkpoint was chosen"))
        elif (source := getattr(datamodule, f"{part}_source", None)) is not None:
            rows.append((f"{title} images", f"{len(source):,}"))
    if names := description["class_names"]:
        listed = ", ".join(str(name) for name in names[:MOST_CLASSES]) + ", ..." * (len(names) > MOST_CLASSES)
        rows.append((f"{len(names)} classes", listed))
    return rows


def _given(value: Any) -> Any:
    """A configuration without what is null."""
    if isinstance(value, Mapping):
        return {str(key): _given(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_given(one) for one in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    cells = [(first, second.replace("|", "\\|").replace("\n", " ")) for first, second in rows]
    return ["| | |", "| --- | --- |", *(f"| {first} | {second} |" for first, second in cells)]
