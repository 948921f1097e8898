"""The processes of ``cnnstrategies doctor``: where they run, how SSH starts them, what is wrong with GPUs there."""

import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cnnstrategies.cluster.environment import MpirunEnvironment, environment_plugins

DRIVER = Path("/proc/driver/nvidia/gpus")  # Has an entry for each card, whatever torch can do with it.
NO_SSH = 255  # ssh's own exit code for failures of its own


@dataclass(frozen=True)
class Place:
    """A process of the doctor.

    Attributes:
        node: Number of its host.
        nodes: Number of hosts.
        local_rank: Number of the process on its host; only the first one works.
        main_address: Name or address of the first host.
        main_port: Port there.
    """

    node: int
    nodes: int
    local_rank: int
    main_address: str
    main_port: int


def find_place() -> Place | None:
    """Read the variables of srun, torchrun, mpirun, or ``doctor --hosts``; None where none has started this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes = int(os.environ["GROUP_WORLD_SIZE"])
        return Place(int(os.environ["GROUP_RANK"]), nodes, int(os.environ["LOCAL_RANK"]), *_main())
    if environments := [one for one in environment_plugins([]) if one.creates_processes_externally]:
        environment = environments[0]
        if isinstance(environment, MpirunEnvironment):
            nodes = environment.world_size() // environment.local_size()
        else:
            nodes = int(os.environ["SLURM_NNODES"])
        address, port = environment.main_address, environment.main_port
        return Place(environment.node_rank(), nodes, environment.local_rank(), address, port)
    if "NNODES" in os.environ and "NODE_RANK" in os.environ:
        return Place(int(os.environ["NODE_RANK"]), int(os.environ["NNODES"]), 0, *_main())
    return None


def _main() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def gpu_problems(variables: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> list[str]:
    """What to mend, a line each."""
    cards = len(list(driver.glob("*")))
    if not torch.cuda.is_available():
        what = "1 GPU" if cards == 1 else f"{cards} GPUs"
        return [f"{what} that torch {torch.__version__} cannot use: {_why_not()}"] if cards else []
    count = torch.cuda.device_count()
    found = []
    apart = [
        f"{one} and {other}"
        for one, other in itertools.combinations(range(count), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        found.append(
            f"GPUs {', '.join(apart)} do not reach each other's memory, and their messages go through the host's: put "
            "stages that send each other much on others, or look at nvidia-smi topo -p2p r"
        )
    if variables.get("NCCL_P2P_DISABLE", "0") != "0" and count > 1 and not apart:
        found.append(
            f"NCCL_P2P_DISABLE={variables['NCCL_P2P_DISABLE']} sends messages between GPUs through the host's memory, "
            "and they reach each other's: unset it"
        )
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        found.append(
            f"CUDA_LAUNCH_BLOCKING={variables['CUDA_LAUNCH_BLOCKING']} has the host wait for each kernel, those that "
            "wait for another rank too: unset it, but to look for a fault on one device"
        )
    return found


def _why_not() -> str:
    if torch.version.cuda is None:
        return "it is a build for CPUs; install one for CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty; unset it"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # Which of them torch raises depends on what is missing.
        return str(error).splitlines()[0]
    return f"it is built for CUDA {torch.version.cuda}; does the container pass the cards on (--gpus all, --nv)?"


def run_over_ssh(hosts: Sequence[str], port: int, ssh: str, arguments: Sequence[str]) -> int:
    """Run ``cnnstrategies doctor`` on every host and pass on what it prints.

    Args:
        hosts: Names as ssh and the other hosts know them, perhaps with ``user@``; the first one is the main host.
        port: Main port.
        ssh: The command, with options. It must not ask for a password.
        arguments: Those of the doctor on each host.

    Returns:
        0 if all is well, else 1.
    """
    folder, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
    failed = False
    tried = _everywhere(ssh, hosts, [f"cd {folder} && test -x {python}"] * len(hosts))
    for host, (code, output) in zip(hosts, tried, strict=True):
        if code == NO_SSH:
            said = output.strip()
            reason = f"ssh {host} fails: {said}; it must work from here without a password: ssh-copy-id {host}"
        elif code != 0:
            reason = (
                f"{host} lacks {os.getcwd()} or {sys.executable}: the same paths must exist on all hosts, on shared "
                "storage or installed alike"
            )
        else:
            continue
        failed = True
        print(f"mend: {reason}", file=sys.stderr)
    if failed:
        return 1
    commands = []
    for node in range(len(hosts)):
        variables = {
            "MASTER_ADDR": hosts[0].rpartition("@")[2],
            "MASTER_PORT": str(port),
            "NNODES": str(len(hosts)),
            "NODE_RANK": str(node),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        commands.append(f"cd {folder} && exec env {words} {python} -m cnnstrategies doctor {shlex.join(arguments)}")
    results = _everywhere(ssh, hosts, commands)
    for node, (host, (code, output)) in enumerate(zip(hosts, results, strict=True)):
        if node == 0 or code != 0:
            print("".join(f"{host}: {line}" if node else line for line in output.splitlines(keepends=True)), end="")
    return int(any(code != 0 for code, _ in results))


def _everywhere(ssh: str, hosts: Sequence[str], commands: Sequence[str]) -> list[tuple[int, str]]:
    """The exit code and output of a command on each host, all at the same time."""
    processes = [
        subprocess.Popen(
            [*shlex.split(ssh), "-o", "BatchMode=yes", host, command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host, command in zip(hosts, commands, strict=True)
    ]
    # A pipe holds what a doctor prints before its turn comes.
    outputs = [process.communicate()[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
