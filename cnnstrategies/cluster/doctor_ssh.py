"""``cnnstrategies doctor --hosts``: start the doctor on each host over SSH."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

NO_SSH = 255  # ssh's own exit code for failures of its own


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
