"""Likely mistakes are reported in one line before torch is imported, and what is right is not refused."""

import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
from PIL import Image

from cnnstrategies import ConfigurationError, data
from cnnstrategies.commands.arguments import early_checks, recipes
from cnnstrategies.commands.arguments.command import Configuration
from cnnstrategies.commands.arguments.definitions import AbsentError, UnknownError, definition_of, parameters_in
from cnnstrategies.commands.arguments.early_checks import check_accelerator, check_early
from cnnstrategies.commands.arguments.early_values import DATA, PRECISIONS
from cnnstrategies.commands.arguments.keys import HOMES, configured_keys
from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.run.errors import explain_parse_error, parameters_of
from cnnstrategies.commands.run.imports import check_imports
from tests.conftest import ROOT

NETWORK = "--model.init_args.network"
FOLDER = "--data ImageFolderDataModule --data.init_args.root"
FILES = {
    "tabs.yaml": "trainer:\n\tmax_epochs: 3\n",
    "indented.yaml": "trainer:\n  max_epochs: 3\n   devices: 1\n",
    "twice.yaml": "trainer:\n  max_epochs: 3\ndata: {class_path: DigitsDataModule}\ntrainer:\n  devices: 1\n",
    "no_class.yaml": "model:\n  init_args:\n    num_classes: 10\n",
    "optimizer.yaml": "model: {init_args: {optimizer: {class_path: torch.optim.SDG, init_args: {lr: 0.1}}}}",
    "callbacks.yaml": "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitr: val_loss}}]}",
    "syntax.py": "import torch\nclass Lit(torch.nn.Module)\n    pass\n",
    "needs.py": "import math, json.decoder\nimport torchvison.models as models\nclass Lit:\n    pass\n",
    "nested.yaml": "fit:\n  trainer:\n    max_epochs: 3\n",
    "mine.py": "from lightning.pytorch import LightningModule\nclass Lit(LightningModule):\n    pass\n",
}
# By words that are added to `fit --config quickstart`: the error message, or its beginning.
MISTAKES = {
    f"{NETWORK}.init_args.in_channels 3": (
        "the network takes images with 3 channels, but DigitsDataModule's images have 1: set "
        "model.init_args.network.init_args.in_channels=1, or change data"
    ),
    f"{FOLDER} . --model.network.in_channels 4": "the network takes images with 4 channels, but ImageFolder",
    f"{FOLDER} .": "the network takes images with 1 channels, but ImageFolderDataModule's images have 3: set model.",
    f"{NETWORK} torchvision.models.resnet18": (
        "the network takes images with 3 channels, but DigitsDataModule's images have 1: choose a network for 1 chan"
    ),
    "--trainer.devices two": (
        "trainer.devices: 'two' is not accepted; give a number of devices, such as 2, a list of their indices, such as "
        "[0,1], or auto"
    ),
    "--trainer.devices 0": "trainer.devices: '0' is not accepted; give a number",
    f"{NETWORK} cnnstrategies.networks.SmalCNN": (
        "model.init_args.network: cannot use 'cnnstrategies.networks.SmalCNN': module 'cnnstrategies.networks' has no "
        "attribute 'SmalCNN'; did you mean 'SmallCNN'?"
    ),
    f"{NETWORK} torchvision.models.resnet51": (
        "model.init_args.network: cannot use 'torchvision.models.resnet51': module 'torchvision.models' has no "
        "attribute 'resnet51'; did you mean 'resnet50'?"
    ),
    f"{NETWORK} torchvison.models.resnet50": (
        "model.init_args.network: cannot use 'torchvison.models.resnet50': No module named 'torchvison'; did you mean "
        "'torchvision'? run the command from the directory of the module's file, or install the module"
    ),
    "--data DigitDataModule": "data: there is no class 'DigitDataModule'; did you mean 'DigitsDataModule'? Or give an",
    "--model ImageClasifier": "model: there is no class 'ImageClasifier'; did you mean 'ImageClassifier'? Or give an",
    "--model mine.Litt": "model: cannot use 'mine.Litt': module 'mine' has no attribute 'Litt'; did you mean 'Lit'?",
    "--config optimizer.yaml": (
        "model.init_args.optimizer: cannot use 'torch.optim.SDG': module 'torch.optim' has no attribute 'SDG'; did you "
        "mean 'SGD'?"
    ),
    "--model syntax.Lit": ("model: cannot use 'syntax.Lit': expected ':', in syntax.py:2: class Lit(torch.nn.Module)"),
    f"{NETWORK} needs.Lit": (
        "model.init_args.network: cannot use 'needs.Lit': there is no module 'torchvison': install the package that "
        "contains it; did you mean 'torchvision'?, in needs.py:2: import torchvison.models as models"
    ),
    "--model timm.create_model": (
        "model: 'timm.create_model' is a network and not a LightningModule: give --model ImageClassifier "
        "--model.init_args.network timm.create_model --model.init_args.network.init_args.model_name NAME, or"
    ),
    "--trainer.accelerator mps": "trainer.accelerator: 'mps' is for macOS: to run on this machine, use --trainer.acc",
    "--data.batch_size 32": (
        "data.init_args.batch_size=32 (for each process) and data.init_args.global_batch_size=64 (for all processes) "
        "are both set: set one of them, and the other to null"
    ),
    "--trainer.accumulate_grad_batches 65": (
        "data.init_args.global_batch_size=64 is less than one sample for each of 2 processes x trainer.accumulate_grad_"
        "batches=65 batches: set it to at least 130, or accumulate fewer batches"
    ),
    "--trainer.callbacks+=GradientAccumulationScheduler --trainer.callbacks.scheduling {0:2}": (
        "global_batch_size cannot be used with GradientAccumulationScheduler, which changes the number of samples in"
    ),
    "--config nested.yaml": "unknown key fit: put the keys below fit at the top level; see `cnnstrategies fit --he",
    "--optimizer torch.optim.SGD": "unknown key optimizer; did you mean 'model.init_args.optimizer'?; see `cnn",
    "--config other.yaml": "config: there is no file and no configuration with the name 'other.yaml'; the folder has ",
    "--config taps.yaml": "config: there is no file and no configuration with the name 'taps.yaml'; did you mean 'tabs",
    "--trainer.max_epoch 3": "unknown key trainer.max_epoch: Trainer has no 'max_epoch'; did you mean 'max_epochs'?",
    "--trainer.gpus 2": "unknown key trainer.gpus; did you mean 'trainer.devices'?",
    "--epochs 3": "unknown key epochs; did you mean 'trainer.max_epochs'?; see `cnnstrategies fit --help_full`",
    "--config callbacks.yaml": (
        "unknown key trainer.callbacks.init_args.monitr: EarlyStopping has no 'monitr'; did you mean 'monitor'?"
    ),
    "--model.init_args.optimizer.init_args.learning_rate 0.1": (
        "unknown key model.init_args.optimizer.init_args.learning_rate: torch.optim.SGD has no 'learning_rate'; use one"
    ),
    "--model.init_args.optimizer.init_args.lr fast": (
        "model.init_args.optimizer.init_args.lr: 'fast' is not accepted; it must be float or Tensor"
    ),
    "--trainer.max_epochs many": "trainer.max_epochs: 'many' is not accepted; it must be int or null",
    "--trainer.max_epochs 1.5": "trainer.max_epochs: '1.5' is not accepted; it must be int or null",
    "--trainer.max_epochs [1,2]": "trainer.max_epochs: '[1,2]' is not accepted; it must be int or null",
    "--ckpt_path hpc": "ckpt_path: 'hpc' means the newest file hpc_ckpt_N.ckpt in ",
    "--ckpt_path nowhere.ckpt": "ckpt_path: there is no checkpoint 'nowhere.ckpt'; the folder contains no ",
    "--model.init_args.num_classes 7": (
        "the model has num_classes=7, but DigitsDataModule has num_classes=10: set model.init_args.num_classes=10"
    ),
    f"{NETWORK}.init_args.num_classes 7": (
        "model.init_args.network.init_args.num_classes=7, but the model has num_classes=10: set "
        "model.init_args.network.init_args.num_classes=10, or model.init_args.num_classes=7"
    ),
    f"{FOLDER} nowhere": "no directory ",
    "--trainer.strategy hybrid_pipelin": (
        "trainer.strategy: unknown strategy 'hybrid_pipelin'; did you mean 'hybrid_pipeline'?"
    ),
    "--trainer.accelerator gpus": "trainer.accelerator: unknown accelerator 'gpus'; did you mean 'gpu'?",
    "--trainer.precision fp16": (
        "trainer.precision: 'fp16' is not accepted; use one of: 32-true, bf16-mixed, 16-mixed, 64-true, bf16-true, "
    ),
    "--trainer.strategy hybrid_pipeline --trainer.strategy.replicas [2,2]": (
        "replicas=[2, 2] need 4 devices, but there are 2 devices (trainer.devices x trainer.num_nodes): change trainer."
    ),
    "--config tabs.yaml": "config: tabs.yaml is not YAML: while scanning for the next token found character '\\t' that",
    "--config indented.yaml": "config: indented.yaml is not YAML: mapping values are not allowed here line 3, column ",
    "--config twice.yaml": "config: twice.yaml: the key 'trainer' is in lines 1 and 4: join both",
    "--config quikstart": "config: there is no file and no configuration with the name 'quikstart'; did ",
    "ALONE --config no_class.yaml": (
        "model.class_path is missing: name the class whose arguments are below model.init_args, as in model.class_path:"
    ),
    "ALONE --trainer.max_epochs 3": "the sections data and model are missing: give --data CLASS and --model CLASS, or",
}
PROGRAM = """
import contextlib, io, json, sys
from cnnstrategies.cli import main
for words in json.loads(sys.stdin.read()):
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        try:
            main(words)
        except SystemExit as stop:
            code = stop.code
    print(json.dumps([code, output.getvalue()]))
    assert not {"torch", "lightning", "numpy"} & set(sys.modules), words
"""


