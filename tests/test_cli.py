"""The command line: subcommands, composition of configurations, and error messages of one line."""

import csv
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from PIL import Image
from torch import nn

from cnnstrategies import ImageClassifier
from cnnstrategies.cli import main
from cnnstrategies.commands.run.lightning_cli import CLI, SavedConfiguration, leaves_out_classes
from cnnstrategies.strategies.unfreezing import WrapsAgain
from tests.conftest import ROOT
from tests.runner import panels

CHECKPOINTS = Path("runs/quickstart/version_0/checkpoints")


@pytest.mark.cluster  # This test takes long.
def test_fit_validate_test_predict_and_quantize(run_cli, quick):
    """Every other subcommand uses the trained checkpoint; in float64 the number of processes makes no difference."""
    code, output = run_cli("fit", *quick, "--trainer.max_epochs=2")
    assert code == 0, output
    assert panels.rows(output) == panels.rows((ROOT / "docs/get-started.md").read_text())
    other = [
        line for line in output.splitlines() if line.strip() and not re.match(r"  |Training|.*Warning|.*srun", line)
    ]
    assert other == [], "the output is only about the run"
    log_dir = CHECKPOINTS.parent
    assert (log_dir / "config.yaml").exists()
    assert "Training summary" in output
    assert "samples/s" in output
    assert str(CHECKPOINTS / "best.ckpt") in output
    drawn = {str(log_dir / "pictures" / name) for name in ("val_confusion_matrix.png", "val_mistakes.csv")}
    assert drawn <= set(output.split()), "the summary names the pictures"
    last = torch.load(CHECKPOINTS / "last.ckpt", weights_only=True)
    assert last["epoch"] == 1
    model = ImageClassifier.load_from_checkpoint(CHECKPOINTS / "best.ckpt", weights_only=True)
    assert model.network(torch.zeros(2, 1, 8, 8)).shape == (2, 10)

    one_process = ["--trainer.strategy=auto", "--trainer.devices=1"]
    quick = [*quick, "--trainer.precision=64-true"]
    best = f"--ckpt_path={CHECKPOINTS / 'best.ckpt'}"
    rows = {}
    for name, options in (("one", one_process), ("two", [])):
        code, output = run_cli("validate", *quick, *options, best)
        assert code == 0, output
        assert "val_acc" in output
        assert "Validation summary" in output
        assert re.search(r"pictures +(runs\S+)/val_confusion_matrix.png", output)
        code, output = run_cli("predict", *quick, *options, best, f"--predictions.output={name}.csv")
        assert code == 0, output
        with open(f"{name}.csv", newline="") as file:
            rows[name] = list(csv.DictReader(file))
    assert [row["sample"] for row in rows["two"]] == [str(index) for index in range(len(rows["two"]))]
    assert len(rows["two"]) == 359
    for single, double in zip(rows["one"], rows["two"], strict=True):
        assert single["sample"] == double["sample"]
        for name in single.keys() - {"sample", "class"}:
            assert float(single[name]) == pytest.approx(float(double[name]), abs=1e-6)  # The file has six digits.

    code, output = run_cli("test", *quick, *one_process)
    assert code == 2
    assert "test without ckpt_path: network.block1.0.0.weight has random values" in output
    code, output = run_cli("test", *quick, *one_process, best)
    assert code == 0, output
    accuracy = sum(row["class"] == target for row, target in zip(rows["two"], _test_targets(), strict=True)) / 359
    assert float(re.search(r"test_acc\s*│\s*([\d.]+)", output)[1]) == pytest.approx(accuracy, abs=1e-6)
    folder = Path(re.search(r"pictures +(\S+)/test_confusion_matrix.png", output)[1])
    with open(folder / "test_mistakes.csv", newline="") as file:
        mistakes = list(csv.DictReader(file))
    wrong = [row for row, target in zip(rows["two"], _test_targets(), strict=True) if row["class"] != target]
    assert {row["sample"] for row in mistakes} <= {f"image {row['sample']}" for row in wrong}
    assert len(mistakes) == min(len(wrong), 16)
    code, output = run_cli("test", *quick, *one_process, best, "--pictures=false")
    assert code == 0, output
    assert "pictures" not in output

    saved = f"--config={log_dir / 'config.yaml'}"
    code, output = run_cli("quantize", saved, best, "--output=int8.pt2")
    assert code == 0, output
    assert "int8" in output
    assert Path("int8.pt2").is_file()

    code, output = run_cli("export", saved, best, "--format=safetensors")
    assert code == 0, output
    assert "100.00% have the same class" in output
    _model_card_tells_how_the_network_was_trained_and_is_loaded(CHECKPOINTS / "best.ckpt")

    code, output = run_cli("predict", *quick, best, "--predictions.images=nowhere")
    assert (code, len(output.splitlines())) == (2, 1), "before any process starts"
    assert "predictions.images=nowhere: no images found" in output


