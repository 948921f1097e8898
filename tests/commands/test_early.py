"""Misspelt keys and values are refused before torch is imported; what is right, or unclear, passes."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from lightning.pytorch.strategies import StrategyRegistry

from cnnstrategies import ConfigurationError
from cnnstrategies.commands.front import signatures
from cnnstrategies.commands.front.early import STRATEGIES, check

pytestmark = pytest.mark.light

QUICKSTART = f"--config={ROOT / 'configs/quickstart.yaml'}"
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize(
    ("given", "message"),
    {
        "--trainer.max_epoch=3": "key trainer.max_epoch: Trainer has no 'max_epoch'; did you mean 'max_epochs'?",
        "--modle=ImageClassifier": "unknown key modle; did you mean 'model'? accepted: trainer, model, data",
        "--trainer.max_epochs=three": "trainer.max_epochs: 'three' is not accepted; it must be int or null",
        "--trainer.precision=17": "trainer.precision: '17' is not accepted; it must be 64, 32, 16, 'transf",
        "--trainer.strategy=hybird_pipeline": "trainer.strategy: no strategy 'hybird_pipeline'; did you mean 'hybrid",
        "--trainer.accelerator=cup": "trainer.accelerator: no accelerator 'cup'; did you mean 'cpu'?",
        "--data.init_args.global_batchsize=8": "DigitsDataModule has no 'global_batchsize'; did you mean 'global_",
        "--model.init_args.mixup=8": "ImageClassifier has no 'mixup'; did you mean 'mixup_alpha'?",
        "--checkpoint.monitr=val_acc": "unknown key checkpoint.monitr: ModelCheckpoint has no 'monitr'; did you mean",
        "--stop.grace=soon": "stop.grace: 'soon' is not accepted; it must be float",
        "--stop.warning_signal=USR3": "stop.warning_signal: 'USR3' is not accepted; it must be 'USR1' or 'USR2'",
        "--cluster.partitions=gpu": "ClusterOptions has no 'partitions'; did you mean 'partition'?",
    }.items(),
)
def test_a_mistake_is_named_with_the_remedy(given, message):
    with pytest.raises(ConfigurationError) as refusal:
        check(["fit", QUICKSTART, given])
    assert message in str(refusal.value)


def test_a_mistake_in_a_file_is_found_too():
    strategy = {"class_path": "cnnstrategies.strategies.ParameterServerStrategy", "init_args": {"mode": "asink"}}
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    with pytest.raises(ConfigurationError, match="mode: 'asink' is not accepted; it must be 'sync', 'async', 'ssp' or"):
        check(["fit", QUICKSTART, "--config", "run.yaml"])


PLACES = {
    "model: {class_path: ImageClassifier, num_classes: 3}": (
        "run.yaml: model.num_classes stands beside class_path: ImageClassifier; arguments of a class go under "
        "init_args: write model.init_args.num_classes"
    ),
    "trainer: {callbacks: [{class_path: EarlyStopping, monitor: val_loss}]}": (
        "run.yaml: trainer.callbacks.monitor stands beside class_path: EarlyStopping; arguments of a class go under "
        "init_args: write trainer.callbacks.init_args.monitor"
    ),
    "data: {class_path: DigitsDataModule, init_arg: {seed: 1}}": (
        "run.yaml: data.init_arg stands beside class_path: DigitsDataModule; did you mean 'init_args'?"
    ),
    "model: {init_arg: {num_classes: 3}}": "unknown key model.init_arg: did you mean 'init_args'?",
    "model: {num_clases: 3}": "unknown key model.num_clases: ImageClassifier has no 'num_clases'; did you mean",
}


@pytest.mark.parametrize("text", PLACES)
def test_an_argument_at_the_wrong_place_is_told_its_place(text):
    Path("run.yaml").write_text(text)
    with pytest.raises(ConfigurationError) as refusal:
        check(["fit", QUICKSTART, "--config=run.yaml"])
    assert str(refusal.value).startswith(PLACES[text])


def test_arguments_without_a_class_are_those_of_the_class_that_another_file_names():
    Path("run.yaml").write_text("model: {num_classes: 3, network: {widths: [4, 8]}}")
    check(["fit", QUICKSTART, "--config=run.yaml"])


@pytest.mark.parametrize(
    ("key", "types"),
    {
        "model.init_args.optimizer.init_args.lr": "float or Tensor",
        "model.init_args.label_smoothing": "float",
        "model.init_args.network.init_args.widths": "Sequence[int]",
    }.items(),
)
def test_null_is_refused_where_a_value_is_needed(key, types):
    with pytest.raises(ConfigurationError) as refusal:
        check(["fit", QUICKSTART, f"--{key}=null"])
    assert str(refusal.value) == f"{key}: null is not accepted; it must be {types}, or be left out"


def test_a_file_that_is_not_yaml_is_named():
    Path("run.yaml").write_text("trainer:\n  devices: [1\n")
    with pytest.raises(ConfigurationError, match=r"config: run.yaml is not YAML: while parsing .* line 2, column 12"):
        check(["fit", "--config=run.yaml"])


@pytest.mark.parametrize(("text", "what"), {"": "is empty", "# a": "is empty", "- a": "holds a list alone"}.items())
def test_a_file_without_keys_is_named(text, what):
    Path("run.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=f"^config: run.yaml {what}: a configuration has keys, as in "):
        check(["fit", QUICKSTART, "--config=run.yaml"])


@pytest.mark.parametrize(
    "given",
    [
        [f"--config={path}" for path in CONFIGS if path.parent.name == "experiments"],
        ["--trainer.max_epochs=-1", "--trainer.limit_train_batches=0.5", "--trainer.max_epochs=null"],
        ["--model.init_args.lr_scheduler=null", "--trainer.logger.init_args.version=null", "--trainer.callbacks=null"],
        ["--trainer.precision=bf16-mixed", "--trainer.devices=auto", "--trainer.fast_dev_run=3"],
        ["--trainer.max_epochs=${data.init_args.seed}"],
        # Arguments of a class that another one replaces.
        ["--data=ImageFolderDataModule", "--data.init_args.resize=9", "--data=DigitsDataModule"],
        # A class that nobody can know without importing it, and one that takes what it is given.
        ["--model=own.Model", "--model.init_args.colour=blue", "--trainer.strategy=registered_by_own"],
        [
            "--model.init_args.network=torchvision.models.resnet18",
            "--model.init_args.network.init_args.norm_layer=null",
        ],
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_acc", "--print_config"],
    ],
)
def test_what_is_right_or_unclear_passes(given):
    check(["fit", QUICKSTART, *given])


def test_what_is_right_is_seen_without_the_source_of_torch(monkeypatch):
    seen, read = [], signatures.read_module
    monkeypatch.setattr(signatures, "read_module", lambda name: seen.append(name) or read(name))
    check(["fit", QUICKSTART])
    assert "torch.optim.sgd" in seen
    assert not {"torch", "torch.nn.modules.module"} & {*seen}, "a fifth of a second"


def test_every_recipe_passes():
    assert len(CONFIGS) > 40
    for path in CONFIGS:
        check(["fit", f"--config={path}"])


def test_knows_the_strategies_that_are_registered():
    assert sorted(STRATEGIES) == sorted(["auto", *StrategyRegistry.available_strategies()])


def test_torch_is_not_imported_for_a_mistake():
    program = "import sys; from cnnstrategies.cli import main; sys.argv[1:] = ['fit', '--trainer.max_epoch=3']\n"
    program += "try: main()\nfinally: assert not {'torch', 'lightning'} & set(sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
