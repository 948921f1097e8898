"""Runs that are sent to a Ray cluster."""

import os
import shlex
import sys
from pathlib import Path

from typing_extensions import override

from cnnstrategies.cluster.job import setup_lines
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.ray.connection import connected, demand, in_words
from cnnstrategies.cluster.ray.driver import Driver
from cnnstrategies.cluster.ray.node import PYTHON
from cnnstrategies.commands.submit.command import Target
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.quantities import seconds

FOLDER = "ray"  # Where run folders are made by default.


class RayTarget(Target):
    """Actors on the nodes of a Ray cluster; this process drives them until the run has ended."""

    READS = frozenset({"cpus_per_task", "memory", "gpu_type", "venv", "check_data"})

    @override
    def check(self) -> None:
        base, options = self.base, self.base.options
        if options.server_nodes:
            raise ConfigurationError(
                f"cluster.server_nodes={options.server_nodes} with --to ray: dedicated servers are for SLURM and "
                "Kubernetes; leave it out, and the trainer's nodes hold the parameters"
            )
        if options.ray.max_restarts:
            base.refuse_without_checkpoints("a run that has lost a node", "set cluster.ray.max_restarts to 0")
        self.folder = base.run_folder(Path(FOLDER) if options.folder == ClusterOptions.folder else options.folder)
        self.driver = self._driver()

    def _driver(self) -> Driver:
        options, size, folder = self.base.options, self.base.size, self.folder
        python = options.python or ("python" if options.venv else None)
        interpreter = f'"${PYTHON}"' if python is None else shlex.quote(python)
        setup = setup_lines(options)
        config = str(folder / "config.yaml")
        find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('cnnstrategies') is None)"
        return Driver(
            nodes=size.nodes,
            needed=demand(options, size),
            script=f"{setup}exec {interpreter} -m cnnstrategies fit --config {shlex.quote(config)}",
            probe=f"{setup}exec {interpreter} -c {shlex.quote(find)}",
            folder=folder,
            directory=os.getcwd(),
            # Ray gives each process as many threads as its actor has CPUs, which all processes of the node share.
            variables={"OMP_NUM_THREADS": str(options.cpus_per_task or 1)},
            max_restarts=options.ray.max_restarts,
            wait=options.ray.wait_seconds,
            grace=seconds(self.base.cli.config.stop.grace, "stop.grace", least=0),
            goes_on=self.base.server_options is not None,
        )

    @override
    def show(self) -> str:
        driver = self.driver
        return (
            f"# Written by: {self.command}\n"
            f"# A placement group (STRICT_SPREAD) of {driver.nodes} nodes with {in_words(driver.needed)} each.\n"
            "# On node NODE_RANK, with MASTER_ADDR and MASTER_PORT of the first:\n"
            f"{driver.script}\n"
        )

    @override
    def submit(self) -> str:
        options = self.base.options
        with connected(options.ray.address) as ray:
            if options.check_data and self.base.cli.datamodule is not None:
                self.base.cli.datamodule.prepare_data()
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.yaml").write_text(self.base.text(self.folder, {}), encoding="utf-8")
            code = self.driver.run(ray)
        where = f"Logs and checkpoints: {self.folder}"
        if code:
            print(where, file=sys.stderr)
            sys.exit(code)
        return where


target = RayTarget
