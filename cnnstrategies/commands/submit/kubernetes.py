"""Runs that are sent to Kubernetes, by kubectl."""

import re
import subprocess
import time
from pathlib import PurePosixPath
from typing import Any

from typing_extensions import override

from cnnstrategies.cluster.kubernetes import MAIN_PORT, OWN_KEY, SERVER_PORT, SERVERS, TRAINER, PodRun, host, text
from cnnstrategies.commands.submit.command import Target
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import seconds

SECTION = "cluster.kubernetes"
LONGEST_NAME = 28  # Of a pod's 63 letters, the time, the role, the index and five of Kubernetes' own take the rest.
WAIT = 1800.0  # seconds for all pods to start, which must fetch their images


class KubernetesTarget(Target):
    """Indexed Jobs with a headless service."""

    READS = frozenset({"server_nodes"})

    @override
    def check(self) -> None:
        options = self.base.options
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", options.job_name) or len(options.job_name) > LONGEST_NAME:
            raise ConfigurationError(
                f"cluster.job_name={options.job_name!r}: Kubernetes takes small letters, digits and -, a letter first, "
                f"and at most {LONGEST_NAME} of them"
            )
        if not options.kubernetes.image:
            raise ConfigurationError(
                f"{SECTION}.image: name the container image that the pods run; docs/kubernetes.md says how to build it"
            )
        if options.kubernetes.max_restarts:
            self.base.refuse_without_checkpoints("a pod", f"set {SECTION}.max_restarts to 0")
        self._check_keys()
        folder = self._folder()
        name = f"{options.job_name}-{time.strftime('%m%d-%H%M%S')}"
        run_folder = folder / (self.base.cli.config.run_name or name)
        self.checkpoints = PurePosixPath(self.base.checkpoints or run_folder / "checkpoints")
        if not self._kept(self.checkpoints):
            raise ConfigurationError(
                f"checkpoint.dirpath={self.checkpoints}: a pod that is started again does not find what is there; "
                f"choose a directory in one of {SECTION}.volumes ({', '.join(options.kubernetes.volumes)}), or leave "
                "it out"
            )
        self.run = PodRun(
            name=name,
            options=options.kubernetes,
            size=self.base.size,
            servers=options.server_nodes,
            goes_on=self.base.server_options is not None,
            folder=str(run_folder),
            configuration=self.base.text(run_folder, self._changes(name)),
            python=options.python or "python",
            setup=tuple(options.setup),
            command=self.command,
        )

    def _check_keys(self) -> None:
        servers, secret = self.base.server_options, self.base.options.kubernetes.key_secret
        if servers is None and secret is not None:
            raise ConfigurationError(f"{SECTION}.key_secret={secret} is for a ParameterServerStrategy; leave it out")
        apart = self.base.size.nodes + self.base.options.server_nodes > 1
        if servers is None or not apart or secret is not None or servers.security == "none":
            return
        raise ConfigurationError(
            f"{SECTION}.key_secret: the connections between the pods are encrypted: cnnstrategies-server --make-keys "
            "run.key, kubectl create secret generic run-key --from-file=run.key, and key_secret: run-key; on a network "
            "of your own, security: none"
        )

    def _folder(self) -> PurePosixPath:
        """Where run folders are made, as the pods see it."""
        options = self.base.options
        volumes = list(options.kubernetes.volumes)
        folder = PurePosixPath(options.folder)
        if not folder.is_absolute() and len(volumes) == 1:
            return PurePosixPath(volumes[0])
        if not self._kept(folder):
            raise ConfigurationError(
                f"cluster.folder={folder}: a pod that is started again finds its checkpoints only in a volume; "
                + (
                    f"choose a directory in {' or '.join(volumes)}"
                    if volumes
                    else f"add one that all pods can write to, such as {SECTION}.volumes: {{/runs: CLAIM}}"
                )
            )
        return folder

    def _kept(self, path: PurePosixPath) -> bool:
        return any(path.is_relative_to(volume) for volume in self.base.options.kubernetes.volumes)

    def _changes(self, name: str) -> dict[str, Any]:
        """What the configuration of the pods says otherwise."""
        options, config = self.base.options, self.base.cli.config
        changes: dict[str, Any] = {
            "stop.grace": float(options.kubernetes.grace),
            "stop.on_each_node": True,
            "interconnect.wait": max(seconds(config.interconnect.wait, "interconnect.wait"), WAIT),
        }
        strategy = "trainer.strategy.init_args"
        if options.kubernetes.key_secret is not None:
            changes[f"{strategy}.key_file"] = OWN_KEY
        if options.server_nodes:
            changes[f"{strategy}.coordinator"] = f"tcp://{host(name, TRAINER, 0)}:{MAIN_PORT}"
            changes[f"{strategy}.endpoints"] = [
                f"tcp://{host(name, SERVERS, number)}:{SERVER_PORT}" for number in range(options.server_nodes)
            ]
        return changes

    @override
    def show(self) -> str:
        return text(self.run)

    @override
    def submit(self) -> str:
        run = self.run
        create(run)
        namespace = f" -n {run.options.namespace}" if run.options.namespace else ""
        servers = f", and {run.servers} of servers" if run.servers else ""
        return (
            f"Created Job {run.name}: {run.size.nodes} pods x {run.size.tasks_per_node} processes{servers}\n"
            f"Checkpoints: {self.checkpoints} as the pods see it\n"
            f"Logs: kubectl logs{namespace} -l app.kubernetes.io/instance={run.name} --prefix -f"
        )


target = KubernetesTarget


def create(run: PodRun) -> None:
    """Ask the cluster whether it takes the objects of a run, and make them; either all or none."""
    objects = text(run)
    _checked(_kubectl(run, "create", "--dry-run=server", "--filename=-", given=objects))
    made = _kubectl(run, "create", "--output=name", "--filename=-", given=objects)
    if made.returncode and made.stdout:
        _kubectl(run, "delete", "--wait=false", *made.stdout.split())
    _checked(made)


def _kubectl(run: PodRun, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    namespace = [] if run.options.namespace is None else [f"--namespace={run.options.namespace}"]
    command = ["kubectl", *words, *namespace, "--request-timeout=20s"]
    try:
        return subprocess.run(command, input=given, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigurationError(
            "kubectl is not found: submit where it is, and reaches the cluster; or print the objects with --dry_run, "
            "for kubectl create -f -"
        ) from error


def _checked(ended: subprocess.CompletedProcess[str]) -> None:
    if ended.returncode:
        said = [line for line in ended.stderr.splitlines() if not re.match(r"E\d{4} ", line)]  # But for its tries.
        raise ConfigurationError(
            f"Kubernetes refuses the run: {' '.join(said)}; see kubectl config get-contexts and kubectl cluster-info; "
            "--dry_run needs no cluster"
        )
