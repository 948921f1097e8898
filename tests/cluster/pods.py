"""A pod on this machine: a host, with its volumes mounted and its command as it is.

There are no containers: the file system is this machine's, and so are the process numbers. ``python`` in a pod starts
warm; see tests/warm.py.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import warm
from cluster.hosts import Network, bind
from conftest import ROOT

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# Sends what it was called with to the pod's own process, which has imported everything, and ends as the program does.
CLIENT = f"""#!{sys.executable} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect(os.environ["POD_SOCKET"])
socket.send_fds(server, [json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
pid = int(server.recv(64))
signal.signal(signal.SIGTERM, lambda number, frame: os.kill(pid, number))
code = int(server.recv(64))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Pod:
    """A pod of an Indexed Job: the same number and name at each start, and another process.

    Args:
        network: Where it is a host.
        job: Its Job.
        index: Its number.
        secret: The files of its Secret.
    """

    def __init__(self, network: Network, job: dict[str, Any], index: int, secret: Path) -> None:
        self.network, self.index, self.secret = network, index, secret
        self.rules = job["spec"]["podFailurePolicy"]["rules"]
        self.spec = job["spec"]["template"]["spec"]
        self.host = network.add(f"{job['metadata']['name']}-{index}")
        self.name = f"{self.host.name}.{self.spec['subdomain']}"
        self.codes: list[int] = []  # Of the starts that have ended.

    def start(self, configuration: str, others: "list[Pod]") -> None:
        """Start it, for the first time or again, with what its ConfigMap holds."""
        names = [f"{pod.host.address} {pod.name}\n" for pod in others]
        self.host.names = f"127.0.0.1 localhost\n{self.host.address} {self.host.name}\n{''.join(names)}"
        own = self.network.folder / f"{self.host.name}-{len(self.codes)}"
        (own / "config").mkdir(parents=True)
        (own / "config/config.yaml").write_text(configuration)
        self.run = self.network.start(self.host, lambda: self._run(own))

    def has_failed(self) -> bool:
        """Whether its container has ended since it was asked last, and not with 0."""
        if self.run.code is not None or (code := self.run.poll()) is None:
            return False
        self.host.kill_all()  # What is left ends with the container.
        self.codes.append(code)
        return code != 0

    def actions(self) -> list[str]:
        """What its Job does about its ends: FailJob, Ignore or Count."""
        on_code = {
            code: str(rule["action"])
            for rule in self.rules
            if "onExitCodes" in rule
            for code in rule["onExitCodes"]["values"]
        }
        return [on_code.get(code, "Count") for code in self.codes if code]

    def drain(self) -> None:
        """What a node that is drained sends to a container's first process."""
        os.kill(self.run.pid, signal.SIGTERM)

    def _run(self, own: Path) -> None:
        """In the pod's first process: what kubelet does, until the container ends."""
        (container,) = self.spec["containers"]
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in container["volumeMounts"]:
            self._mount(volumes[mount["name"]], Path(mount["mountPath"]), own)
        (own / "python").write_text(CLIENT)
        (own / "python").chmod(0o755)
        with _server(own / "socket") as serve:
            words = [shutil.which(container["command"][0]) or "", *container["command"][1:]]
            shell = warm.popen(words, env=self._environment(container, own), cwd="/")
            signal.signal(signal.SIGTERM, lambda number, frame: shell.send_signal(number))
            warm.install()
            while shell.poll() is None:
                serve()
        sys.exit(shell.returncode if shell.returncode >= 0 else 128 - shell.returncode)

    def _mount(self, volume: dict[str, Any], path: Path, own: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
        elif "configMap" in volume:
            bind(own / "config", path, read_only=True)
        elif "secret" in volume:
            # As kubelet has it: links to files in another directory, all of the default mode.
            data = own / "secret/..data"
            shutil.copytree(self.secret, data)
            for file in data.iterdir():
                file.chmod(volume["secret"]["defaultMode"])
                (data.parent / file.name).symlink_to(f"..data/{file.name}")
            bind(data.parent, path, read_only=True)
        else:
            claim = self.network.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
            claim.mkdir(parents=True, exist_ok=True)
            bind(claim, path)

    def _environment(self, container: dict[str, Any], own: Path) -> dict[str, str]:
        result = {
            "PATH": f"{own}:{os.environ['PATH']}",
            "HOME": str(own),
            "PYTHONPATH": str(ROOT),  # As if the image had the package.
            "OMP_NUM_THREADS": "1",
            "POD_SOCKET": str(own / "socket"),
            # What Kubernetes sets.
            "HOSTNAME": self.host.name,
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "JOB_COMPLETION_INDEX": str(self.index),
        }
        for variable in container["env"]:
            if "valueFrom" in variable:
                assert variable["valueFrom"] == {"fieldRef": {"fieldPath": INDEX}}
            result[variable["name"]] = variable.get("value", str(self.index))
        return result


@contextlib.contextmanager
def _server(path: Path) -> Iterator[Callable[[], None]]:
    """Starts programs for the pod's `python`; to be called again and again."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(0.02)
    programs: dict[int, socket.socket] = {}

    def serve() -> None:
        for pid in list(programs):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with programs.pop(pid) as client, contextlib.suppress(OSError):
                    client.send(str(os.waitstatus_to_exitcode(status)).encode())
        try:
            client, _ = listener.accept()
        except TimeoutError:
            return
        text, files, _, _ = socket.recv_fds(client, 2**18, 3)
        words, cwd, env = json.loads(text)
        assert warm.helper is not None
        program = {"words": words, "cwd": cwd, "env": env, "session": False, "warm": True}
        pid = warm.helper.start(program, dict(enumerate(files)))
        for file in files:
            os.close(file)
        programs[pid] = client
        with contextlib.suppress(OSError):  # It may have been killed since.
            client.send(str(pid).encode())

    with listener:
        yield serve