def test_likely_mistakes_are_one_line_before_torch_is_imported():
    for name, text in FILES.items():
        Path(name).write_text(text)
    commands = []
    for words in MISTAKES:
        start = ["fit"] if words.startswith("ALONE ") else ["fit", "--config", "quickstart"]
        commands.append([*start, *words.removeprefix("ALONE ").split()])
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert program.returncode == 0, program.stderr
    results = map(json.loads, program.stdout.splitlines())
    for (words, start), (code, output) in zip(MISTAKES.items(), results, strict=True):
        assert code == 2, (words, output)
        assert output.startswith(f"cnnstrategies: error: {start}"), (words, output)
        assert output.count("\n") == 1, (words, output)


OPTIONS = {
    name: [option.name for option in command.options]
    for name, command in COMMANDS.items()
    if command.configuration is Configuration.LIGHTNING
}


def check(*words, command="fit"):
    check_early(command, recipes.with_files(words), OPTIONS[command])


@pytest.mark.light
def test_every_named_configuration_passes():
    for name in recipes.names():
        section = name.partition("/")[0]
        words = [f"--config={name}"] if section in ("quickstart", "experiments") else ["--config=quickstart"]
        if section in ("strategy", "cluster"):
            words += [f"--config={name}", "--trainer.devices=auto"]
        if "folder_" in name or "imagenet" in name:
            words.append("--data.init_args.root=.")
        check(*words)


