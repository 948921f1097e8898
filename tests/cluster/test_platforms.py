"""Platforms that set only some of the variables that Lightning needs: their processes join the run, or are refused."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer

from cnnstrategies import ConfigurationError
from cnnstrategies.cluster import claimed_processes
from cnnstrategies.cluster.claimed_processes import check_processes
from cnnstrategies.cluster.environment import environment_plugins, find_place
from cnnstrategies.cluster.launched_environment import LaunchedEnvironment
from cnnstrategies.cluster.launchers import CHECKED, adopt, launcher_named, launchers, rank_launcher, sagemaker
from tests.cluster.processes_of import PYTHON, Program, fit
from tests.runner.ports import free_port

MAIN = {"MASTER_ADDR": "alpha", "MASTER_PORT": "23456"}
POOLS = {"workerpool0": ["first:2222"], "workerpool1": ["second:2222", "third:2222"], "workerpool2": ["reducer:2222"]}
SECOND_WORKER = json.dumps({"cluster": POOLS, "task": {"type": "workerpool1", "index": 1}, "environment": "cloud"})
# Platforms with one process on each node: their variables, and the variables that replace them.
NODES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "PyTorchJob": ({"RANK": "1", "WORLD_SIZE": "4", **MAIN}, {"NODE_RANK": "1", "NNODES": "4", **MAIN}),
    # Newer versions of Kubeflow count processes by WORLD_SIZE, but nodes by RANK.
    "PyTorchJob with nprocPerNode": (
        {"RANK": "1", "WORLD_SIZE": "8", **MAIN, "PET_NNODES": "2", "PET_NODE_RANK": "1"},
        {"NODE_RANK": "1", "NNODES": "2", **MAIN},
    ),
    "TrainJob": (
        {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "alpha", "PET_MASTER_PORT": "29400"},
        {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "alpha", "MASTER_PORT": "29400"},
    ),
    "SageMaker": (
        {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"},
        {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "algo-1", "MASTER_PORT": "7777"},
    ),
    "Vertex AI": (
        {"CLUSTER_SPEC": SECOND_WORKER, "TF_CONFIG": SECOND_WORKER},
        {"NODE_RANK": "2", "NNODES": "3", "MASTER_ADDR": "first", "MASTER_PORT": "2222"},
    ),
}
# Programs that start ranks: name of the launcher, the variables of rank 5 of 8 on the second of two nodes, and the
# address that the ranks find; None if it has to be set. {} stands for a file with names of hosts.
RANKS: dict[str, tuple[dict[str, str], str | None]] = {
    "processes": ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "1", **MAIN}, "alpha"),
    "azureml": (
        {
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000",
        },
        "10.0.0.4",
    ),
    "lsf": (
        {
            "JSM_NAMESPACE_RANK": "5",
            "JSM_NAMESPACE_SIZE": "8",
            "JSM_NAMESPACE_LOCAL_RANK": "1",
            "JSM_NAMESPACE_LOCAL_SIZE": "4",
            "LSB_DJOB_RANKFILE": "{}",
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        },
        "beta",
    ),
    "flux": (
        {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"},
        None,
    ),
    "pbs": (
        {
            "PALS_RANKID": "5",
            "PMI_RANK": "5",
            "PMI_SIZE": "8",
            "PALS_LOCAL_RANKID": "1",
            "PMI_LOCAL_SIZE": "4",
            "PBS_NODEFILE": "{}",
            "PBS_NODENUM": "1",
            "PBS_JOBID": "7",
        },
        "alpha",
    ),
}
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
REFUSED: list[tuple[dict[str, str], str]] = [
    ({"RANK": "1"}, "RANK=1 says .* but WORLD_SIZE is not set: set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT"),
    ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 says .* but RANK is not set: set NNODES"),
    (
        {"RANK": "0", "WORLD_SIZE": "4"},
        "RANK=0 and WORLD_SIZE=4: this process is node 0 of 4.* set MASTER_ADDR on each",
    ),
    ({"RANK": "0", "WORLD_SIZE": "4", **MAIN}, "RANK=0 and WORLD_SIZE=4: .* trainer.num_nodes=1: set .* to 4 and"),
    ({"RANK": "one", "WORLD_SIZE": "4", **MAIN}, "RANK='one' is not a number"),
    ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MAIN}, "RANK=5, .* set LOCAL_WORLD_SIZE for each rank"),
    ({"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "alpha:29400"}, "PET_NNODES=1:4 .*: start `torchrun -m cnnstrategies"),
    (NODES["SageMaker"][0], "SM_HOSTS=.* trainer.num_nodes=1: set trainer.num_nodes to 2"),
    ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS=algo-1 is not JSON"),
    ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-2"}, "does not contain this host, 'algo-2'"),
    (NODES["Vertex AI"][0], "CLUSTER_SPEC with 3 replicas: .* trainer.num_nodes=1: set trainer.num_nodes to 3"),
    ({"CLUSTER_SPEC": "[]"}, "CLUSTER_SPEC is not a description of a cluster"),
    (
        {"CLUSTER_SPEC": json.dumps({"cluster": POOLS, "task": {"type": "workerpool2", "index": 0}})},
        "replica 0 of workerpool2, but only the replicas of workerpool0 and workerpool1 can train",
    ),
    ({"TF_CONFIG": SECOND_WORKER}, "TF_CONFIG says that there are 4 processes.* create a job for PyTorch"),
    ({"NODE_RANK": "1"}, "NODE_RANK=1: .* trainer.num_nodes=1: set trainer.num_nodes to the number of nodes"),
    ({"NODE_RANK": "0", "NNODES": "2"}, "NODE_RANK=0 and NNODES=2: .* set trainer.num_nodes to 2"),
    ({"PBS_JOBID": "7", "PBS_NODENUM": "1", "PBS_TASKNUM": "40000001"}, "pbsdsh .*: start the run with mpiexec or"),
    ({"PBS_JOBID": "7", "PBS_NODENUM": "0", "PBS_TASKNUM": "20000001"}, "pbsdsh .*: start the run with mpiexec or"),
    ({"LSB_JOBID": "7", "LSF_PM_TASKID": "2"}, "LSF_PM_TASKID=2 .* blaunch .*: start the run with jsrun, mpirun or"),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK=0 and PMI_SIZE=2 .* with the mpirun of Open MPI or MPICH"),
    ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_RANK=1 and .* MPI_LOCALRANKID"),
    (RANKS["flux"][0], "FLUX_TASK_RANK=5 and FLUX_JOB_SIZE=8: flux run has .*environment_plugins.* start the script"),
    ({**RANKS["flux"][0], "FLUX_JOB_SIZE": "x"}, "FLUX_JOB_SIZE='x' is not a number"),
]
# One process is right here: in the script of a job, for a job with one process, and for processes that a rank started.
ALONE: list[dict[str, str]] = [
    {},
    {"RANK": "0", "WORLD_SIZE": "1", **MAIN},
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NAME": "cnn"},
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash", "PMI_RANK": "0", "PMI_SIZE": "2"},
    {"PBS_JOBID": "7", "PBS_NODENUM": "0", "PBS_TASKNUM": "1", "PBS_ENVIRONMENT": "PBS_BATCH"},
    {"PBS_JOBID": "7", "PBS_NODENUM": "0", "PBS_TASKNUM": "146"},  # In the script of a job of Torque.
    {"LSB_JOBID": "7", "LSB_HOSTS": "alpha beta", "LSB_DJOB_NUMPROC": "2"},
    {"LSB_JOBID": "7", "LSF_PM_TASKID": "1"},
    {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
    {"CLUSTER_SPEC": json.dumps({"cluster": {"workerpool0": ["first:2222"]}, "task": {"type": "workerpool0"}})},
    {"TF_CONFIG": "{}"},
    {"AZUREML_NODE_COUNT": "2"},
    {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_NNODES": "1"},
    {"NODE_RANK": "0"},
    {"NODE_RANK": "1", "NNODES": "4", **MAIN, CHECKED: "1"},
    {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "1", **MAIN, CHECKED: "1 processes"},
]


@pytest.mark.light
def test_the_process_of_a_node_gets_the_variables_of_lightning() -> None:
    for platform, (variables, expected) in NODES.items():
        environ = dict(variables)
        assert adopt(environ) is not None, platform
        assert {name: environ.get(name) for name in expected} == expected, platform
        # The ranks that Lightning starts would believe these variables, which count nodes.
        assert not environ.keys() & {"RANK", "WORLD_SIZE"}, platform
        assert adopt(environ) is None, "the variables are adopted once"
        # torchrun, mpirun and srun number the ranks. Scripts often copy the numbers of srun to RANK and WORLD_SIZE.
        for inner in ({"TORCHELASTIC_RUN_ID": "a", "LOCAL_RANK": "0"}, RANKS["azureml"][0], STEP):
            environ = {**variables, **inner}
            assert adopt(environ) is None, platform
            assert environ == {**variables, **inner}, platform


@pytest.mark.light
def test_a_container_without_sagemakers_toolkit_reads_the_hosts_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sagemaker, "RESOURCES", tmp_path / "resourceconfig.json")
    content = {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"}
    (tmp_path / "resourceconfig.json").write_text(json.dumps(content))
    environ = {"TRAINING_JOB_NAME": "cnn"}
    adopt(environ)
    assert (environ["NODE_RANK"], environ["NNODES"], environ["MASTER_ADDR"]) == ("0", "2", "algo-1")


def become(variables: Mapping[str, str], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Set environment variables, with the path of a file with names of hosts for `{}`."""
    (folder / "hosts").write_text("alpha\nbeta\nbeta\n")
    for name, value in variables.items():
        patch.setenv(name, str(folder / "hosts") if value == "{}" else value)


