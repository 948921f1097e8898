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
needs_mpich = pytest.mark.skipif(HYDRA is None, reason=NO_MPICH)
RANKS = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
BOTH = pytest.mark.parametrize("ranks", [OpenMPIEnvironment, MPICHEnvironment], indirect=True)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[MpirunEnvironment]:
    """The variables of rank 1 of two on one machine."""
    kind: type[MpirunEnvironment] = getattr(request, "param", OpenMPIEnvironment)
    for name, value in RANKS.items():
        monkeypatch.setenv(getattr(kind, name), value)
    monkeypatch.setenv("PMIX_NAMESPACE", "1472528385")
    return kind


@pytest.mark.cluster
@pytest.mark.parametrize(
    "mpirun",
    [pytest.param(MPIRUN, marks=needs_mpi), pytest.param((HYDRA,), marks=[pytest.mark.extra, needs_mpich])],
    ids=["Open MPI", "MPICH"],
)
def test_two_ranks_train_one_model(tmp_path: Path, mpirun: tuple[str, ...]) -> None:
    """Under a parameter server; ddp: on two hosts, below."""
    few = ("--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1")
    arguments = fit("--trainer.strategy=parameter_server", "--trainer.max_epochs=2", *few)
    program = Program([*mpirun, "-n", "2", PYTHON, *arguments], tmp_path / "log")
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


@BOTH
def test_ranks_come_from_the_variables_of_mpirun(ranks: type[MpirunEnvironment]) -> None:
    (environment,) = environment_plugins([])
    assert type(environment) is ranks
    assert (environment.global_rank(), environment.local_rank(), environment.node_rank()) == (1, 1, 0)
    assert environment.world_size() == 2
    assert local_rank() == 1
    assert environment.main_address == "127.0.0.1"
    environment.validate_settings(num_devices=2, num_nodes=1)


def test_each_mpirun_has_a_port_of_its_own(ranks: type[MpirunEnvironment], monkeypatch: pytest.MonkeyPatch) -> None:
    first = ranks().main_port
    assert ranks().main_port == first
    monkeypatch.setenv("PMIX_NAMESPACE", "1472528386")
    assert ranks().main_port != first
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert ranks().main_port == 29500


def test_another_command_has_another_port_under_mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no number for a job that ranks on several machines could see."""
    for name in ("LOCAL_SIZE", "SIZE"):
        monkeypatch.setenv(getattr(MPICHEnvironment, name), RANKS[name])
    monkeypatch.setattr("sys.argv", ["cnnstrategies", "fit", "--config=a"])
    first = MPICHEnvironment().main_port
    assert MPICHEnvironment().main_port == first
    monkeypatch.setattr("sys.argv", ["cnnstrategies", "fit", "--config=b"])
    assert MPICHEnvironment().main_port != first


def test_srun_is_not_taken_for_mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets PMI_RANK and PMI_SIZE too, where it was built with PMI."""
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert environment_plugins([]) == []


@BOTH
def test_ranks_not_numbered_machine_by_machine_are_refused(
    ranks: type[MpirunEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ranks.LOCAL_RANK, "0")
    option = {OpenMPIEnvironment: "--map-by ppr:2:node", MPICHEnvironment: "-ppn 2"}[ranks]
    with pytest.raises(ConfigurationError, match=option):
        ranks().validate_settings(num_devices=2, num_nodes=1)


@BOTH
def test_rank_0s_address_on_several_machines_has_to_be_said(
    ranks: type[MpirunEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ranks.LOCAL_SIZE, "1")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    option = {OpenMPIEnvironment: "-x MASTER_ADDR=<", MPICHEnvironment: "-genv MASTER_ADDR <"}[ranks]
    with pytest.raises(ConfigurationError, match=option):
        _ = ranks().main_address


def test_the_doctor_finds_its_place_under_mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    for name, value in values.items():
        monkeypatch.setenv(getattr(MPICHEnvironment, name), value)
    monkeypatch.setenv("MASTER_ADDR", "alpha")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert find_place() == Place(node=1, nodes=2, local_rank=0, main_address="alpha", main_port=29500)


@BOTH
def test_under_torchrun_its_own_variables_count(
    ranks: type[MpirunEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "digits")
    assert not ranks.detect()
