"""Runs rendered Jobs on this machine as a cluster would: each pod a host of its own, its volumes mounted, and its
command as it is. There are no containers: the file system is this machine's, and so are the process numbers.

``python`` in a pod starts warm; see tests/warm.py.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import warm
from cluster.two_hosts import bind, enter, ip
from conftest import ROOT

INDEX = "batch.kubernetes.io/job-completion-index"
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


@dataclass
class Pod:
    """A pod of a job: the same number and name at each start, and another process."""

    name: str
    index: int
    subdomain: str
    spec: dict[str, Any]
    address: str
    space: str
    log: Path
    starts: int = 0
    process: int = 0
    code: int | None = None
    codes: list[int] = field(default_factory=list)

    def poll(self) -> int | None:
        """The exit code of its container; None while it runs."""
        if self.code is None:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
                self.codes.append(self.code)
                self.kill()  # What is left ends with the container.
        return self.code

    def terminate(self) -> None:
        """What a node that is drained sends to a container's first process."""
        os.kill(self.process, signal.SIGTERM)

    def kill(self) -> None:
        """The loss of its node, but for the name."""
        kill_all_in(self.space)


class Cluster:
    """Makes hosts for pods, and starts and watches these as the controller of Jobs does.

    Args:
        folder: For what the pods print, and for their volumes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix = f"cnn{os.getpid()}"
        self.pods: list[Pod] = []
        self.shared = folder / "claims"
        client = folder / "bin/python"
        client.parent.mkdir()
        client.write_text(CLIENT)
        client.chmod(0o755)
        ip("netns", "add", f"{self.prefix}switch")
        ip("-n", f"{self.prefix}switch", "link", "add", "bridge", "type", "bridge")
        ip("-n", f"{self.prefix}switch", "link", "set", "bridge", "up")

    def remove(self) -> None:
        # The test has added the pods in a process of its own.
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        for space in (line.split()[0] for line in listed.splitlines() if line.startswith(self.prefix)):
            kill_all_in(space)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def add(self, job: dict[str, Any], hostname: str, subdomain: str) -> list[Pod]:
        """The pods of an Indexed Job.

        Args:
            job: Its spec.
            hostname: Of a pod, without its number.
            subdomain: The headless service.
        """
        assert job["completionMode"] == "Indexed"
        pods = []
        for index in range(job["completions"]):
            number = len(self.pods)
            space = f"{self.prefix}p{number}"
            name = f"{hostname}-{index}"
            address = f"10.77.8.{number + 1}"
            ip("netns", "add", space)
            ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", f"p{number}", "netns",
               f"{self.prefix}switch")  # fmt: skip
            ip("-n", f"{self.prefix}switch", "link", "set", f"p{number}", "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                ip("-n", space, "link", "set", link, "up")
            spec = job["template"]["spec"]
            pods.append(Pod(name, index, subdomain, spec, address, space, self.folder / f"{name}.log"))
            self.pods.append(pods[-1])
        return pods

    def start(self, pod: Pod, configuration: str, secrets: Path) -> None:
        """Start a pod, for the first time or again.

        Args:
            pod: The pod.
            configuration: What its ConfigMap holds.
            secrets: The files of its Secret.
        """
        hosts = ["127.0.0.1 localhost"]
        for other in self.pods:
            names = f"{other.name} {other.name}.{other.subdomain}" if other is pod else ""
            if other is not pod and other.subdomain == pod.subdomain:
                names = f"{other.name}.{other.subdomain}"
            hosts.append(f"{other.address} {names}" if names else "")
        own = self.folder / f"{pod.name}-{pod.starts}"
        (own / "config").mkdir(parents=True)
        (own / "config/config.yaml").write_text(configuration)
        (own / "hosts").write_text("\n".join(hosts) + "\n")
        pod.starts += 1
        pod.code = None
        pod.process = os.fork()
        if pod.process == 0:
            code = 1
            try:
                log = os.open(pod.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                code = self._run(pod, own, secrets)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            os._exit(code)

    def _run(self, pod: Pod, own: Path, secrets: Path) -> int:
        """In the pod's first process: what kubelet does, until the container ends."""
        # A /run of its own: a mount point that another test removes is gone here, too.
        enter(pod.space, pod.name, own / "hosts", own_run=True)
        (container,) = pod.spec["containers"]
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for mount in container["volumeMounts"]:
            self._mount(volumes[mount["name"]], Path(mount["mountPath"]), own, secrets)
        with _server(own) as server:
            words = [shutil.which(container["command"][0]) or "", *container["command"][1:]]
            shell = warm.popen(words, env=self._environment(pod, container, own), cwd="/")
            signal.signal(signal.SIGTERM, lambda number, frame: shell.send_signal(number))
            warm.install()
            while shell.poll() is None:
                server()
        return shell.returncode if shell.returncode >= 0 else 128 - shell.returncode

    def _mount(self, volume: dict[str, Any], path: Path, own: Path, secrets: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
        elif "configMap" in volume:
            bind(own / "config", path, read_only=True)
        elif "secret" in volume:
            # As kubelet has it: links to files in another directory, all of the default mode.
            data = own / "secret/..data"
            shutil.copytree(secrets, data)
            for file in data.iterdir():
                file.chmod(volume["secret"]["defaultMode"])
                (data.parent / file.name).symlink_to(f"..data/{file.name}")
            bind(data.parent, path, read_only=True)
        else:
            claim = self.shared / volume["persistentVolumeClaim"]["claimName"]
            claim.mkdir(parents=True, exist_ok=True)
            bind(claim, path)

    def _environment(self, pod: Pod, container: dict[str, Any], own: Path) -> dict[str, str]:
        result = {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "HOME": str(own),
            "PYTHONPATH": str(ROOT),  # As if the image had the package.
            "OMP_NUM_THREADS": "1",
            "POD_SOCKET": str(own / "socket"),
            # What Kubernetes sets.
            "HOSTNAME": pod.name,
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_PORT": "tcp://10.96.0.1:443",
            "JOB_COMPLETION_INDEX": str(pod.index),
        }
        for variable in container["env"]:
            source = variable.get("valueFrom")
            assert source is None or source == {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
            result[variable["name"]] = variable["value"] if source is None else str(pod.index)
        return result


def kill_all_in(space: str) -> None:
    found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout
    for pid in map(int, found.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def starts_again(job: dict[str, Any], code: int) -> str:
    """What a job's policy says of a container's exit code: FailJob, Ignore or Count."""
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None and code in codes["values"]:
            return str(rule["action"])
    return "Count"


@contextlib.contextmanager
def _server(own: Path) -> Iterator[Callable[[], None]]:
    """Starts programs for the pod's `python`; to be called again and again."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(own / "socket"))
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


def wait_for(condition: Callable[[], object], what: Callable[[], str], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)
