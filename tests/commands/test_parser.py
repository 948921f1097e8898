"""A user's class that replaces a recipe's class keeps the recipe's arguments that it accepts."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from jsonargparse import Namespace

from cnnstrategies import _jsonargparse_private
from cnnstrategies.commands.run.lightning_cli import CLI
from tests.conftest import ROOT

MINE = """
import torch
from lightning.pytorch import Callback
from torch import nn
from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule


class Mine(ImageClassifier):
    pass


class Counts(ImageClassifier):
    def __init__(self, network: nn.Module, classes: int = 10):
        super().__init__(network, classes)


class Own(Callback):
    def __init__(self, devices=[torch.device("cpu")], types=(torch.float32,), seed=3):
        super().__init__()


class Digits(DigitsDataModule):
    pass
"""


def printed(run_cli, *args):
    Path("mine.py").write_text(MINE)
    return run_cli("fit", "--config=quickstart", *args, "--print_config")


def test_references_and_texts_that_look_like_numbers_stay(run_cli):
    numbers = ["--run_name=1e3", "--trainer.logger.init_args.name=12E-4", "--model.init_args.num_classes=12"]
    code, output = printed(run_cli, "--model=mine.Mine", "--data=mine.Digits", *numbers)
    assert code == 0, output
    config = yaml.safe_load(output)
    model, data = config["model"], config["data"]
    assert (model["class_path"], data["class_path"]) == ("mine.Mine", "mine.Digits")
    assert model["init_args"]["network"]["class_path"] == "cnnstrategies.networks.SmallCNN"
    assert model["init_args"]["network"]["init_args"]["num_classes"] == 12
    assert model["init_args"]["lr_scheduler"]["init_args"]["T_max"] == 20
    assert (model["init_args"]["optimizer"]["init_args"]["lr"], data["init_args"]["global_batch_size"]) == (0.1, 64)
    assert "run_name: '1e3'" in output
    assert "name: '12E-4'" in output
    code, output = printed(run_cli, "--model.init_args.network=torchvision.models.resnet18")
    assert code == 0, output
    network = yaml.safe_load(output)["model"]["init_args"]["network"]["init_args"]
    assert network["num_classes"] == 10
    assert "widths" not in network, "arguments that the other class does not accept are dropped"


def test_a_reference_to_an_argument_that_the_class_lacks_is_named(run_cli):
    code, output = printed(run_cli, "--model=mine.Counts")
    assert code == 2
    key = "model.init_args.network.init_args.num_classes"
    # omegaconf before 2.4 reports only the end of the key.
    message = rf"{key} refers to (model\.init_args\.)?num_classes, which does not exist: give {key} a value"
    assert re.match(f"cnnstrategies: error: {message}", output.splitlines()[-1])


def test_defaults_that_yaml_cannot_hold_are_not_printed(run_cli):
    """LightningCLI itself prints such defaults of callbacks, and cannot read them again."""
    callbacks = ["Timer", "StochasticWeightAveraging", "ModelPruning", "mine.Own"]
    arguments = [{"duration": "00:00:01:00"}, {"swa_lrs": 0.01}, {"pruning_fn": "l1_unstructured"}, {}]
    entries = [{"class_path": entry, "init_args": args} for entry, args in zip(callbacks, arguments, strict=True)]
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": entries}}))
    code, output = printed(run_cli, "--config=run.yaml")
    assert code == 0, output
    timer, swa, pruning, own_callback = (
        entry.get("init_args", {}) for entry in yaml.safe_load(output)["trainer"]["callbacks"]
    )
    assert timer["interval"] == "step"
    assert "device" not in swa
    assert pruning["pruning_fn"] == "l1_unstructured"
    assert own_callback == {"seed": 3}


def test_the_parser_searches_for_each_option_at_most_twice(monkeypatch):
    """Repeated searches took a quarter of the start's time. A second search may follow when options are added."""
    looked, look = Counter(), _jsonargparse_private.find_option

    def noted(parser, dest, exclude):
        looked[parser, dest, exclude] += 1
        return look(parser, dest, exclude)

    monkeypatch.setattr(_jsonargparse_private, "find_option", noted)
    monkeypatch.setattr(sys, "argv", ["", "fit", f"--config={ROOT / 'configs/quickstart.yaml'}", "--print_config"])
    with pytest.raises(SystemExit):
        CLI()
    assert 100 < looked.total() < 2 * len(looked)


@pytest.mark.light
def test_keys_are_found_where_jsonargparse_finds_them():
    made = Namespace(a=Namespace(b=1), d={"e": {"f": 2}}, n=None)
    made["a.keys.items"] = 3
    parse, expected = _jsonargparse_private.parse_key, _jsonargparse_private.split_key
    for key in ("a", "a.b", "a.b.c", "a.keys", "a.keys.items", "d.e", "d.e.f", "n.x", "no.where"):
        assert parse(made, key) == expected(made, key), key
    for key in ("a b", "a..b", ""):
        with pytest.raises(KeyError):
            parse(made, key)
