"""Ranks from the environment variables of launchers. A wrong world size is refused."""

import os
from fnmatch import fnmatch

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer

from cnnstrategies import ConfigurationError
from cnnstrategies.cluster.environment import DoctorPlace, check_world, environment_plugins, find_place, local_rank
from cnnstrategies.cluster.launched_environment import LaunchedEnvironment
from cnnstrategies.cluster.launchers import detected, launcher_named, launchers, process_number, rank_launcher
from cnnstrategies.data import SyntheticDataModule
from tests.conftest import quiet_trainer

SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
}
FOUR = {**SLURM, "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "a",
    "WORLD_SIZE": "2",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
# Variables, devices, nodes, and the error message; None if the numbers are right.
WORLDS: list[tuple[dict[str, str], int, int, str | None]] = [
    (SLURM, 2, 1, r"srun has started 1 process, .* x trainer.devices=2 needs 2: .*--ntasks-per-node=2"),
    (FOUR, 2, 3, "has started 4 processes, but trainer.num_nodes=3 x"),
    (FOUR, 1, 1, "has started 4 processes, but trainer.num_nodes=1 x"),
    (FOUR, 4, 1, "trainer.num_nodes=1, trainer.devices=4: .* in SLURM"),
    (
        TORCHRUN,
        4,
        1,
        "torchrun has started 2 processes, .* start the run with `torchrun --nnodes=1 --nproc-per-node=4`, or",
    ),
    (MPIRUN, 4, 1, "mpirun has started 2 processes, .* needs 4: start the run with `mpirun -n 4 --map-by ppr:4:node`"),
    (SLURM, 1, 1, None),
    (FOUR, 2, 2, None),
    (TORCHRUN, 2, 1, None),
    # Lightning itself starts the configured number of processes, also if an srun that was built with PMI sets PMI_*.
    ({}, 4, 1, None),
    ({"LOCAL_RANK": "1"}, 4, 2, None),
    ({"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "bash", "PMI_RANK": "1", "PMI_SIZE": "2"}, 4, 1, None),
]


@pytest.mark.parametrize("strategy", ["ddp", "parameter_server"])
def test_a_world_of_another_size_is_refused(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, devices, nodes, message in WORLDS:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            options = {"accelerator": "cpu", "devices": devices, "num_nodes": nodes, "logger": False}
            made = Trainer(strategy=strategy, plugins=environment_plugins([]), enable_checkpointing=False, **options)
            if message is None:
                check_world(made)
                continue
            # The first check belongs to the command line, the second works without it.
            for check in (check_world, SyntheticDataModule(global_batch_size=12).check_trainer):
                with pytest.raises(ConfigurationError, match=message):
                    check(made)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"},  # srun -n2
        {"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_NTASKS_PER_NODE": "6"},  # srun -n2 in a job with 6
        {"SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NNODES": "2"},  # srun -N2 -n4
    ],
)
def test_the_number_of_tasks_comes_from_the_step(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM, **variables}.items():
        monkeypatch.setenv(name, value)
    nodes = int(variables.get("SLURM_NNODES", "1"))
    check_world(quiet_trainer("ddp", 2, num_nodes=nodes, plugins=environment_plugins([])))


SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "cnn", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SHELL = {name: SCRIPT[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_NTASKS")}


@pytest.mark.parametrize("variables", [SCRIPT, SHELL, {**SHELL, "SLURM_STEP_ID": "4294967290"}])
def test_without_srun_a_run_starts_its_ranks_itself_on_one_node(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [type(plugin) for plugin in environment_plugins([])] == [LightningEnvironment]
    with pytest.raises(ConfigurationError, match=r"trainer.num_nodes=2, but this SLURM job has .* with srun, with one"):
        environment_plugins([], num_nodes=2)
    assert find_place() is None
    monkeypatch.setenv("NODE_RANK", "0")
    assert [type(plugin) for plugin in environment_plugins([], num_nodes=2)] == [LightningEnvironment]
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert [type(plugin) for plugin in environment_plugins([], num_nodes=2)] == [SLURMEnvironment]
    for name, value in {"SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "n1"}.items():
        monkeypatch.setenv(name, value)
    place = find_place()
    assert place == DoctorPlace(1, 2, 0, place.environment)
    assert place.environment.main_address == "n1"


RANKS = {"rank": "1", "size": "2", "local_rank": "1", "local_size": "2"}  # Rank 1 of two on one machine.
MPIRUNS = (
    ("openmpi", "--map-by ppr:2:node", "-x MASTER_ADDR=<"),
    ("mpich", "-ppn 2", "-genv MASTER_ADDR <"),
)


@pytest.mark.parametrize(("name", "per_machine", "address_option"), MPIRUNS)
def test_ranks_come_from_the_variables_of_mpirun(
    name: str, per_machine: str, address_option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher_named(name)

    def become(**numbers: str) -> LaunchedEnvironment:
        for number, value in {**RANKS, **numbers}.items():
            monkeypatch.setenv(getattr(launcher, f"{number}_variable"), value)
        (environment,) = environment_plugins([])
        assert isinstance(environment, LaunchedEnvironment)
        assert environment.launcher is launcher
        return environment

    made = become()
    assert (made.global_rank(), made.local_rank(), made.node_rank(), made.world_size()) == (1, 1, 0, 2)
    assert (local_rank(), process_number(os.environ)) == (1, 1)
    assert made.main_address == "127.0.0.1"
    made.validate_settings(num_devices=2, num_nodes=1)
    with pytest.raises(ConfigurationError, match=per_machine):  # The ranks of a machine would not be consecutive.
        become(local_rank="0").validate_settings(num_devices=2, num_nodes=1)
    with pytest.raises(ConfigurationError, match=address_option):
        _ = become(local_size="1").main_address
    become(local_rank="0", local_size="1")
    ports = []
    for job in (
        "1472528385",
        "1472528386",
        "1472528385",
    ):  # Open MPI's job number. MPICH has no such number, so the arguments replace it.
        monkeypatch.setenv("PMIX_NAMESPACE", job)
        monkeypatch.setattr("sys.argv", ["cnnstrategies", "fit", f"--config={job}"])
        ports.append(launcher.environment().main_port)
    assert ports[0] == ports[2] != ports[1]
    monkeypatch.setenv("MASTER_ADDR", "alpha")
    monkeypatch.setenv("MASTER_PORT", "29500")
    place = find_place()
    assert place == DoctorPlace(1, 2, 0, place.environment)
    assert (place.environment.main_address, place.environment.main_port) == ("alpha", 29500)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "digits")
    assert rank_launcher(os.environ) is launcher_named("torchrun")


def test_the_innermost_launcher_determines_the_ranks() -> None:
    """The order is Lightning's, except that mpirun comes before SLURM, because mpirun may run in a SLURM job."""
    everything = {**SLURM, **MPIRUN, **TORCHRUN, "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
    everything |= {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    names = ["torchrun", "openmpi", "mpich", "kubernetes", "ray", "slurm", "none"]
    assert [launcher.name for launcher in launchers() if launcher.name in names] == names
    assert [launcher.name for launcher in detected(everything)] == names
    for number, name in enumerate(names):
        inner = [launcher_named(other) for other in names[:number]]
        variables = {
            variable: value
            for variable, value in everything.items()
            if not any(fnmatch(variable, pattern) for launcher in inner for pattern in launcher.variables)
        }
        ranks = rank_launcher(variables)
        # Kubernetes and Ray start nodes, and Lightning starts the ranks of a node.
        expected = {"kubernetes": "slurm", "ray": "slurm", "none": None}.get(name, name)
        assert (None if ranks is None else ranks.name) == expected
