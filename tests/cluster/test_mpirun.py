"""The real mpirun, Open MPI's and MPICH's, on this machine and on two hosts over SSH."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from cluster.processes_of import PYTHON, Program, environment, fit
from cluster.two_hosts import NO_SSHD, SSHD, missing, start_sshd, two_hosts

from cnnstrategies.cluster.doctor_host import Place, find_place
from cnnstrategies.cluster.environment import (
    MPICHEnvironment,
    MpirunEnvironment,
    OpenMPIEnvironment,
    environment_plugins,
    local_rank,
)
from cnnstrategies.errors import ConfigurationError

NO_MPI = "mpirun is not installed (Debian: apt-get install openmpi-bin)"
needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason=NO_MPI)

# Containers often forbid the system call by which it reads another process's memory.
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl_vader_single_copy_mechanism", "none")
needs_hosts = pytest.mark.skipif(missing() is not None or SSHD is None, reason=missing() or NO_SSHD)
NO_MPICH = "MPICH's mpiexec.hydra is not installed (pip install '.[mpich]', Debian: apt-get install mpich)"
HYDRA = shutil.which("mpiexec.hydra") or shutil.which("mpiexec.hydra", path=Path(PYTHON).parent)
RANKS = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}  # Rank 1 of two on one machine.


@pytest.mark.cluster
@pytest.mark.extra
@pytest.mark.skipif(HYDRA is None, reason=NO_MPICH)
def test_two_ranks_of_mpich_train_one_model(tmp_path: Path) -> None:
    few = ("--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1")
    arguments = fit("--trainer.strategy=parameter_server", "--trainer.max_epochs=2", *few)
    assert HYDRA is not None
    program = Program([HYDRA, "-n", "2", PYTHON, *arguments], tmp_path / "log")
    assert program.wait() == 0, program.output()
    assert program.output().count(" over 2 processes") == 1, program.output()
    assert os.listdir(tmp_path / "runs/quickstart") == ["version_0"]
    checkpoint = torch.load(tmp_path / "runs/quickstart/version_0/checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == 1


@pytest.mark.cluster
@needs_mpi
@needs_hosts
def test_two_ranks_on_two_hosts_started_over_ssh_train_one_model(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        program, *options = start_sshd(hosts, tmp_path).split()
        words = [
            *(*MPIRUN, "--host", "alpha:1,beta:1"),
            *("-x", "MASTER_ADDR=alpha", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"),
            *("--mca", "plm_rsh_agent", program, "--mca", "plm_rsh_args", " ".join(options)),
            *("--mca", "oob_tcp_if_include", "wire", "--mca", "btl_tcp_if_include", "wire", PYTHON),
            *fit("--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.max_epochs=1"),
        ]
        mpirun = hosts.start(0, lambda: os.execvpe("mpirun", words, environment()))
        assert mpirun.wait() == 0, mpirun.output()
        assert "2 CPU processes on 2 nodes" in mpirun.output()
        assert (tmp_path / "runs/quickstart/version_0/checkpoints/last.ckpt").exists()


@pytest.mark.parametrize(
    ("kind", "per_machine", "pass_on"),
    [
        (OpenMPIEnvironment, "--map-by ppr:2:node", "-x MASTER_ADDR=<"),
        (MPICHEnvironment, "-ppn 2", "-genv MASTER_ADDR <"),
    ],
)
def test_ranks_come_from_the_variables_of_mpirun(
    kind: type[MpirunEnvironment], per_machine: str, pass_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def become(**variables: str) -> None:
        for name, value in {**RANKS, **variables}.items():
            monkeypatch.setenv(getattr(kind, name), value)

    become()
    (environment,) = environment_plugins([])
    assert type(environment) is kind
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank()) == (1, 1, 0)
    assert environment.world_size() == 2
    assert local_rank() == 1
    assert environment.main_address == "127.0.0.1"
    environment.validate_settings(num_devices=2, num_nodes=1)
    become(LOCAL_RANK="0")
    with pytest.raises(ConfigurationError, match=per_machine):  # Else a machine would not have neighbouring ranks.
        kind().validate_settings(num_devices=2, num_nodes=1)
    become(LOCAL_SIZE="1")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigurationError, match=pass_on):
        _ = kind().main_address
    become(LOCAL_RANK="0", LOCAL_SIZE="1")
    monkeypatch.setenv("MASTER_ADDR", "alpha")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert find_place() == Place(node=1, nodes=2, local_rank=0, main_address="alpha", main_port=29500)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "digits")
    assert not kind.detect()


def test_each_mpirun_has_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of Open MPI by its job's number; MPICH has none that ranks on several machines could see."""
    monkeypatch.setenv("PMIX_NAMESPACE", "1472528385")
    for name in ("LOCAL_SIZE", "SIZE"):
        monkeypatch.setenv(getattr(MPICHEnvironment, name), RANKS[name])
    monkeypatch.setattr("sys.argv", ["cnnstrategies", "fit", "--config=a"])
    kinds = (OpenMPIEnvironment, MPICHEnvironment)
    first = [kind().main_port for kind in kinds]
    assert [kind().main_port for kind in kinds] == first
    monkeypatch.setenv("PMIX_NAMESPACE", "1472528386")
    monkeypatch.setattr("sys.argv", ["cnnstrategies", "fit", "--config=b"])
    assert all(kind().main_port != port for kind, port in zip(kinds, first, strict=True))
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert [kind().main_port for kind in kinds] == [29500, 29500]


def test_srun_is_not_taken_for_mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets PMI_RANK and PMI_SIZE too, where it was built with PMI."""
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert environment_plugins([]) == []
