"""The real mpirun, on this machine and on two hosts over SSH."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from cluster.processes_of import PYTHON, Program, environment, fit
from cluster.two_hosts import NO_SSHD, SSHD, missing, start_sshd, two_hosts

from cnnstrategies.cluster.openmpi import OpenMPIEnvironment
from cnnstrategies.errors import ConfigurationError

NO_MPI = "mpirun is not installed (Debian: apt-get install openmpi-bin)"
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason=NO_MPI)

# Containers often forbid the system call by which it reads another process's memory.
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl_vader_single_copy_mechanism", "none")
RANKS = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of rank 1 of two on one machine."""
    for name, value in RANKS.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", "1472528385")
    return RANKS


@pytest.mark.cluster
@needs_mpi
@pytest.mark.parametrize("strategy", ["hybrid_pipeline", "parameter_server"])  # ddp: on two hosts, below
def test_two_ranks_train_one_model(tmp_path: Path, strategy: str) -> None:
    few = ("--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1")
    arguments = fit(f"--trainer.strategy={strategy}", "--trainer.max_epochs=2", *few)
    mpirun = Program([*MPIRUN, "-n", "2", PYTHON, *arguments], tmp_path / "log")
    assert mpirun.wait() == 0, mpirun.output()
    assert mpirun.output().count(" over 2 processes") == 1, mpirun.output()
    assert os.listdir(tmp_path / "runs/quickstart") == ["version_0"]
    checkpoint = torch.load(tmp_path / "runs/quickstart/version_0/checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == 1


@pytest.mark.cluster
@needs_mpi
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.skipif(SSHD is None, reason=NO_SSHD)
def test_two_ranks_on_two_hosts_started_over_ssh_train_one_model(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        program, *options = start_sshd(hosts, tmp_path).split()
        words = [
            *(
                *MPIRUN,
                "--host",
                "alpha:1,beta:1",
                "-x",
                "MASTER_ADDR=alpha",
                "-x",
                "PYTHONPATH",
                "-x",
                "OMP_NUM_THREADS",
            ),
            *("--mca", "plm_rsh_agent", program, "--mca", "plm_rsh_args", " ".join(options)),
            *("--mca", "oob_tcp_if_include", "wire", "--mca", "btl_tcp_if_include", "wire", PYTHON),
            *fit("--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.max_epochs=1"),
        ]
        mpirun = hosts.start(0, lambda: os.execvpe("mpirun", words, environment()))
        assert mpirun.wait() == 0, mpirun.output()
        assert "2 CPU processes on 2 nodes" in mpirun.output()
        assert (tmp_path / "runs/quickstart/version_0/checkpoints/last.ckpt").exists()


@pytest.mark.cluster
@needs_mpi
def test_another_number_of_processes_than_the_trainer_expects_is_refused(tmp_path: Path) -> None:
    mpirun = Program([*MPIRUN, "-n", "1", PYTHON, *fit("--trainer.num_nodes=2")], tmp_path / "log")
    assert mpirun.wait() == 2, mpirun.output()
    assert "mpirun -n 4 --map-by ppr:2:node" in mpirun.output()


def test_ranks_come_from_the_variables_of_mpirun(ranks: dict[str, str]) -> None:
    assert OpenMPIEnvironment.detect()
    environment = OpenMPIEnvironment()
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank()) == (1, 1, 0)
    assert environment.world_size() == 2
    assert environment.main_address == "127.0.0.1"
    environment.validate_settings(num_devices=2, num_nodes=1)


def test_each_mpirun_has_a_port_of_its_own(ranks: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = OpenMPIEnvironment().main_port
    assert OpenMPIEnvironment().main_port == first
    monkeypatch.setenv("PMIX_NAMESPACE", "1472528386")
    assert OpenMPIEnvironment().main_port != first
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert OpenMPIEnvironment().main_port == 29500


def test_ranks_not_numbered_machine_by_machine_are_refused(
    ranks: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    with pytest.raises(ConfigurationError, match="--map-by ppr:2:node"):
        OpenMPIEnvironment().validate_settings(num_devices=2, num_nodes=1)


def test_under_torchrun_its_own_variables_count(ranks: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "digits")
    assert not OpenMPIEnvironment.detect()