MINE = """
import functools
import sys
from torch import nn
from cnnstrategies import ImageClassifier
sys.path.append("elsewhere")
from unknown_package import Base

class Counts(ImageClassifier):
    pass

class Passes(ImageClassifier):
    def __init__(self, own: int, **kwargs):
        super().__init__(**kwargs)

class Named(ImageClassifier):
    def __init__(this, network: nn.Module, classes: int):
        ImageClassifier.__init__(this, network, classes)

class Elsewhere(Base):
    pass

Made = functools.partial(Passes, 3)

def builds(classes: int, **options):
    pass
"""
RIGHT = (
    "--trainer.devices 0,1",
    "--trainer.devices 3,",
    "--trainer.devices [0,1]",
    "--trainer.devices -1",
    "--trainer.devices auto",
    "--trainer.devices ${trainer.num_nodes}",
    "--trainer.precision 16",
    "--trainer.max_epochs 1e1",
    "--trainer.max_epochs null",
    "--trainer.limit_train_batches 0.5",
    "--trainer.limit_train_batches ${trainer.max_epochs}",
    "--trainer.fast_dev_run true",
    "--trainer.logger false",
    "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val_loss",
    "--trainer.strategy ddp_find_unused_parameters_true",
    "--trainer.strategy mine.Strategy",
    "--model.init_args.optimizer.init_args.lr 1e-3",
    "--model.lr_interval step",
    "--model mine.Counts --data.seed 3",
    "--model mine.Passes --model.anything 3",
    "--model mine.Elsewhere --model.anything 3",
    "--model mine.Named --model.classes 3",
    "--model mine.Made --model.anything 3",
    "--model mine.Counts --trainer.strategy hybrid_pipelin --data DigitDataModule",  # The module may define them.
    f"{NETWORK} mine.builds {NETWORK}.dict_kwargs.anything 3",
    f"{NETWORK} timm.create_model {NETWORK}.init_args.model_name resnet18 {NETWORK}.dict_kwargs.in_chans 1",
    "--data.help DigitsDataModule",
    "--print_config --trainer.devices=3 --trainer.strategy=hybrid_pipeline --trainer.strategy.replicas=[2,2]",
    "--ckpt_path last",
    "--weights_only true",
    "--trainer.accumulate_grad_batches 32",
    f"{FOLDER} . --model.network.in_channels 3",
    "--trainer.accumulate_grad_batches 64 --trainer.strategy hybrid_pipeline",
    "--data.global_batch_size null --data.batch_size 8 --trainer.accumulate_grad_batches 300",
    "--model paths.Lit",
    "--model optional.Lit",
)
# Modules whose imports may work although the modules are not found yet.
ELSEWHERE = {
    "paths.py": "import sys\nimport mine\nimport found_by_mine\nclass Lit: pass\n",
    "optional.py": "import sys\ntry:\n    import absent\nexcept ImportError:\n    pass\n"
    "from torch import _C, Tensor\nfrom torchvision import io, datasets as sets\nclass Lit: pass\n",
}


