"""The world is as large as the trainer divides the work for, whatever has started it; else it is refused."""

import pytest
from lightning.pytorch import Trainer

from cnnstrategies import ConfigurationError
from cnnstrategies.cluster.environment import check_world, environment_plugins
from cnnstrategies.data import SyntheticDataModule

SLURM = {
    "SLURM_NTASKS": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
}
FOUR = {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}
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
STRATEGIES = ["ddp", "parameter_server"]


def trainer(strategy, devices, nodes=1):
    options = {"accelerator": "cpu", "devices": devices, "num_nodes": nodes, "logger": False}
    return Trainer(strategy=strategy, plugins=environment_plugins([]), enable_checkpointing=False, **options)


REFUSED = {
    "one task, two devices": (SLURM, 2, 1, r"SLURM has started 1 process, .* x trainer.devices=2 are 2: .*-per-node=2"),
    "four tasks, three nodes": ({**SLURM, **FOUR}, 2, 3, "SLURM has started 4 processes, and trainer.num_nodes=3 x"),
    "four tasks, on other nodes": ({**SLURM, **FOUR}, 4, 1, "trainer.num_nodes=1, trainer.devices=4: .* in SLURM"),
    "torchrun": (
        TORCHRUN,
        4,
        1,
        "torchrun has started 2 processes, .* give it --nnodes=1 --nproc-per-node=4, or change",
    ),
    "mpirun": (MPIRUN, 4, 1, "mpirun has started 2 processes, 2 of them on .*: use `mpirun -n 4 "),
}


@pytest.mark.parametrize(("variables", "devices", "nodes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_world_of_another_size_is_refused(variables, devices, nodes, message, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for strategy in STRATEGIES:
        made = trainer(strategy, devices, nodes)
        with pytest.raises(ConfigurationError, match=message):
            check_world(made)
        with pytest.raises(ConfigurationError, match=message):  # Without the command line, too.
            SyntheticDataModule(global_batch_size=12).check_trainer(made)


RIGHT = {"SLURM": (SLURM, 1, 1), "SLURM, two nodes": ({**SLURM, **FOUR}, 2, 2), "torchrun": (TORCHRUN, 2, 1)}


@pytest.mark.parametrize(("variables", "devices", "nodes"), RIGHT.values(), ids=RIGHT)
def test_a_world_of_this_size_is_not(variables, devices, nodes, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for strategy in STRATEGIES:
        check_world(trainer(strategy, devices, nodes))


def test_two_tasks_that_would_each_train_alone_are_refused(monkeypatch):
    for name, value in {**SLURM, **FOUR}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"SLURM has started 4 processes, and trainer\.num_nodes=1 x"):
        check_world(Trainer(accelerator="cpu", devices=1, logger=False, strategy="auto"))


def test_lightning_starts_as_many_processes_as_it_is_told(monkeypatch):
    check_world(trainer("ddp", 4))
    monkeypatch.setenv("LOCAL_RANK", "1")
    check_world(trainer("ddp", 4, nodes=2))
