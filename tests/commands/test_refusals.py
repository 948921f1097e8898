"""A run that cannot work is refused before it starts, in one line with the key, the value and the remedy."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from cnnstrategies import ConfigurationError, ImageClassifier
from cnnstrategies.cli import main
from cnnstrategies.commands.arguments.checkpoint_path import check_checkpoint
from cnnstrategies.commands.arguments.keys import configured_keys
from cnnstrategies.commands.run.errors import _explain_missing, check_nulls, explain_parse_error
from cnnstrategies.commands.run.image_channels import check_channels
from cnnstrategies.commands.run.trainer import Trainer
from cnnstrategies.networks import SmallCNN
from tests.conftest import ROOT

QUICKSTART = f"--config={ROOT / 'configs/quickstart.yaml'}"
MINE = """
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from lightning.pytorch import LightningModule

def warms_up(optimizer: Optimizer, steps: int = 3) -> LRScheduler:
    pass

def warms_up_untold(optimizer):
    pass

class Lit(LightningModule):
    pass

class Counts(LightningModule):
    def __init__(self):
        super().__init__()
        self.half = 1 / 0

class Wraps(LightningModule):
    def __init__(self, model: nn.Module, head: nn.Module):
        super().__init__()
"""
FILES = {
    "mine.py": MINE,
    "broken.py": "class Lit(:",
    "page.ckpt": "not found",
    "bad.yaml": "trainer: {max_epoch: 3}",
    "listed.yaml": "trainer: {callbacks: [{class_path: EarlyStopping, monitor: val_loss}]}",
    "init_arg.yaml": "data: {class_path: DigitsDataModule, init_arg: {seed: 1}}",
    "scheduler.yaml": "model: {init_args: {lr_scheduler: {class_path: mine.warms_up, init_args: {steps: 2}}}}",
    "strategy.yaml": "trainer.strategy: {class_path: ParameterServerStrategy, init_args: {mode: asink}}",
}
NETWORK = "--model.init_args.network"
COLOURED = "--data=SyntheticDataModule --data.num_classes=10"
# By command line: texts in the error message, first its beginning. "FIT" means fit without quickstart.yaml.
REFUSED = {
    "FIT": [
        "the sections data and model are missing: give --data CLASS and --model CLASS, or a configuration that has "
        "data and model"
    ],
    "fitt": ["unknown command 'fitt'; did you mean 'fit'?"],
    "predict --model=mine.Lit": ["predict: Lit has no forward that maps images to logits: define one, for example"],
    "quantize": ["ckpt_path is missing: give a checkpoint, as in --ckpt_path FILE"],
    "tune --allow=accuracy": ["--allow: 'accuracy' is not accepted; use one of: precision"],
    "quantize --outptu=small.pt2": [
        "unknown key outptu; did you mean 'output'? use one of: ckpt_path, output, calibra"
    ],
    "verify --steps=0": ["steps=0: nothing is trained; use 1 or more"],
    "fit --ckpt_path=page.ckpt": ["ckpt_path: page.ckpt is not a checkpoint: it begins with b'not found'"],
    "quantize --ckpt_path=other.ckpt": ["ckpt_path: other.ckpt does not fit the network of `model`: "],
    "fit --ckpt_path=nowhere.ckpt": ["", "nowhere.ckpt", "best or last or hpc or a path"],
    "fit --model=mine.Litt": ["model: cannot use 'mine.Litt': module 'mine' has no attribute 'Litt'"],
    "fit --model=broken.Lit": ["model: cannot use 'broken.Lit': invalid syntax, in broken.py:1: class Lit(:"],
    "fit --model=mine.Counts": ["ZeroDivisionError: division by zero, in Counts.__init__ (mine.py:"],
    "fit --model=mine.Wraps": ["model: mine.Wraps needs model and head: give --model.model and --model.head"],
    "fit --model=torch.nn.ReLU": ["model: 'torch.nn.ReLU' is a network and not a LightningModule: give --model Image"],
    f"fit {NETWORK}=torchvision.models.resnet18 {NETWORK}.init_args.weights=DEFAULT {COLOURED}": [
        "weights: these weights are for 1000 classes, but num_classes=10: to keep them and replace the last layer, use "
        "class_path: cnnstrategies.pretrained.pretrained with the network's name"
    ],
    "fit --model.init_args.num_classes=7": ["", "num_classes=7", "DigitsDataModule has num_classes=10"],
    "fit --model.init_args.num_classes=${trainer.nope}": ["", "trainer.nope", "does not exist"],
    "fit --model.init_args.label_smoothing=3": ["", "label_smoothing=3.0", "[0, 1)"],
    "fit --model.init_args.optimizer.init_args.lrr=3": ["", "optimizer.init_args.lrr", "did you mean 'lr'", "momentum"],
    "fit --config=scheduler.yaml": [
        "model.init_args.lr_scheduler: mine.warms_up is a function, and class_path is for classes: "
    ],
    'fit --model.init_args.lr_scheduler={"class_path":"mine.warms_up_untold"}': [
        "model.init_args.lr_scheduler: mine.warms_up_untold is a function"
    ],
    "fit --model.init_args.optimizer.init_args.lr=fast": [
        "",
        "optimizer.init_args.lr: 'fast'",
        "must be float or Tens",
    ],
    "fit --trainer.callbacks+=StepProfil": [
        "trainer.callbacks: there is no class 'StepProfil'; did you mean 'StepProfile'? Or "
    ],
    "fit --data=Nope": ["data: there is no class 'Nope'; give an import path"],
    "fit --config=listed.yaml": ["trainer.callbacks.monitor is at the level of class_path: put the arguments"],
    "fit --config=init_arg.yaml": ["unknown key data.init_arg: did you mean 'init_args'?"],
    f"fit --data=CIFAR10DataModule --data.init_args.download=false {NETWORK}.init_args.in_channels=3": [
        "",
        "CIFAR10",
        "datasets",
        "data.init_args.root",
    ],
    "fit --trainer.accelerator=gpu": [  # Here torch is imported; else the check before its import would refuse.
        "No supported gpu backend found: to run on this machine, use --trainer.accelerator=cpu"
    ],
    "fit --trainer.logger=WandbLogger": ["lightning.pytorch.loggers.WandbLogger: a package is missing: pip install '"],
    "fit --trainer.strategy=dpp": ["trainer.strategy: ", "'dpp'", "did you mean 'ddp'"],
    "fit --trainer.callbacks+=EarlyStopping": [
        "trainer.callbacks: EarlyStopping needs monitor: give --trainer.callbacks.monitor"
    ],
    "fit --cluster.kubernetes.imag=cnn": ["unknown key cluster.kubernetes.imag: "],
    "fit --modle=3": ["", "modle", "did you mean 'model'", "data"],
    "fit --config=bad.yaml": ["unknown key trainer.max_epoch: Trainer has no", "'max_epochs'?"],
    "fit --config=strategy.yaml": ["", "mode: 'asink'", "'sync', 'async'"],
}


def test_invalid_runs_are_refused_in_one_line(quick, monkeypatch, capfd):
    for name, text in FILES.items():
        Path(name).write_text(text)
    other = ImageClassifier(SmallCNN(10, widths=[8, 16]), 10)
    torch.save({"state_dict": other.state_dict(), "pytorch-lightning_version": "2.6"}, "other.ckpt")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Trainer, "fit", lambda self, *args, **kwargs: pytest.fail("it was started"))
    one_device = ["--trainer.devices=1", "--trainer.strategy=auto"]
    for words, (start, *parts) in REFUSED.items():
        command, *options = words.split()
        common = [] if command == "FIT" else [*quick, *one_device]
        with pytest.raises(SystemExit) as stopped:
            main([command.lower(), *common, *options])
        output = "".join(capfd.readouterr())
        assert stopped.value.code == 2, words
        assert output.startswith(f"cnnstrategies: error: {start}"), (words, output)
        assert output.count("\n") == 1, words
        assert all(part in output for part in parts), (words, output)


@pytest.mark.light
def test_the_parsers_error_messages_become_one_line():
    missing = "the following arguments are required: in_channels"
    message = "a class in the configuration needs in_channels: add in_channels to its init_args"
    assert explain_parse_error(missing, []) == message
    kind = 'Parser key "trainer.strategy":\n  Expected a dot import path string: parameter_server_frok'
    message = (
        "there is no class 'parameter_server_frok'; did you mean 'parameter_server_fork'? Or give an import path, such"
    )
    assert explain_parse_error(kind, []).startswith(f"trainer.strategy: {message}")


NULLS = {
    "optimizer.init_args.lr": "float or Tensor",
    "label_smoothing": "float",
    "network.init_args.widths": "Sequence[int]",
}
TAKEN = [
    *("model.init_args.lr_scheduler", "trainer.max_epochs", "trainer.logger.init_args.version", "trainer.callbacks"),
    *("checkpoint.monitor", "model.init_args.compile_backend", "data.init_args.batch_size"),
]
RESNET = [f"{NETWORK}=torchvision.models.resnet18", f"{NETWORK}.init_args.weights=null"]


@pytest.mark.light
def test_null_is_refused_where_a_value_is_needed():
    for key, types in NULLS.items():
        message = f"model.init_args.{key}: null is not accepted; use a value of type {types}, or leave the key out"
        with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
            check_nulls(configured_keys([QUICKSTART, f"--model.init_args.{key}=null"]))
    check_nulls(configured_keys([QUICKSTART, *(f"--{key}=null" for key in TAKEN), *RESNET]))


NO_KEYS = "config: run.yaml has no keys: write a configuration as keys and values, as in "
TEXTS = {"trainer:\n  devices: [1\n": "config: run.yaml is not YAML: while parsing ", "": NO_KEYS, "- a": NO_KEYS}


@pytest.mark.light
def test_a_file_without_keys_is_refused():
    for text, line in TEXTS.items():
        Path("run.yaml").write_text(text)
        with pytest.raises(ConfigurationError, match=line):
            configured_keys([QUICKSTART, "--config=run.yaml"])


def test_null_stays_null_for_arguments_of_nested_classes(run_cli, quick):
    """torchvision's builder gets null for its weights, and an option with a text does not get the text "None"."""
    timm = ["--model.init_args.compile_backend=null", "--trainer.logger.init_args.version=null"]
    code, output = run_cli("fit", *quick, *RESNET, *timm, "--print_config")
    assert code == 0, output
    assert "weights: null" in output
    assert "None" not in output


