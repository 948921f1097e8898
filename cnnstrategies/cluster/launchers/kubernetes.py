"""Launcher for Kubernetes. ``submit`` creates Indexed Jobs with kubectl, and Lightning starts the ranks in each pod."""

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from typing_extensions import override

from cnnstrategies.cluster.kubernetes import MAIN_PORT, OWN_KEY, SERVER_PORT, SERVERS, TRAINER, PodRun, host, text
from cnnstrategies.cluster.launchers.jobs import ClusterJob
from cnnstrategies.cluster.launchers.launcher import Environ, Launcher, Restart
from cnnstrategies.cluster.launchers.registry import register
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cnnstrategies.cluster.submission import Submission

SECTION = "cluster.kubernetes"
WARNING = "Warning: "  # Beginning of a line in which kubectl prints a warning of the cluster.
# Largest number of characters in cluster.job_name. A pod's name has at most 63 characters, and the timestamp, the role,
# the index and Kubernetes' random suffix need 35 of them.
LONGEST_NAME = 28
WAIT = 1800.0  # Seconds to wait until all pods have downloaded their images and have started.


@register
class Kubernetes(Launcher):
    """Launcher for pods of an Indexed Job, which ``submit --to kubernetes`` creates, or of a TrainJob."""

    name = "kubernetes"
    title = "Kubernetes"
    precedence = 40
    reads = frozenset({"server_nodes"})

    @override
    def detect(self, environ: Environ) -> bool:
        return "KUBERNETES_SERVICE_HOST" in environ

    @override
    def run_name(self, environ: Environ, configuration: str) -> str | None:
        """Return a run name that contains the name of the Indexed Job or TrainJob, from the host name of this pod.

        The host name of a pod is the name of its Job followed by the pod's index. The result is None if the pod does
        not belong to an Indexed Job.
        """
        host_name, number = environ.get("HOSTNAME", ""), environ.get("JOB_COMPLETION_INDEX")
        if number is None or not host_name.endswith(f"-{number}"):
            return None
        # The name of a TrainJob's Job is the TrainJob's name with the suffix `-node-0`, because its only replicated job
        # is called `node`.
        job = re.sub(r"-node-0$", "", host_name.removesuffix(f"-{number}"))
        return f"kubernetes_{job}"

    @override
    def launch_id(self, environ: Environ) -> str | None:
        return self.run_name(environ, "")

    @override
    def restart(self, options: ClusterOptions) -> Restart | None:
        return Restart("a pod", f"set {SECTION}.max_restarts to 0") if options.kubernetes.max_restarts else None

    @override
    def job(self, submission: "Submission", command: str) -> "KubernetesJob":
        options = submission.options
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", options.job_name) or len(options.job_name) > LONGEST_NAME:
            raise ConfigurationError(
                f"cluster.job_name={options.job_name!r}: for Kubernetes use at most {LONGEST_NAME} lower-case letters, "
                "digits and -, starting with a letter"
            )
        if not options.kubernetes.image:
            raise ConfigurationError(
                f"{SECTION}.image is not set: set the container image for the pods; docs/kubernetes.md describes how "
                "to build it"
            )
        _check_keys(submission)
        folder = _folder(options)
        name = f"{options.job_name}-{time.strftime('%m%d-%H%M%S')}"
        run_folder = folder / (submission.config.run_name or name)
        checkpoints = PurePosixPath(submission.checkpoints or run_folder / "checkpoints")
        if not _is_in_volume(checkpoints, options):
            raise ConfigurationError(
                f"checkpoint.dirpath={checkpoints} is not in a volume, so a restarted pod would not find its "
                f"checkpoints: set a directory in one of {SECTION}.volumes "
                f"({', '.join(options.kubernetes.volumes)}), or leave checkpoint.dirpath out"
            )
        run = PodRun(
            name=name,
            options=options.kubernetes,
            size=submission.size,
            servers=options.server_nodes,
            goes_on=submission.server_options is not None,
            folder=str(run_folder),
            configuration=submission.text(run_folder, _changes(submission, name)),
            python=options.python or "python",
            setup=tuple(options.setup),
            command=command,
        )
        return KubernetesJob(run, checkpoints)


@dataclass(frozen=True)
class KubernetesJob(ClusterJob):
    """Job that consists of Indexed Jobs, a headless service and a ConfigMap.

    Attributes:
        run: The run whose Kubernetes objects are created.
        checkpoints: Path of the directory of the checkpoints in the pods.
    """

    run: PodRun
    checkpoints: PurePosixPath

    @override
    def show(self) -> str:
        return text(self.run)

    @override
    def submit(self) -> str:
        run = self.run
        create(run)
        namespace = f" -n {run.options.namespace}" if run.options.namespace else ""
        servers = f", and {run.servers} server pods" if run.servers else ""
        return (
            f"Created Job {run.name}: {run.size.nodes} pods x {run.size.tasks_per_node} processes{servers}\n"
            f"Checkpoints: {self.checkpoints} in the pods\n"
            f"Logs: kubectl logs{namespace} -l app.kubernetes.io/instance={run.name} --prefix -f"
        )