def test_ranks_come_from_the_variables_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (variables, address) in RANKS.items():
        with monkeypatch.context() as patch:
            become(variables, tmp_path, patch)
            (environment,) = environment_plugins([])
            assert isinstance(environment, LaunchedEnvironment)
            assert environment.launcher is launcher_named(name) is rank_launcher(os.environ)
            ranks = (environment.global_rank(), environment.local_rank(), environment.node_rank())
            assert (*ranks, environment.world_size()) == (5, 1, 1, 8)
            environment.validate_settings(num_devices=4, num_nodes=2)
            if name not in ("processes", "flux"):  # Azure ML may not say how many ranks a node has.
                place = find_place()
                assert place is not None
                assert (place.node, place.nodes, place.local_rank) == (1, 2, 1)
            with pytest.raises(ConfigurationError, match="need 8 consecutive ranks on each machine"):
                environment.validate_settings(num_devices=8, num_nodes=1)
            check_processes(environment, nodes=2, devices=4)
            inherited = {**os.environ, CHECKED: os.environ[CHECKED].replace(str(os.getpid()), "1")}
            adopt(inherited)
            assert name != "processes" or not inherited.keys() & variables.keys()
            started = {**inherited, "LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}
            started[CHECKED] = inherited[CHECKED].replace(str(os.getpid()), "1")
            kept = dict(started)
            adopt(started)
            assert name != "processes" or started == kept, "Lightning has started this rank in the inherited process"
            if address is None:
                with pytest.raises(ConfigurationError, match=r"flux run has started .* MASTER_ADDR=\$\(flux hostlist"):
                    _ = environment.main_address
            else:
                assert environment.main_address == address


def test_a_process_joins_or_is_refused_and_never_trains_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, message in REFUSED:
        with monkeypatch.context() as patch:
            patch.setattr(claimed_processes, "_source", None)
            become(variables, tmp_path, patch)
            with pytest.raises(ConfigurationError, match=message):
                check_processes(LightningEnvironment(), nodes=1, devices=1)
        for name in ("NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT"):  # The adoption may have set them.
            monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("strategy", ["ddp_balanced", "ddp_fp16", "hybrid_pipeline", "parameter_server"])
def test_a_script_is_refused_before_it_starts_processes(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NODES["PyTorchJob"][0].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"RANK=1 and WORLD_SIZE=4: .* set trainer.num_nodes to 4"):
        Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)


