"""The real mpirun of Open MPI and of MPICH, on this machine and on two hosts over SSH."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.cluster.exceptions import KILLED, Failing, failing_runs, several_runs
from tests.cluster.hosts import Network, missing, two_hosts
from tests.cluster.processes_of import PYTHON, Program, environment, fit
from tests.conftest import ROOT
from tests.strategies.fault_injection import PAUSES, fault_arguments

pytestmark = pytest.mark.cluster

SSHD = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
# Containers often forbid the system call with which Open MPI reads another process's memory.
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "btl_vader_single_copy_mechanism", "none")
PATH = str(ROOT)  # For programs that use `fault_injection`.
NO_MPICH = "MPICH's mpiexec.hydra is not installed (pip install '.[mpich]', Debian: apt-get install mpich)"
HYDRA = shutil.which("mpiexec.hydra") or shutil.which("mpiexec.hydra", path=Path(PYTHON).parent)


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


def start_sshd(hosts: Network, folder: Path) -> str:
    """Start a real SSH server on each host, and return ssh's options to log in without a password."""
    for name in ("server", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    words = [
        *(str(SSHD), "-D", "-e", "-p", "2222", "-h", str(folder / "server")),
        *("-o", f"AuthorizedKeysFile={folder / 'client.pub'}", "-o", "PidFile=none"),
        *("-o", "StrictModes=no", "-o", "UsePAM=no", "-o", "PermitRootLogin=yes"),
    ]

    def serve() -> None:
        Path("/run/sshd").mkdir()
        os.execv(words[0], words)

    for host in hosts.hosts:
        server = hosts.start(host, serve)
        while "Server listening" not in server.output():
            assert server.poll() is None, server.output()
            time.sleep(0.05)
    quiet = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    return f"-p 2222 -i {folder / 'client'} {quiet}"


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="apt-get install openmpi-bin")
@pytest.mark.skipif(SSHD is None, reason="apt-get install openssh-server")
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_two_ranks_on_two_hosts_started_over_ssh_train_one_model(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        words = [
            *(*MPIRUN, "--host", "alpha:1,beta:1"),
            *("-x", "MASTER_ADDR=alpha", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"),
            *("--mca", "plm_rsh_agent", "ssh", "--mca", "plm_rsh_args", start_sshd(hosts, tmp_path)),
            *("--mca", "oob_tcp_if_include", "wire", "--mca", "btl_tcp_if_include", "wire", PYTHON),
            *fit("--trainer.devices=1", "--trainer.num_nodes=2", "--trainer.max_epochs=1"),
        ]
        mpirun = hosts.start(hosts.hosts[0], lambda: os.execvpe("mpirun", words, environment()))
        assert mpirun.wait() == 0, mpirun.output()
        assert "2 CPU processes on 2 nodes" in mpirun.output()
        assert (tmp_path / "runs/quickstart/version_0/checkpoints/last.ckpt").exists()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="apt-get install openmpi-bin")
@pytest.mark.parametrize(("signum", "code", "seconds"), [(signal.SIGTERM, 1, "25"), (signal.SIGUSR1, 138, "1")])
def test_mpirun_passes_a_signal_on(tmp_path: Path, signum: int, code: int, seconds: str) -> None:
    """After SIGTERM mpirun itself ends with code 1, and kills the ranks after a time that the documentation raises.

    mpirun waits for this time before it sends SIGTERM, and again before it kills the ranks, also if they have ended.
    """
    # The run waits for the signal. Each epoch starts a loader worker and writes a checkpoint.
    few = ("--trainer.limit_train_batches=20", "--trainer.limit_val_batches=1", PAUSES)
    arguments = fit("--trainer.max_epochs=3000", "--data.init_args.num_workers=1", "--stop.grace=60", *few)
    words = [*MPIRUN, "--mca", "odls_base_sigkill_timeout", seconds, "-n", "2", PYTHON, *arguments]
    program = Program(words, tmp_path / "log", PYTHONPATH=PATH)
    last = tmp_path / "runs/quickstart/version_0/checkpoints/last.ckpt"
    program.wait_until(last.exists)
    os.kill(program.process.pid, signum)
    assert program.wait() == code, program.output()
    name = signal.Signals(signum).name
    assert program.output().count(f"{name}: stopping after this step") == 1, program.output()
    step = re.search(rf"Stopped by {name} after step (\d+); ", program.output())[1]
    assert torch.load(last, weights_only=True)["global_step"] == int(step)
    assert "Traceback" not in program.output()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="apt-get install openmpi-bin")
def test_an_exception_ends_all_ranks_of_mpirun(tmp_path: Path) -> None:
    """The exception's own line is the last line, before mpirun's own report."""
    *before, last = [Failing("hybrid_pipeline", None), Failing("parameter_server", None), Failing("ddp", 1)]
    words = [*MPIRUN, "-n", "2", PYTHON, *several_runs(*failing_runs(*before, last))]
    program = Program(words, tmp_path / "log", PYTHONPATH=PATH)
    code = program.wait(300)
    ours, _, _ = program.output().partition("-----")
    last.check(ours.strip(), [str(code)])
    for run in before:
        run.check()


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="apt-get install openmpi-bin")
def test_a_killed_rank_of_mpirun_is_named_with_its_memory(tmp_path: Path) -> None:
    """mpirun kills the other rank two seconds later, which prints the line before it waits for anything."""
    arguments = fit("--trainer.strategy=hybrid_pipeline", "--trainer.max_epochs=1", *fault_arguments(step=2))
    program = Program([*MPIRUN, "-n", "2", PYTHON, *arguments], tmp_path / "log", PYTHONPATH=PATH)
    assert program.wait() == 128 + signal.SIGKILL, program.output()
    log = program.output()
    assert len(re.findall(KILLED.format(2), log)) == log.count("it had held") == 1, log
    assert "Traceback" not in log, log