@pytest.mark.light
def test_what_the_parser_accepts_or_the_sources_do_not_show_is_not_refused(monkeypatch):
    for name, text in {"mine.py": MINE, **ELSEWHERE}.items():
        Path(name).write_text(text)
    monkeypatch.syspath_prepend(Path.cwd())
    for words in RIGHT:
        check("--config=quickstart", *words.split())
    for name in StrategyRegistry.available_strategies():
        check("--config=quickstart", f"--trainer.strategy={name}")
    Path("hpc_ckpt_3.ckpt").touch()
    check("--config=quickstart", "--ckpt_path=hpc")
    with pytest.raises(ConfigurationError, match=r"there is no checkpoint 'hpc'.*; give best or last or a path"):
        check("--config=quickstart", "--ckpt_path=hpc", command="export")
    with pytest.raises(ConfigurationError, match=r"unknown key model.init_args.numclasses: mine.Counts has no"):
        check("--config=quickstart", "--model=mine.Counts", "--model.init_args.numclasses=3")


@pytest.mark.light
def test_parameters_in_the_sources_are_those_of_the_classes():
    """A key may be refused only if the class has no such parameter. Of most classes the sources show all parameters."""
    seen = hidden = 0
    for home in HOMES:
        module = import_module(home)
        for name, kind in vars(module).items():
            if not isinstance(kind, type) or name.startswith("_") or inspect.isabstract(kind):
                continue
            seen += 1
            try:
                shown = parameters_in(definition_of(f"{home}.{name}")).keys()
            except UnknownError:
                hidden += 1
                continue
            assert {*parameters_of(kind)} <= {*shown}, f"{home}.{name}"
    assert hidden < seen / 4, (hidden, seen)
    trainer = parameters_in(definition_of("lightning.pytorch.Trainer")).keys()
    assert trainer == parameters_of(Trainer).keys()
    with pytest.raises(AbsentError, match=r"module 'torch.optim' has no attribute 'SGDD'"):
        definition_of("torch.optim.SGDD")


