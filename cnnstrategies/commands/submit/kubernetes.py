"""Runs that are sent to Kubernetes."""

import re
import time
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from typing_extensions import override

from cnnstrategies.cluster.kubernetes import manifests
from cnnstrategies.cluster.kubernetes.run import MAIN_PORT, OWN_KEY, SERVER_PORT, SERVERS, TRAINER, Run, host
from cnnstrategies.commands.submit.command import Target
from cnnstrategies.errors import ConfigurationError

SECTION = "cluster.kubernetes"
LONGEST_NAME = 28  # Of a pod's 63 letters, the time, the role, the index and five of Kubernetes' own take the rest.
WAIT = 1800.0  # seconds for all pods to start, which must fetch their images


class KubernetesTarget(Target):
    """A TrainJob with its runtime, or Jobs with a service."""

    READS = frozenset({"server_nodes"})

    @override
    def check(self) -> None:
        options = self.base.options
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", options.job_name) or len(options.job_name) > LONGEST_NAME:
            raise ConfigurationError(
                f"cluster.job_name={options.job_name!r}: Kubernetes takes small letters, digits and -, a letter first, "
                f"and at most {LONGEST_NAME} of them"
            )
        if self.base.cli.config.fresh:
            raise ConfigurationError(
                "fresh: a pod has this option at each restart, and would begin anew each time; leave it out: without "
                "run_name a run is new"
            )
        if not options.kubernetes.image:
            raise ConfigurationError(
                f"{SECTION}.image: name the container image that the pods run; docs/kubernetes.md says how to build it"
            )
        if options.kubernetes.max_restarts and self.task == "fit":
            self.base.refuse_without_checkpoints("a pod", f"set {SECTION}.max_restarts to 0")
        self._check_gpus()
        self._check_keys()
        folder = self._folder()
        kubernetes = options.kubernetes
        if self.task == "doctor":
            kubernetes = replace(kubernetes, max_restarts=0)
        name = f"{options.job_name}-{time.strftime('%m%d-%H%M%S')}"
        run_folder = folder / (self.base.cli.config.run_name or name)
        checkpoints = PurePosixPath(self.base.checkpoints or run_folder / "checkpoints")
        if not self._kept(checkpoints):
            raise ConfigurationError(
                f"checkpoint.dirpath={checkpoints}: a pod that is started again does not find what is there; choose a "
                f"directory in one of {SECTION}.volumes ({', '.join(options.kubernetes.volumes)}), or leave it out"
            )
        self.run = Run(
            name=name,
            task=self.task,
            options=kubernetes,
            size=self.base.size,
            servers=options.server_nodes,
            goes_on=self.base.parameter_server is not None,
            folder=str(run_folder),
            checkpoints=str(checkpoints),
            configuration=self.base.text(run_folder, self._changes(name)),
            python=options.python or "python",
            setup=tuple(options.setup),
            command=self.command,
        )

    @override
    def show(self) -> str:
        return manifests.text(self.run)

    @override
    def submit(self) -> str:
        from cnnstrategies.cluster.kubernetes.client import Cluster

        run = self.run
        namespace = Cluster().start(run)
        kind = manifests.objects(run)[-1]["kind"]
        servers = f", and {run.servers} of servers" if run.servers else ""
        return (
            f"Created {kind} {run.name} in namespace {namespace}: {run.size.nodes} pods x {run.size.tasks_per_node} "
            f"processes{servers}\n"
            f"Checkpoints: {run.checkpoints} as the pods see it\n"
            f"Logs: kubectl logs -n {namespace} -l app.kubernetes.io/instance={run.name} --prefix -f"
        )

    def _check_gpus(self) -> None:
        options, gpus = self.base.options.kubernetes, self.base.size.gpus_per_node
        there = options.resources.get(options.gpu)
        if there is not None and int(there) < gpus:
            raise ConfigurationError(
                f"trainer.devices={gpus}, and {SECTION}.resources says that a node has {options.gpu}: {there}: use at "
                f"most {there} devices, and more nodes with trainer.num_nodes"
            )

    def _check_keys(self) -> None:
        strategy, secret = self.base.parameter_server, self.base.options.kubernetes.key_secret
        if strategy is None and secret is not None:
            raise ConfigurationError(f"{SECTION}.key_secret={secret} is for a ParameterServerStrategy; leave it out")
        apart = self.base.size.nodes + self.base.options.server_nodes > 1
        if strategy is None or not apart or secret is not None or strategy.options.security == "none":
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
            "network.wait": max(config.network.wait, WAIT),
        }
        strategy = "trainer.strategy.init_args"
        if options.kubernetes.key_secret is not None:
            changes[f"{strategy}.key_file"] = OWN_KEY
        if options.server_nodes:
            kind = options.kubernetes.kind
            changes[f"{strategy}.coordinator"] = f"tcp://{host(kind, name, TRAINER, 0)}:{MAIN_PORT}"
            changes[f"{strategy}.endpoints"] = [
                f"tcp://{host(kind, name, SERVERS, number)}:{SERVER_PORT}" for number in range(options.server_nodes)
            ]
        return changes


target = KubernetesTarget