def _model_card_tells_how_the_network_was_trained_and_is_loaded(best):
    card = Path("exported/README.md").read_text()
    checkpoint = torch.load(best, weights_only=True)
    row = checkpoint["callbacks"]["TrainingSummary"]["history"][checkpoint["epoch"]]
    assert f", val_acc {row['val_acc']:.4g}, " in card
    assert "| Strategy | ddp_fork, 1 x 2 devices, precision 32-true |" in card
    variables: dict[str, torch.nn.Module] = {}
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("'model", "'exported/model"), variables)
    loaded = variables["network"].state_dict()
    assert {f"network.{name}" for name in loaded} == checkpoint["state_dict"].keys()
    for name, value in loaded.items():
        assert torch.equal(value, checkpoint["state_dict"][f"network.{name}"]), name


def _test_targets() -> list[str]:
    from cnnstrategies.data import DigitsDataModule

    data = DigitsDataModule()
    data.setup("test")
    return [str(int(target)) for target in data.test_source.targets]


def test_parts_compose_and_print_config_can_be_read_back(run_cli):
    parts = [
        f"--config={ROOT / 'configs' / part}"
        for part in ("quickstart.yaml", "data/synthetic.yaml", "strategy/single.yaml")
    ]
    override = ["--trainer.max_epochs=7", "--model.init_args.num_classes=1000"]
    code, output = run_cli("fit", *parts, *override, "--print_config")
    assert code == 0, output
    config = yaml.safe_load(output)
    assert config["data"]["class_path"] == "cnnstrategies.data.SyntheticDataModule"
    assert config["trainer"]["devices"] == 1
    assert config["trainer"]["enable_model_summary"] is False, "the start panel replaces it"
    # Interpolations use the overridden value, although they are in another file than the value.
    assert config["model"]["init_args"]["lr_scheduler"]["init_args"]["T_max"] == 7
    assert config["model"]["init_args"]["network"]["init_args"]["num_classes"] == 1000
    Path("printed.yaml").write_text(output)
    code, again = run_cli("fit", "--config=printed.yaml", "--print_config")
    assert code == 0
    assert yaml.safe_load(again) == config


@pytest.mark.light
def test_other_commands_keep_the_configuration_of_a_run():
    strategy = SimpleNamespace(broadcast=lambda value: value)
    trainer = SimpleNamespace(log_dir="run", strategy=strategy, is_global_zero=True)
    for stage, saved in (("validate", "validate"), ("fit", "fit"), ("test", "fit"), ("fit", "fit")):
        parser = SimpleNamespace(save=lambda config, path, **_: Path(path).write_text(config["of"]))
        SavedConfiguration(parser, {"of": stage}, overwrite=True).setup(trainer, None, stage)
        assert Path("run/config.yaml").read_text() == saved


# The check before the imports does not know how many processes of a named class load data.
DDP = ["--trainer.strategy=lightning.pytorch.strategies.DDPStrategy"]


def test_a_global_batch_that_is_too_small_is_refused_before_processes(monkeypatch, quick, capsys):
    """The refusal parses the configuration only once: parsing takes a tenth of the start's time."""
    parsed, parse = [], LightningCLI.parse_arguments
    monkeypatch.setattr(LightningCLI, "parse_arguments", lambda *args: parsed.append(parse(*args)))
    monkeypatch.setattr(CLI, "fit", lambda self, **kwargs: pytest.fail("it was started"))
    monkeypatch.setattr(
        sys,
        "argv",
        ["cnnstrategies", "fit", *quick, *DDP, "--trainer.devices=3", "--data.init_args.global_batch_size=2"],
    )
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "global_batch_size=2 is less than one sample for each of 3 processes" in capsys.readouterr().err
    assert len(parsed) == 1


MODEL = ["--model=ImageClassifier", "--model.network=cnnstrategies.networks.SmallCNN"]
FOLDER = ["--data=ImageFolderDataModule", "--data.root=images"]
MASKS = ["--model=ImageSegmenter", "--data=SegmentationFolderDataModule"]


