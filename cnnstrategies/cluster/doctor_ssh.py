"""``cnnstrategies doctor --hosts``: start the doctor on each host over SSH."""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

NO_SSH = 255  # ssh's own exit code for failures of its own
NOT_FOUND = 127  # that of a shell which does not find a command


def run_over_ssh(hosts: Sequence[str], port: int, ssh: str, arguments: Sequence[str]) -> int:
    """Run ``cnnstrategies doctor`` on every host and pass on what it prints.

    Args:
        hosts: Names as ssh and the other hosts know them; the first one is the main host.
        port: Main port.
        ssh: The command, with options: it must not ask for a password.
        arguments: Those of the doctor on each host.

    Returns:
        0 if all is well, else 1.
    """
    python = f"{shlex.quote(sys.executable)} -m cnnstrategies doctor {shlex.join(arguments)}"
    processes = []
    for node, host in enumerate(hosts):
        # A host name may carry a user for ssh, which the others do not need.
        variables = {
            "MASTER_ADDR": hosts[0].rpartition("@")[2],
            "MASTER_PORT": port,
            "NNODES": len(hosts),
            "NODE_RANK": node,
        }
        if "PYTHONPATH" in os.environ:
            variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
        words = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in variables.items())
        remote = f"cd {shlex.quote(os.getcwd())} && exec env {words} {python}"
        processes.append(
            subprocess.Popen(
                [*shlex.split(ssh), "-o", "BatchMode=yes", host, remote],
                stdin=subprocess.DEVNULL,
                stdout=None if node == 0 else subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said: list[list[str]] = [[] for _ in hosts]
    readers = []
    for process, lines in zip(processes, said, strict=True):
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                readers.append(threading.Thread(target=_collect, args=(stream, lines)))
                readers[-1].start()
    codes = [process.wait() for process in processes]
    for reader in readers:
        reader.join()
    failed = False
    for host, code, lines in zip(hosts, codes, said, strict=True):
        if code == 0:
            continue
        failed = True
        last = lines[-1].strip() if lines else ""
        if code == NO_SSH:
            print(
                f"mend: ssh {host} fails: {last}; it must work from here without a password: ssh-copy-id {host}",
                file=sys.stderr,
            )
        elif code == NOT_FOUND or "No such file" in last or "can't cd" in last:
            print(
                f"mend: {host} lacks {sys.executable} or {os.getcwd()} ({last}): the same paths must exist everywhere, "
                "on shared storage or installed alike",
                file=sys.stderr,
            )
        else:
            print("".join(f"{host}: {line}" for line in lines), end="", file=sys.stderr)
    return int(failed)


def _collect(stream: IO[str], lines: list[str]) -> None:
    lines.extend(stream)
