"""A run that a launcher may start again: its name, its folder, and the checkpoint from which it resumes."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint

from cnnstrategies.cluster.run_folder import configuration_hash, find_run, last_checkpoint, place, write_record
from cnnstrategies.commands.run.start_from import checkpoint_of
from cnnstrategies.errors import ConfigurationError

HERE = Path("runs/mine/digits/checkpoints")
pytestmark = pytest.mark.light


def logger(kind, **arguments):
    return Namespace(class_path=f"lightning.pytorch.loggers.{kind}", init_args=Namespace(**arguments))


def config(*loggers, dirpath=None):
    trainer = Namespace(logger=list(loggers) or False, default_root_dir="root", callbacks=None)
    return Namespace(trainer=trainer, checkpoint=Namespace(dirpath=dirpath))


def csv_of(**arguments):
    return logger("CSVLogger", **{"save_dir": "runs", "name": "mine", "version": None, **arguments})


def test_the_checkpoint_folder_is_below_the_first_loggers_folder():
    for configured, folder in [
        (config(csv_of()), "runs/mine/digits/checkpoints"),
        (config(csv_of(version=3)), "runs/mine/version_3/checkpoints"),
        (config(csv_of(), dirpath="elsewhere"), "elsewhere"),
        (config(csv_of(save_dir="s3://bucket")), None),
        (config(), "root/digits/checkpoints"),
        (config(logger("MLFlowLogger", run_id=None, run_name=None)), "root/digits/checkpoints"),
    ]:
        place(configured, "digits")
        assert configured.checkpoint.dirpath == folder


def test_loggers_with_ids_keep_them_when_started_again():
    write_record(HERE, {"run": "digits", "loggers": {"1": "a1", "2": "b2"}})

    def placed(run="digits", **options):
        names = {"run_id": None, "run_name": None}
        wandb = logger("WandbLogger", **{"version": None, "name": None, **options})
        made = config(csv_of(), wandb, logger("MLFlowLogger", **names))
        place(made, run)
        _, wandb, mlflow = made.trainer.logger
        return wandb.init_args.version, wandb.init_args.name, mlflow.init_args.run_id, mlflow.init_args.run_name

    assert placed() == ("a1", "digits", "b2", "digits")
    assert placed(version="own", name="shown") == ("own", "shown", "b2", "digits")
    assert placed("other") == (None, "other", None, "other")


def trainer(folder):
    """Return the needed part of a trainer: a real one asks for CUDA, and then no other test could fork ranks."""
    last = ModelCheckpoint(folder, filename="last", enable_version_counter=False)
    return SimpleNamespace(checkpoint_callbacks=[last], loggers=[], callbacks=[last], fast_dev_run=False)


def write(file, whole=True):
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({}, file)
    if not whole:
        os.truncate(file, 100)


def test_a_run_resumes_from_its_last_whole_checkpoint():
    made = trainer(HERE)
    assert last_checkpoint(made, "digits") is None
    write(HERE / "best.ckpt")
    write(HERE / "last.ckpt")
    assert last_checkpoint(made, "digits") == (HERE / "last.ckpt").resolve()
    write(HERE / "last.ckpt", whole=False)
    assert last_checkpoint(made, "digits") == (HERE / "best.ckpt").resolve()
    write(HERE / "best.ckpt", whole=False)
    assert last_checkpoint(made, "digits") is None


def test_a_run_does_not_resume_from_another_runs_checkpoint():
    """This also holds after a crash before the run's first own checkpoint."""
    made = trainer("saved")
    write(Path("saved/last.ckpt"))
    with pytest.raises(ConfigurationError, match="does not belong to the run digits"):
        last_checkpoint(made, "digits")
    write_record(Path("saved"), {"run": "digits"})
    assert last_checkpoint(made, "digits") == Path("saved/last.ckpt").resolve()
    with pytest.raises(ConfigurationError, match="does not belong to the run other"):
        last_checkpoint(made, "other")


def test_a_started_rank_uses_the_checkpoint_of_the_rank_that_started_it(monkeypatch):
    """The rank may be started again later, when a newer checkpoint exists."""
    write(HERE / "last.ckpt")
    assert checkpoint_of(trainer(HERE), None, True, "digits") == (HERE / "last.ckpt").resolve()
    assert checkpoint_of(trainer(HERE), None, True, None) is None
    checkpoint_of(trainer("saved"), None, True, "digits")
    monkeypatch.setenv("LOCAL_RANK", "0")
    write(Path("saved/last.ckpt"))
    assert checkpoint_of(trainer("saved"), None, True, "digits") is None


UUID = "0b3fa0d2-6f0c-4d5f-9a43-2f3f8a0e9d11"
RAY = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {"job_submission_id": "raysubmit_a1"}})}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
SRUN = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_TASK_PID": "1", "SLURM_JOB_NAME": "cnn"}
SCRIPT = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
UNNAMED = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "3"}
DIGITS = {"TORCHELASTIC_RUN_ID": "digits"}
NAMES = [
    (None, {}, None),
    (None, DIGITS, "torchrun_digits"),
    (None, {"TORCHELASTIC_RUN_ID": "team/a b"}, "torchrun_team-a-b"),
    (None, {"TORCHELASTIC_RUN_ID": "none"}, None),
    (None, {"TORCHELASTIC_RUN_ID": UUID}, f"torchrun_{UUID}"),
    (None, POD | {"HOSTNAME": "resnet-1"}, "kubernetes_resnet"),
    (None, POD | {"HOSTNAME": "resnet-node-0-1"}, "kubernetes_resnet"),
    (None, POD | {"HOSTNAME": "a notebook"}, None),
    (None, RAY, "ray_raysubmit_a1_hash"),
    (None, {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{"}, None),
    (None, SRUN, "slurm_4711_0"),
    (None, SCRIPT, "slurm_4711_hash"),
    (None, SRUN | {"SLURM_PTY_PORT": "1"}, None),
    (None, SRUN | {"SLURM_JOB_NAME": "interactive"}, None),
    # Ids that torchrun invents are not used here, because the next start would have a different id.
    (None, SRUN | {"TORCHELASTIC_RUN_ID": UUID}, "slurm_4711_0"),
    (None, POD | {"HOSTNAME": "resnet-1", "TORCHELASTIC_RUN_ID": "none"}, "kubernetes_resnet"),
    (None, SRUN | DIGITS, "torchrun_digits"),
    (None, SRUN | UNNAMED, "slurm_4711_0"),
    # The user's name has precedence over all others.
    (None, {"CNNSTRATEGIES_RUN_NAME": "mine"} | DIGITS, "mine"),
    ("mine", {"CNNSTRATEGIES_RUN_NAME": "other"} | DIGITS, "mine"),
    ("mine", POD, "mine"),
    ("mine", UNNAMED, "mine"),
]


def test_the_name_stays_when_a_launcher_starts_the_run_again():
    for run_name, environ, run in NAMES:
        assert find_run(run_name, "hash", environ) == run, environ


def test_a_configurations_hash_is_the_same_at_a_restart():
    config = {"model": {"lr": 0.1}, "seed_everything": 1}
    known = configuration_hash(config)
    assert known == configuration_hash(config | {"ckpt_path": "last.ckpt", "run_name": "other"})
    assert known != configuration_hash(config | {"seed_everything": 2})
