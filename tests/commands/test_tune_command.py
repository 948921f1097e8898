"""``cnnstrategies tune``: what it tries, and what it writes; its runs only pretend here."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import ROOT
from jsonargparse import Namespace

from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.tune.command import choices, compilers, loading
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.models.classifier import ImageClassifier
from cnnstrategies.planning.tune import contest

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
CPU = torch.device("cpu")


class Pretended:
    """A trial in which channels_last is fast, and what is compiled only with it."""

    def __init__(self, folder, name, words, seconds, command):
        (folder / f"{name}.log").touch()
        assert words[0] == "fit"
        arguments = {}
        for word in words:
            if word.startswith(str(folder)):
                arguments |= yaml.safe_load(Path(word).read_text()).get("model", {}).get("init_args", {})
        self.speed = {"channels_last": 2.0, "channels_last compile_backend": 4.0}.get(" ".join(sorted(arguments)), 1.0)

    def wait_until_ready(self):
        pass

    def steps(self, count):
        return {"seconds": count / self.speed, "losses": [1.0, 1.0, 1.0]}

    def close(self):
        pass


def test_the_fastest_settings_are_shown_and_written_for_fit(monkeypatch, tmp_path, capsys):
    """What is fastest is compiled, and nothing else."""
    monkeypatch.setattr(contest, "Trial", Pretended)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    output = tmp_path / "tuned.yaml"
    COMMANDS["tune"].run(["--config", QUICKSTART, "--minutes=1", "--output", str(output)])
    shown = capsys.readouterr().out
    for words in ("2.00 [2.00, 2.00]", "all together"):
        assert words in shown
    for kind in ("compute", "compilation", "loading"):
        assert kind in shown, f"{kind} was not tried"
    assert "4.00 times as fast" in output.read_text()
    assert yaml.safe_load(output.read_text()) == {
        "model": {"init_args": {"channels_last": True, "compile_backend": "inductor"}}
    }


def configuration(model: dict[str, object], precision: str = "32-true") -> SimpleNamespace:
    """The part of a configuration that decides what is tried."""
    trainer = SimpleNamespace(precision=precision, benchmark=None)
    return SimpleNamespace(trainer=trainer, model=SimpleNamespace(init_args=model))


@pytest.mark.light
def test_what_changes_learning_is_tried_only_when_it_is_allowed():
    def names(allow, **given):
        return [one.name for group in choices(configuration({}, **given), ImageClassifier, CPU, allow) for one in group]

    assert names([]) == ["channels_last"]
    assert names(["precision"]) == ["channels_last", "bf16"]
    assert names(["precision"], precision="bf16-mixed") == ["channels_last"]


@pytest.mark.light
def test_what_is_on_is_tried_without_and_others_by_callback():
    own = configuration({"channels_last": True, "compile_backend": "inductor"})
    for given, kind, place, values in (
        (own, ImageClassifier, "model.init_args", (False, None)),
        (configuration({}), torch.nn.Module, "ComputeSettings", (True, "inductor")),
    ):
        ((setting,),) = choices(given, kind, CPU, [])
        assert setting.values == {f"{place}.channels_last": values[0]}
        (setting,) = compilers(given, kind)
        assert setting.values == {f"{place}.compile_backend": values[1]}


@pytest.mark.light
def test_loading_is_tried_where_the_data_module_can(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    config = SimpleNamespace(trainer=SimpleNamespace(devices=2), data=Namespace(init_args=Namespace(num_workers=1)))
    assert [one.name for one in loading(config, DigitsDataModule)] == ["0 workers", "2 workers", "4 workers"]
    assert loading(config, object) == []
