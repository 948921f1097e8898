"""A pod on this machine: a host, with its volumes mounted and its command as it is.

There are no containers: the file system is this machine's, and so are the process numbers.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster.hosts import Network, bind
from conftest import ROOT

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


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
        """In the pod's first process: what kubelet does, and then the container's command."""
        (container,) = self.spec["containers"]
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in container["volumeMounts"]:
            self._mount(volumes[mount["name"]], Path(mount["mountPath"]), own)
        (own / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (own / "python").chmod(0o755)
        os.chdir("/")
        os.execvpe(container["command"][0], container["command"], self._environment(container, own))

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
