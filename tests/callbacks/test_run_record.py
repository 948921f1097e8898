"""When a run is started again, its loggers continue the same record, and every line appears once."""

import csv
import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cnnstrategies.runtime.loggers import KEPT, KeptCSVLogger

FEW = ("--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1")
TIME, OF_EACH_START = "samples_per_s", "hp_metric"
SAME = ("--trainer.devices=1", "--trainer.strategy=auto", "--model.init_args.lr_scheduler.init_args.T_max=2")


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install '.[{package}]'")


@pytest.fixture
def fit(run_cli, quick):
    """Return a function that trains a named run for some epochs with these loggers."""

    def run(name, epochs, *loggers):
        Path("loggers.yaml").write_text(yaml.safe_dump({"trainer": {"logger": list(loggers)}}))
        words = (*quick, *SAME, *FEW, "--config=loggers.yaml", f"--run_name={name}", f"--trainer.max_epochs={epochs}")
        code, output = run_cli("fit", *words)
        assert code == 0, output
        return output

    return run


def logger(kind, **arguments):
    return {"class_path": f"lightning.pytorch.loggers.{kind}", "init_args": arguments}


def lines(run):
    with open(f"runs/mine/{run}/metrics.csv") as text:
        return [
            {name: value for name, value in line.items() if value and name != TIME} for line in csv.DictReader(text)
        ]


def test_csv_and_tensorboard_have_what_an_uninterrupted_run_has(fit):
    loggers = [logger(kind, save_dir="runs", name="mine") for kind in ("CSVLogger", "TensorBoardLogger")]
    fit("whole", 2, *loggers)
    fit("parts", 1, *loggers)
    with open("runs/mine/parts/metrics.csv", "a") as text:  # Lines of steps after the checkpoint.
        text.write(",".join("7" for _ in lines("parts")[0].keys() | {"step"}) + "\n7,7")
    fit("parts", 2, *loggers)
    assert lines("parts") == lines("whole")
    scalars = []
    for run in ("whole", "parts"):
        events = EventAccumulator(f"runs/mine/{run}")
        events.Reload()
        tags = [tag for tag in events.Tags()["scalars"] if tag not in (TIME, OF_EACH_START)]
        scalars.append({tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags})
    assert scalars[0] == scalars[1]


@pytest.mark.extra
@needs("wandb")
def test_weights_and_biases_goes_on_in_its_run(fit, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb_logger = logger("WandbLogger", project="mine", offline=True, save_dir=".")
    for epochs in (1, 2):
        fit("digits", epochs, wandb_logger)
    number = json.loads(Path("digits/checkpoints/run.json").read_text())["loggers"]["0"]
    # Offline, each start of a run has its own folder; `wandb sync` joins folders with the same id.
    assert [folder.name.rpartition("-")[2] for folder in Path("wandb").glob("offline-run-*")] == [number] * 2


@pytest.mark.extra
@needs("mlflow")
def test_mlflow_goes_on_in_its_run(fit):
    from mlflow.tracking import MlflowClient

    store = "sqlite:///mlflow.db"
    for epochs in (1, 2):
        fit("digits", epochs, logger("MLFlowLogger", experiment_name="mine", tracking_uri=store))
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.run_name == "digits"
    history = client.get_metric_history(run.info.run_id, "val_loss")
    assert [metric.step for metric in history] == [2, 5]


@pytest.mark.light
@pytest.mark.parametrize("there", ["metrics.csv", KEPT])
def test_lines_are_kept_except_those_to_be_written_again(there):
    """The lines are also kept if the process was killed while it rewrote the file."""
    folder = Path("runs/mine/digits")
    folder.mkdir(parents=True)
    (folder / there).write_text("loss,step\n3.5,0\n2.5,1\n1.5,2\n0.")
    written = KeptCSVLogger("runs", "mine", "digits")
    _ = written.experiment
    assert [(line["loss"], line["step"]) for line in lines("digits")] == [("3.5", "0"), ("2.5", "1"), ("1.5", "2")]
    written.drop_lines_from(2)
    written.log_metrics({"accuracy": 0.5, "loss": 1.25}, step=2)
    written.save()
    assert lines("digits")[1:] == [{"loss": "2.5", "step": "1"}, {"accuracy": "0.5", "loss": "1.25", "step": "2"}]
    assert [file.name for file in folder.iterdir()] == ["metrics.csv"]