@pytest.mark.light
def test_the_number_of_classes_comes_from_the_data():
    Path("given.yaml").write_text("model: {class_path: mine.Model, init_args: {num_classes: 3}}")
    for words in (
        [*MODEL, *FOLDER],
        [*MODEL, "--data=SyntheticDataModule", "--data.num_classes=3"],
        [*MASKS, "--data.num_classes=3"],
    ):
        assert leaves_out_classes(["fit", *words]), words
    for words in (
        [*MODEL, "--data=lightning.pytorch.LightningDataModule"],
        [*MODEL, *FOLDER, "--model.init_args.num_classes=3"],
        [*MODEL, *FOLDER, "--model.num_classes", "3"],
        ["--config=given.yaml", *MODEL, *FOLDER],
        [*MASKS, "--data.num_classes=${model.init_args.num_classes}"],
        ["--model=lightning.pytorch.demos.boring_classes.BoringModel", *FOLDER],
        [*MODEL, *FOLDER, "--print_config"],
    ):
        assert not leaves_out_classes(["fit", *words]), words


class Trained(nn.Sequential):
    """A network with the attribute `pretrained_cfg`, as timm creates it."""

    def __init__(self, pretrained: bool):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
        half = (0.5, 0.5, 0.5)
        self.pretrained_cfg = {"input_size": (3, 20, 20), "crop_pct": 0.8, "mean": half, "std": half}


@pytest.mark.parametrize(("pretrained", "size", "mean"), [("true", 20, 0.5), ("false", 224, 0.485)])
def test_images_are_preprocessed_as_a_pretrained_network_needs_them(monkeypatch, pretrained, size, mean):
    for name in ("cat", "dog"):
        Path("images", name).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(f"images/{name}/0.png")
    seen = []
    monkeypatch.setattr(CLI, "fit", lambda self, **kwargs: seen.append(self.datamodule))
    network = ["--model.network=tests.test_cli.Trained", f"--model.network.init_args.pretrained={pretrained}"]
    words = ["fit", "--trainer.accelerator=cpu", "--trainer.logger=false", *MODEL[:1], *network, *FOLDER]
    monkeypatch.setattr(sys, "argv", ["cnnstrategies", *words])
    main()
    (data,) = seen
    assert data.image_shape == (3, size, size)
    assert data.preprocessing.mean[0] == mean


def test_lightnings_own_ddp_averages_exactly_and_follows_unfreezing(monkeypatch):
    seen = []
    monkeypatch.setattr(CLI, "fit", lambda self, **kwargs: seen.append(self.trainer.strategy))
    options = ["--trainer.strategy=ddp_fork", "--trainer.devices=2", "--trainer.logger=false"]
    monkeypatch.setattr(
        sys, "argv", ["cnnstrategies", "fit", "--config", str(ROOT / "configs/quickstart.yaml"), *options]
    )
    main()
    (strategy,) = seen
    assert isinstance(strategy, WrapsAgain)
    assert strategy.reduce(torch.tensor(3)).is_floating_point()


def test_a_callback_of_the_user_replaces_the_default(run_cli, quick):
    options = ["--trainer.max_epochs=1", "--trainer.devices=1", "--trainer.strategy=auto"]
    options += ["--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1"]
    mine = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.filename=mine"]
    code, output = run_cli("fit", *quick, *options, *mine)
    assert code == 0, output
    assert [path.name for path in CHECKPOINTS.iterdir()] == ["mine.ckpt"]


OWN_LOADERS = """
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 4)), 4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""


WITHOUT_ARGUMENTS = """
from torch import nn
from cnnstrategies import ImageClassifier

class Whole(ImageClassifier):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10)
"""


def test_a_classifier_of_the_user_may_have_no_arguments(run_cli, quick):
    Path("mine.py").write_text(WITHOUT_ARGUMENTS)
    options = ["--trainer.devices=1", "--trainer.strategy=auto", "--trainer.fast_dev_run=true"]
    code, output = run_cli("fit", *quick, *options, "--model=mine.Whole")
    assert code == 0, output


def test_a_module_with_its_own_loaders_needs_no_data(run_cli):
    Path("mine.py").write_text(OWN_LOADERS)
    words = ["--model=mine.Lit", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.fast_dev_run=true"]
    code, output = run_cli("fit", *words)
    assert code == 0, output
    for command in ("validate", "plan", "verify"):  # The module has no loaders for these commands.
        code, output = run_cli(command, *words[:3])
        assert (code, "error: the section data is missing: give --data CLASS" in output) == (2, True), output