def test_a_run_that_has_only_one_process_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in ALONE:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            for environment in (LightningEnvironment(), None):
                check_processes(environment, nodes=1, devices=1)
            assert "RANK" not in os.environ
            # The ranks that Lightning starts have these variables. They are not the ranks of the platform.
            patch.setenv("LOCAL_RANK", "1")
            patch.setenv("WORLD_SIZE", "2")
            check_processes(LightningEnvironment(), nodes=1, devices=2)
        monkeypatch.delenv(CHECKED, raising=False)


def test_doctor_finds_the_node_of_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, (variables, expected) in NODES.items():
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            place = find_place()
            assert place is not None
            nodes = (expected["NODE_RANK"], expected["NNODES"])
            assert (str(place.node), str(place.nodes), place.local_rank) == (*nodes, 0), platform
        for name in expected:
            monkeypatch.delenv(name, raising=False)


@pytest.mark.light
def test_every_launcher_reads_any_environment() -> None:
    """Detection must not fail for variables that other programs set for purposes of their own."""
    for variables in ALONE:
        for launcher in launchers():
            launcher.detect(variables)
            launcher.starts_ranks(variables)
            assert launcher.refusal(variables) is None or CHECKED in variables


@pytest.mark.warm
def test_two_processes_with_rank_and_world_size_train_one_model(tmp_path: Path) -> None:
    few = ("--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1")
    few = (*few, "--pictures=false")  # To draw them would take longer than the training.
    words = [PYTHON, *fit("--trainer.devices=1", "--trainer.num_nodes=2", *few)]
    main = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    programs = [Program(words, tmp_path / f"log{rank}", RANK=str(rank), **main) for rank in range(2)]
    for program in programs:
        assert program.wait() == 0, program.output()
    assert "2 CPU processes on 2 nodes" in programs[0].output()
    assert "over 2 processes" in programs[0].output()
    assert len(list(tmp_path.glob("**/last.ckpt"))) == 1
