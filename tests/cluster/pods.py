"""A simulated pod on this machine: a host on which the pod's volumes are mounted and its command runs unchanged.

There are no containers: pods share this machine's file system and process ids. ``python`` in a pod starts warm; see
tests/runner/warm.py.
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

from tests.cluster.hosts import Network, bind
from tests.conftest import ROOT
from tests.runner import warm

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# The pod's `python`. It sends its arguments to the pod's first process, which has imported everything and starts the
# program, and then ends with the program's exit code.
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
    """A pod of an Indexed Job. Each start has the same index and name, but a new process.

    Args:
        network: Network of which the pod is a host.
        job: The pod's Job.
        index: Completion index of the pod.
        secret: Folder with the files of the pod's Secret.
    """

    def __init__(self, network: Network, job: dict[str, Any], index: int, secret: Path) -> None:
        self.network, self.index, self.secret = network, index, secret
        self.rules = job["spec"]["podFailurePolicy"]["rules"]
        self.spec = job["spec"]["template"]["spec"]
        self.host = network.add(f"{job['metadata']['name']}-{index}")
        self.name = f"{self.host.name}.{self.spec['subdomain']}"
        self.codes: list[int] = []  # Exit codes of the starts that have ended.

    def start(self, configuration: str, others: "list[Pod]") -> None:
        """Start the pod, for the first time or again, with the configuration of its ConfigMap."""
        names = [f"{pod.host.address} {pod.name}\n" for pod in others]
        self.host.names = f"127.0.0.1 localhost\n{self.host.address} {self.host.name}\n{''.join(names)}"
        folder = self.network.folder / f"{self.host.name}-{len(self.codes)}"
        (folder / "config").mkdir(parents=True)
        (folder / "config/config.yaml").write_text(configuration)
        self.run = self.network.start(self.host, lambda: self._run(folder))

    def has_failed(self) -> bool:
        """Return whether the container has ended since the last call, with an exit code other than 0."""
        if self.run.code is not None or (code := self.run.poll()) is None:
            return False
        self.host.kill_all()  # All processes of a container end with its first process.
        self.codes.append(code)
        return code != 0

    def actions(self) -> list[str]:
        """Return the Job's actions for the pod's failed starts: FailJob, Ignore or Count."""
        on_code = {
            code: str(rule["action"])
            for rule in self.rules
            if "onExitCodes" in rule
            for code in rule["onExitCodes"]["values"]
        }
        return [on_code.get(code, "Count") for code in self.codes if code]

    def drain(self) -> None:
        """Send the signal that a container's first process gets when its node is drained."""
        os.kill(self.run.pid, signal.SIGTERM)

    def _run(self, folder: Path) -> None:
        """Do in the pod's first process what kubelet does, until the container ends."""
        (container,) = self.spec["containers"]
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in container["volumeMounts"]:
            self._mount(volumes[mount["name"]], Path(mount["mountPath"]), folder)
        (folder / "python").write_text(CLIENT)
        (folder / "python").chmod(0o755)
        with _server(folder / "socket") as serve:
            words = [shutil.which(container["command"][0]) or "", *container["command"][1:]]
            shell = warm.popen(words, env=self._environment(container, folder), cwd="/")
            signal.signal(signal.SIGTERM, lambda number, frame: shell.send_signal(number))
            warm.install()
            while shell.poll() is None:
                serve()
        sys.exit(shell.returncode if shell.returncode >= 0 else 128 - shell.returncode)

    def _mount(self, volume: dict[str, Any], path: Path, folder: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
        elif "configMap" in volume:
            bind(folder / "config", path, read_only=True)
        elif "secret" in volume:
            # As with kubelet, the files are links to files in another directory, with the Secret's default mode.
            data = folder / "secret/..data"
            shutil.copytree(self.secret, data)
            for file in data.iterdir():
                file.chmod(volume["secret"]["defaultMode"])
                (data.parent / file.name).symlink_to(f"..data/{file.name}")
            bind(data.parent, path, read_only=True)
        else:
            claim = self.network.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
            claim.mkdir(parents=True, exist_ok=True)
            bind(claim, path)

    def _environment(self, container: dict[str, Any], folder: Path) -> dict[str, str]:
        result = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),  # Simulates an image with the package.
            "OMP_NUM_THREADS": "1",
            "POD_SOCKET": str(folder / "socket"),
            # Kubernetes sets these variables.
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
    """Yield a function that starts programs for the pod's `python`. Call the function again and again."""
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
        with contextlib.suppress(OSError):  # The client may have been killed in the meantime.
            client.send(str(pid).encode())

    with listener:
        yield serve
