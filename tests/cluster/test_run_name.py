"""What a run is called, by what is given and by what launchers say of it."""

import json

import pytest

from cnnstrategies.cluster.run_name import Run, configuration_hash, find_run, variables
from cnnstrategies.errors import ConfigurationError

pytestmark = pytest.mark.light

UUID = "0b3fa0d2-6f0c-4d5f-9a43-2f3f8a0e9d11"
RAY = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {"job_submission_id": "raysubmit_a1"}})}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
SRUN = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_TASK_PID": "1", "SLURM_JOB_NAME": "cnn"}
SCRIPT = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}


@pytest.mark.parametrize(
    ("environ", "run"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "digits", "TORCHELASTIC_RESTART_COUNT": "2"}, Run("torchrun_digits", 2)),
        ({"TORCHELASTIC_RUN_ID": "team/a b"}, Run("torchrun_team-a-b")),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"TORCHELASTIC_RUN_ID": UUID}, Run(f"torchrun_{UUID}")),
        (POD | {"HOSTNAME": "resnet-1"}, Run("kubernetes_resnet", None)),
        (POD | {"HOSTNAME": "resnet-node-0-1"}, Run("kubernetes_resnet", None)),
        (POD | {"HOSTNAME": "a notebook"}, None),
        (RAY, Run("ray_raysubmit_a1_hash")),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{"}, None),
        (SRUN | {"SLURM_RESTART_COUNT": "1"}, Run("slurm_4711_0", 1)),
        (SCRIPT, Run("slurm_4711_hash")),
        (SRUN | {"SLURM_PTY_PORT": "1"}, None),
        (SRUN | {"SLURM_JOB_NAME": "interactive"}, None),
        # What torchrun has made up is gone with it: whoever starts it again has another name for the run.
        (SRUN | {"TORCHELASTIC_RUN_ID": UUID, "TORCHELASTIC_RESTART_COUNT": "1"}, Run("slurm_4711_0", 1)),
        (POD | {"HOSTNAME": "resnet-1", "TORCHELASTIC_RUN_ID": "none"}, Run("kubernetes_resnet", None)),
        (SRUN | {"TORCHELASTIC_RUN_ID": "digits"}, Run("torchrun_digits")),
        (SRUN | {"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "2"},
         Run("torchrun_a", 3)),
        (variables("mine", starts=1) | {"TORCHELASTIC_RUN_ID": "digits"}, Run("mine", 1)),
    ],
)  # fmt: skip
def test_the_name_stays_when_a_launcher_starts_the_run_again(environ, run):
    assert find_run(None, "hash", environ) == run


def test_a_given_name_goes_before_all_and_launchers_still_count():
    environ = variables("other") | {"TORCHELASTIC_RUN_ID": "digits", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert find_run("mine", "hash", environ) == Run("mine", 1)
    assert find_run("mine", "hash", POD) == Run("mine", None)


def test_restarts_by_torchrun_need_a_name():
    environ = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "3"}
    with pytest.raises(ConfigurationError, match="--run_name <name>"):
        find_run(None, "hash", environ)
    assert find_run("mine", "hash", environ) == Run("mine")
    assert find_run(None, "hash", environ | SRUN) == Run("slurm_4711_0")


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a b", "version_3", "x" * 121])
def test_what_cannot_be_a_folder_of_its_own_is_refused(name):
    for given, environ in ((name, {}), (None, {"CNNSTRATEGIES_RUN_NAME": name})):
        with pytest.raises(ConfigurationError, match=r"(run_name|CNNSTRATEGIES_RUN_NAME)="):
            find_run(given, "hash", environ)


def test_a_configurations_hash_is_the_same_at_a_restart():
    config = {"model": {"lr": 0.1}, "seed_everything": 1}
    known = configuration_hash(config)
    assert known == configuration_hash(config | {"ckpt_path": "last.ckpt", "fresh": True})
    assert known != configuration_hash(config | {"seed_everything": 2})