def _check_keys(submission: "Submission") -> None:
    """Check the option ``key_secret``, which is needed only for encrypted connections between pods.

    Raises:
        ConfigurationError: ``key_secret`` is set for a run without parameter servers, or it is not set although the
            connections between pods are encrypted.
    """
    servers, secret = submission.server_options, submission.options.kubernetes.key_secret
    if servers is None and secret is not None:
        raise ConfigurationError(
            f"{SECTION}.key_secret={secret} has no effect without a ParameterServerStrategy; leave key_secret out"
        )
    several = submission.size.nodes + submission.options.server_nodes > 1
    if servers is None or not several or secret is not None or servers.security == "none":
        return
    raise ConfigurationError(
        f"{SECTION}.key_secret is not set, but the connections between the pods are encrypted: run "
        "`cnnstrategies-server --make-keys run.key` and `kubectl create secret generic run-key --from-file=run.key`, "
        "and set `key_secret: run-key`; or, on a trusted network, set `security: none` for the strategy"
    )


def _folder(options: ClusterOptions) -> PurePosixPath:
    """Return the directory for run folders, as a path in the pods.

    This is ``cluster.folder``. If ``cluster.folder`` is a relative path and there is only one volume, it is the volume.

    Raises:
        ConfigurationError: The directory is not in a volume.
    """
    volumes = list(options.kubernetes.volumes)
    folder = PurePosixPath(options.folder)
    if not folder.is_absolute() and len(volumes) == 1:
        return PurePosixPath(volumes[0])
    if not _is_in_volume(folder, options):
        raise ConfigurationError(
            f"cluster.folder={folder} is not in a volume, so a restarted pod would not find its checkpoints: "
            + (
                f"set a directory in {' or '.join(volumes)}"
                if volumes
                else f"add a volume to which all pods can write, such as {SECTION}.volumes: {{/runs: CLAIM}}"
            )
        )
    return folder


def _is_in_volume(path: PurePosixPath, options: ClusterOptions) -> bool:
    return any(path.is_relative_to(volume) for volume in options.kubernetes.volumes)


def _changes(submission: "Submission", name: str) -> dict[str, Any]:
    """Return the settings that ``submit`` makes in the pods' configuration, such as ``{"stop.grace": 60.0}``."""
    options = submission.options
    changes: dict[str, Any] = {
        "stop.grace": float(options.kubernetes.grace),
        "stop.on_each_node": True,
        "interconnect.wait": max(seconds(submission.config.interconnect.wait, "interconnect.wait"), WAIT),
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


def create(run: PodRun) -> None:
    """Create the Kubernetes objects of a run, and print what the cluster warns of.

    If the cluster refuses an object, no objects are created.

    Raises:
        ConfigurationError: kubectl is not installed, or the cluster refuses an object.
    """
    objects = text(run)
    trial = _kubectl(run, "create", "--dry-run=server", "--filename=-", manifest=objects)
    _check(trial)
    process = _kubectl(run, "create", "--output=name", "--filename=-", manifest=objects)
    if process.returncode and process.stdout:
        _kubectl(run, "delete", "--wait=false", *process.stdout.split())
    _check(process)
    for warning in _warnings(trial.stderr + process.stderr):
        print(f"Note: Kubernetes warns: {warning}", file=sys.stderr)


def _warnings(output: str) -> list[str]:
    """Return each warning in kubectl's output once.

    A warning matters although the Job was created: for example, a namespace may reject the pods of the Job later.
    """
    lines = [line.removeprefix(WARNING) for line in output.splitlines() if line.startswith(WARNING)]
    remedy = f"; set {SECTION}.container.securityContext and {SECTION}.pod.securityContext, or ask the cluster's admin"
    return [line + remedy if "PodSecurity" in line else line for line in dict.fromkeys(lines)]


def _kubectl(run: PodRun, *words: str, manifest: str | None = None) -> subprocess.CompletedProcess[str]:
    namespace = [] if run.options.namespace is None else [f"--namespace={run.options.namespace}"]
    command = ["kubectl", *words, *namespace, "--request-timeout=20s"]
    try:
        return subprocess.run(command, input=manifest, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ConfigurationError(
            "kubectl is not installed: run submit on a machine with kubectl and access to the cluster, or print the "
            "objects with --dry_run and pass them there to `kubectl create -f -`"
        ) from error


def _check(process: subprocess.CompletedProcess[str]) -> None:
    """Raise a ConfigurationError if kubectl has ended with an error."""
    if process.returncode:
        # Lines such as "E1129 ..." are log messages of kubectl about failed attempts. Except for warnings, the other
        # lines give the reason.
        reasons = [line for line in process.stderr.splitlines() if not re.match(rf"E\d{{4}} |{WARNING}", line)]
        raise ConfigurationError(
            f"Kubernetes refuses the run ({' '.join(reasons)}): check `kubectl config get-contexts` and `kubectl "
            "cluster-info`, or print the objects with --dry_run, which does not need a cluster"
        )
