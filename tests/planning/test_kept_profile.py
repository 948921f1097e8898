"""Tests of profiles that are kept for the next start of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from cnnstrategies.pipeline.tracing import trace_open
from cnnstrategies.planning import kept_profile
from cnnstrategies.planning.costs import GraphCosts, NodeCost, Profile, Value
from cnnstrategies.planning.kept_profile import NAME, keep, kept, key_of
from cnnstrategies.strategies.hybrid_pipeline import profiling
from cnnstrategies.strategies.hybrid_pipeline.profiling import profile_of

pytestmark = pytest.mark.light
CPU = torch.device("cpu")
NODES = NodeCost("a", 0.25, 0.5, 100, 200), NodeCost("b", 0.125, 0.25)
PROFILE = Profile(GraphCosts(NODES, (Value(0, (1,), 10, 5),), (1,), 8, 700, 30), ((0.1, 0.2), (0.0, 0.1)), True)


class Hidden(nn.Module):
    """A layer that tracing does not open."""

    factor = 1

    def forward(self, images: Tensor) -> Tensor:
        return images * self.factor if float(images.sum()) < 1e9 else images


class Changed(Hidden):
    def forward(self, images: Tensor) -> Tensor:
        return images + self.factor if float(images.sum()) < 1e9 else images


def network(width: int = 4, kernel: int = 3, layer: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, kernel), nn.BatchNorm2d(width), layer or Hidden(), nn.Flatten())


def set_on(layer: nn.Module, **attributes: Any) -> nn.Module:
    vars(layer).update(attributes)
    return layer


def frozen() -> nn.Module:
    result = network()
    next(result.parameters()).requires_grad = False
    return result


def test_a_profile_is_kept_for_its_key(tmp_path: Path) -> None:
    file = tmp_path / "folder" / NAME
    assert kept(file, "key") is None
    keep(file, "key", PROFILE)
    assert kept(file, "key") == PROFILE
    assert kept(file, "other") is None
    keep(tmp_path / "folder" / NAME / "below a file", "key", PROFILE)


def changed(change: Callable[[Any], Any]) -> str:
    content = {"key": "key", "profile": json.loads(json.dumps(kept_profile.asdict(PROFILE)))}
    change(content["profile"])
    return json.dumps(content)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        changed(dict.clear),
        changed(lambda profile: profile["costs"]["nodes"].pop()),
        changed(lambda profile: profile["costs"]["nodes"][0].update(forward=-1.0)),
        changed(lambda profile: profile["costs"]["nodes"][0].update(backward="fast")),
        changed(lambda profile: profile["costs"]["values"][0].update(consumers=[2])),
        changed(lambda profile: profile.update(fixed=[[0.1, 0.2]])),
    ],
)
def test_an_invalid_file_is_not_read(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(changed(lambda profile: None))
    assert kept(tmp_path / NAME, "key") == PROFILE
    (tmp_path / NAME).write_text(text)
    assert kept(tmp_path / NAME, "key") is None


def test_the_key_changes_with_the_network_the_images_the_machine_and_the_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = torch.randn(2, 3, 8, 8)

    def key(module: nn.Module, batch: Any = images, size: int = 4, precision: str = "32-true") -> str:
        return key_of(trace_open(module, True), batch, size, CPU, precision)

    keys = [
        key(network()),
        key(network(5)),
        key(network(4, 1)),
        key(network(layer=Changed())),
        key(network(layer=set_on(Hidden(), factor=2))),
        key(frozen()),
        key(network().double()),
        key(network(), torch.randn(2, 3, 9, 9)),
        key(network(), size=5),
        key(network(), precision="bf16-mixed"),
    ]
    for owner, name, value in (
        (torch, "__version__", "1.0"),
        (torch, "get_num_threads", lambda: 77),
        (kept_profile, "version", lambda package: "0.0"),
        (kept_profile, "_name_of", lambda device: "another"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            keys.append(key(network()))
    assert len(set(keys)) == len(keys)
    assert key(network()) == keys[0], "values of parameters do not matter"


def test_the_next_start_of_a_run_reads_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(*arguments: Any) -> Profile:
        measured.append(arguments[4])
        return PROFILE

    monkeypatch.setattr(profiling, "measure_profile", measure)

    def start(folder: str | None, precision: str = "32-true", module: nn.Module | None = None) -> Profile:
        checkpoint = None if folder is None else ModelCheckpoint(folder)
        trainer: Any = SimpleNamespace(precision=precision, lightning_module=None, checkpoint_callback=checkpoint)
        return profile_of(module or network(), torch.randn(2, 3, 8, 8), 4, CPU, trainer)

    folder = str(tmp_path / "checkpoints")
    for arguments, number in (
        ((folder,), 1),
        ((folder,), 1),
        ((folder, "bf16-mixed"), 2),
        ((folder, "bf16-mixed"), 2),
        ((folder, "bf16-mixed", network(5)), 3),
        ((None,), 4),
        ((None,), 5),
        (("memory://checkpoints",), 6),
        ((str(tmp_path / "other"),), 7),
    ):
        assert start(*arguments) == PROFILE
        assert len(measured) == number, arguments


class Storing(Hidden):
    """A layer that counts its calls, and keeps a term that is connected to its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls, self.term = 0, torch.zeros(())

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        self.term = (self.weight * images).mean()
        return super().forward(self.weight * images)


def test_measuring_stores_nothing_on_modules() -> None:
    layer, outputs = Storing(), list[Tensor]()
    module, term = network(layer=layer), layer.term
    layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    trainer: Any = SimpleNamespace(precision="32-true", lightning_module=None, checkpoint_callback=None)
    profile_of(module, torch.randn(2, 3, 8, 8), 4, CPU, trainer)
    assert layer.calls == 0
    assert layer.term is term
    assert not outputs