def test_a_folder_is_a_checkpoint_only_with_shards():
    Path("empty").mkdir()
    with pytest.raises(ConfigurationError, match="ckpt_path: 'empty' is a folder; give a file"):
        check_checkpoint("empty")
    Path("empty/.metadata").touch()
    check_checkpoint("empty")


@pytest.mark.light
def test_a_missing_argument_is_asked_of_the_class_that_lacks_it(tmp_path):
    file = tmp_path / "masks.yaml"
    file.write_text(
        "model: {class_path: cnnstrategies.ImageSegmenter, init_args: {num_classes: 2}}\n"
        "data: {class_path: cnnstrategies.data.SegmentationFolderDataModule, init_args: {root: masks}}\n"
    )
    message = _explain_missing(["num_classes"], ["fit", f"--config={file}"])
    assert message == (
        "data: cnnstrategies.data.SegmentationFolderDataModule needs num_classes: give --data.num_classes"
    )


class OwnNetwork(nn.Module):
    """A network that has a number of channels without an argument for it."""

    def __init__(self, first: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(first, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.AdaptiveAvgPool2d(1))
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return self.layers(images if self.layers[0].in_channels != 5 else images.repeat(1, 5, 1, 1)).flatten(1)


@pytest.mark.light
def test_channels_that_a_network_does_not_take_are_refused_without_a_batch():
    network, repeating = OwnNetwork(), OwnNetwork(5)
    state = torch.get_rng_state()
    with pytest.raises(ConfigurationError, match="takes images with 3 channels, but the data's images have 1: change"):
        check_channels(network, (1, 8, 8))
    check_channels(network, (3, 8, 8))
    check_channels(repeating, (1, 8, 8))  # This network repeats the channel.
    network.register_forward_hook(lambda *_: None)
    check_channels(network, (1, 8, 8))
    assert network.calls == 0
    assert torch.get_rng_state().equal(state)
