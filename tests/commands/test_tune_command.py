"""``cnnstrategies tune``: the settings that it tries and the file that it writes. Trials are simulated here."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import Namespace
from PIL import Image

from cnnstrategies import ConfigurationError
from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.tune.command import choices, compilers, loading
from cnnstrategies.commands.tune.learning_rate import SKIPPED, steepest
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.models.classifier import ImageClassifier
from cnnstrategies.planning.tune import contest
from tests.conftest import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
CPU = torch.device("cpu")


class Pretended:
    """A simulated trial: channels_last makes it faster, and compiling makes it faster only with channels_last."""

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
    """Compiling is tried with the fastest other settings only."""
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
    """Return the part of a configuration that determines the settings to try."""
    trainer = SimpleNamespace(precision=precision, benchmark=None)
    return SimpleNamespace(trainer=trainer, model=SimpleNamespace(init_args=model))


@pytest.mark.light
def test_settings_that_change_learning_are_tried_only_when_allowed():
    def names(allow, **options):
        return [
            choice.name
            for group in choices(configuration({}, **options), ImageClassifier, CPU, allow)
            for choice in group
        ]

    assert names([]) == ["channels_last"]
    assert names(["precision"]) == ["channels_last", "bf16"]
    assert names(["precision"], precision="bf16-mixed") == ["channels_last"]


@pytest.mark.light
def test_settings_that_are_on_are_tried_without_and_other_modules_use_a_callback():
    switched_on = configuration({"channels_last": True, "compile_backend": "inductor"})
    for config, kind, place, values in (
        (switched_on, ImageClassifier, "model.init_args", (False, None)),
        (configuration({}), torch.nn.Module, "ComputeSettings", (True, "inductor")),
    ):
        ((setting,),) = choices(config, kind, CPU, [])
        assert setting.values == {f"{place}.channels_last": values[0]}
        (setting,) = compilers(config, kind)
        assert setting.values == {f"{place}.compile_backend": values[1]}


@pytest.mark.light
def test_loading_is_tried_if_the_data_module_allows_it(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    config = SimpleNamespace(trainer=SimpleNamespace(devices=2), data=Namespace(init_args=Namespace(num_workers=1)))
    assert [choice.name for choice in loading(config, DigitsDataModule)] == ["0 workers", "2 workers", "4 workers"]
    assert loading(config, object) == []


@pytest.mark.light
def test_the_learning_rate_at_which_the_loss_falls_fastest_is_found():
    rates = np.logspace(-8, 0, 100)
    losses = 2.3 - np.arctan(4 * np.log10(rates / 0.02))  # The curve is steepest at 0.02.
    losses[:SKIPPED] = np.linspace(9, 0, SKIPPED)
    losses[20:40] += 1e-3 * (-1) ** np.arange(20)
    assert rates[steepest(rates, losses)] == pytest.approx(0.02, rel=0.1)
    losses[-4:] = np.inf
    assert rates[steepest(rates, losses)] == pytest.approx(0.02, rel=0.1)
    losses[90:96] += 4  # The loss jumps, and falls again from there, faster than before.
    assert rates[steepest(rates, losses)] == pytest.approx(0.02, rel=0.1)
    for flat in (np.zeros(100), rates, np.full(100, np.nan), losses[:9]):
        with pytest.raises(ConfigurationError, match=r"tune: the loss does not fall in \d+ steps"):
            steepest(rates[: len(flat)], flat)


def test_a_learning_rate_is_suggested_with_its_curve(capsys, tmp_path):
    COMMANDS["tune"].run(["--config", QUICKSTART, "--learning_rate", "--picture", str(tmp_path / "curve.png")])
    words = r"Suggested learning rate: (\S+), found on one device with batches of 64 samples\. Curve: .*curve.png"
    assert 0.01 < float(re.search(words, capsys.readouterr().out)[1]) < 1
    assert Image.open(tmp_path / "curve.png").width > 100
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


def test_several_optimizers_have_no_learning_rate_to_find(monkeypatch):
    optimizers = lambda self: [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]  # noqa: E731
    monkeypatch.setattr(ImageClassifier, "configure_optimizers", optimizers)
    monkeypatch.setattr(ImageClassifier, "automatic_optimization", False)
    with pytest.raises(ConfigurationError, match="learning rate finder only works with single optimizer"):
        COMMANDS["tune"].run(["--config", QUICKSTART, "--learning_rate"])