@pytest.mark.light
def test_tables_of_values_are_those_of_the_classes():
    annotation = inspect.signature(Trainer).parameters["precision"].annotation
    assert {str(value) for value in literals(annotation)} == {*PRECISIONS}
    for name in ("cat", "dog"):
        Path("images", name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(f"images/{name}/0.png")
    folder = data.ImageFolderDataModule("images")
    for name, (channels, classes) in DATA.items():
        kind = getattr(data, name)
        if classes is not None:
            assert (kind.image_shape[0], kind.num_classes) == (channels, classes)
    assert folder.image_shape[0] == DATA["ImageFolderDataModule"][0]


def literals(annotation):
    inner = get_args(annotation)
    return {annotation} - {type(None)} if not inner else {value for part in inner for value in literals(part)}


@pytest.mark.light
def test_a_key_that_is_twice_in_a_list_is_refused():
    Path("run.yaml").write_text("trainer:\n  callbacks:\n  - class_path: A\n    class_path: B\n")
    with pytest.raises(ConfigurationError, match=re.escape("run.yaml: the key 'class_path' is in lines 3 and 4: join")):
        configured_keys(["--config=run.yaml"])
    Path("other.yaml").write_text("trainer:\n  callbacks:\n  - class_path: A\n  - class_path: B\n")
    assert [key.value for key in configured_keys(["--config=other.yaml"])][-2:] == ["A", "B"]


@pytest.mark.light
def test_a_gpu_is_refused_before_torch_is_asked_only_where_there_is_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")  # The check leaves the question to torch if it is imported.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(early_checks, "_has_driver", lambda: False)
    for accelerator in ("cpu", "auto", "tpu"):
        check_accelerator({"trainer.accelerator": accelerator}, Path.cwd())
    with pytest.raises(ConfigurationError, match=r"'gpu' needs a GPU, and this machine has no driver of a GPU: .*=cpu"):
        check_accelerator({"trainer.accelerator": "gpu"}, Path.cwd())
    Path("nvidiactl").touch()
    check_accelerator({"trainer.accelerator": "gpu"}, Path.cwd())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigurationError, match="'cuda' needs a GPU, and the environment variable CUDA_VISIBLE_DEV"):
        check_accelerator({"trainer.accelerator": "cuda"}, Path.cwd())


@pytest.mark.light
def test_a_module_that_fails_in_its_import_shows_the_users_line(monkeypatch):
    monkeypatch.syspath_prepend(Path.cwd())
    Path("fails.py").write_text("import torch\nimport fails_below\n")
    Path("fails_below.py").write_text("import json\nVALUES = json.loads('[1, 2')\n")
    Path("plain.py").write_text("import torch\nclass Net(torch.nn.Module):\n    pass\n")
    line = r"model: cannot use 'fails.Lit': JSONDecodeError: .*, in fails_below.py:2: VALUES = json.loads\('\[1, 2'\)$"
    with pytest.raises(ConfigurationError, match=line):
        check_imports(configured_keys(["--model=fails.Lit"]))
    check_imports(configured_keys(["--model=absent.Lit", "--data=DigitsDataModule", "--trainer.logger=no.such"]))
    message = 'Parser key "model":\n  Does not validate against any of the Union subtypes\n  Given value: plain.Net'
    assert explain_parse_error(message, []).startswith(
        "model: 'plain.Net' is a network and not a LightningModule: give"
    )
