"""Launcher for Ray. ``submit`` starts a program on each node of a Ray cluster, and Lightning starts the ranks."""

import json
import os
import secrets
import shlex
import sys
from dataclasses import dataclass

from typing_extensions import override

from cnnstrategies.cluster.job import setup_lines
from cnnstrategies.cluster.job_files import JobFiles
from cnnstrategies.cluster.launchers.jobs import ClusterJob
from cnnstrategies.cluster.launchers.launcher import RUN_NAME, Environ, Launcher, Restart
from cnnstrategies.cluster.launchers.registry import launchers, register
from cnnstrategies.cluster.lease import TOKEN, HeldError, holding
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.ray.connection import connected, demand, in_words
from cnnstrategies.cluster.ray.driver import Driver
from cnnstrategies.cluster.ray.node import PYTHON
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import seconds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cnnstrategies.cluster.submission import Submission

JOB_CONFIGURATION = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@register
class Ray(Launcher):
    """Launcher for the entry point of a Ray job, and for runs of ``submit --to ray``."""

    name = "ray"
    title = "Ray"
    precedence = 50
    reads = frozenset({"cpus_per_task", "memory", "gpu_type", "venv", "check_data"})

    @override
    def detect(self, environ: Environ) -> bool:
        return JOB_CONFIGURATION in environ

    @override
    def run_name(self, environ: Environ, configuration: str) -> str | None:
        """Return a name from the job's submission id and the hash of the configuration.

        The hash is needed because one entry point may train several configurations. Ray's job id cannot be used,
        because the job ids of every new cluster begin with the same number.
        """
        try:
            metadata = json.loads(environ[JOB_CONFIGURATION]).get("metadata") or {}
        except ValueError:
            return None
        submission_id = metadata.get("job_submission_id")
        return None if submission_id is None else f"ray_{submission_id}_{configuration}"

    @override
    def restart(self, options: ClusterOptions) -> Restart | None:
        if not options.ray.max_restarts:
            return None
        return Restart("a run that has lost a node", "set cluster.ray.max_restarts to 0")

    @override
    def job(self, submission: "Submission", command: str) -> "RayJob":
        options, size = submission.options, submission.size
        if options.server_nodes:
            raise ConfigurationError(
                f"cluster.server_nodes={options.server_nodes} cannot be used with --to ray, but only with SLURM and "
                "Kubernetes: leave it out, so that the servers run on the trainer's nodes"
            )
        files = submission.job_files(submission.parent_folder(self))
        python = options.python or ("python" if options.venv else None)
        interpreter = f'"${PYTHON}"' if python is None else shlex.quote(python)
        setup = setup_lines(options)
        config = str(files.configuration)
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('cnnstrategies') is None)"
        driver = Driver(
            nodes=size.nodes,
            needed=demand(options, size),
            script=f"{setup}exec {interpreter} -m cnnstrategies fit --config {shlex.quote(config)}",
            probe=f"{setup}exec {interpreter} -c {shlex.quote(find)}",
            folder=files.folder,
            configuration=config,
            directory=os.getcwd(),
            # Ray would set OMP_NUM_THREADS to the number of CPUs of the actor, but all processes of the node share
            # these CPUs.
            variables={"OMP_NUM_THREADS": str(options.cpus_per_task or 1), RUN_NAME: files.folder.name},
            foreign=tuple(pattern for launcher in launchers() for pattern in launcher.variables),
            max_restarts=options.ray.max_restarts,
            wait=options.ray.wait_seconds,
            grace=seconds(submission.config.stop.grace, "stop.grace", least=0),
            goes_on=submission.server_options is not None,
        )
        return RayJob(submission, files, driver, command)


@dataclass(frozen=True)
class RayJob(ClusterJob):
    """Job with an actor on each node of a Ray cluster. :meth:`submit` returns when the run has ended.

    Attributes:
        submission: The configuration of the run.
        files: Paths of the run folder and of the configuration in it.
        driver: The driver, which starts the actors.
        command: The command line of ``submit``.
    """

    submission: "Submission"
    files: JobFiles
    driver: Driver
    command: str

    @override
    def show(self) -> str:
        driver = self.driver
        return (
            f"# Written by: {self.command}\n"
            f"# A placement group (STRICT_SPREAD) of {driver.nodes} nodes with {in_words(driver.needed)} each.\n"
            "# On each node, with its NODE_RANK and the first node's MASTER_ADDR and MASTER_PORT:\n"
            f"{driver.script}\n"
        )

    @override
    def submit(self) -> str:
        """Run the job until it ends. If it fails, exit this process with the job's exit code."""
        options, folder = self.submission.options, self.files.folder
        with connected(options.ray.address) as ray:
            self.submission.prepare_data()
            self.files.write(self.submission.text(folder, {}))
            token = self.driver.variables[TOKEN] = secrets.token_hex(8)
            try:
                with holding([folder], Ray.title, token):
                    code = self.driver.run(ray)
            except HeldError as held:
                self.files.remove()
                raise ConfigurationError(held.refusal(folder.name)) from None
        message = f"Logs and checkpoints: {folder}"
        if code:
            print(message, file=sys.stderr)
            sys.exit(code)
        return message
