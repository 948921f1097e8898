"""Runs that are sent to SLURM."""

import itertools
import shutil
import sys
import time
from dataclasses import fields
from pathlib import Path

from typing_extensions import override

from cnnstrategies.cluster.job import sbatch_script, submit
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.cluster.run_folder import refuse_anothers
from cnnstrategies.commands.submit.command import Submission, Target
from cnnstrategies.errors import ConfigurationError


class SlurmTarget(Target):
    """A job; the run folder holds its script and its configuration."""

    READS = frozenset(one.name for one in fields(ClusterOptions))

    @override
    def check(self) -> None:
        base = self.base
        if self.task == "doctor":
            raise ConfigurationError(
                "submit doctor is for --to kubernetes and --to ray; on a SLURM cluster: srun --nodes 2 "
                "--ntasks-per-node 1 cnnstrategies doctor"
            )
        if base.options.requeue:
            base.refuse_without_checkpoints("a requeued job", "set cluster.requeue to false")
        if base.parameter_server is not None and base.size.nodes + base.options.server_nodes > 1:
            base.parameter_server.options.encrypted("tcp://first-node:15000")  # It says what is missing.
        if base.options.check_data and base.cli.datamodule is not None:
            base.cli.datamodule.prepare_data()
        name = base.cli.config.run_name
        self.folder = run_folder(base.options) if name is None else base.options.folder.resolve() / name
        if base.checkpoints is not None:
            refuse_anothers(Path(base.checkpoints) / "last.ckpt", self.folder.name)

    @override
    def show(self) -> str:
        base = self.base
        goes_on = base.parameter_server is not None
        return sbatch_script(base.options, base.size, self.folder, sys.executable, self.command, goes_on)

    @override
    def submit(self) -> str:
        base, folder = self.base, self.folder
        new = not folder.exists()
        write(base, folder)
        file = folder / "job.sh"
        file.write_text(self.show(), encoding="utf-8")
        try:
            job = submit(file)
        except ConfigurationError:
            if new:
                shutil.rmtree(folder)
            raise
        servers = f", and {base.options.server_nodes} server nodes" if base.options.server_nodes else ""
        return (
            f"Submitted job {job}: {base.size.nodes} nodes x {base.size.tasks_per_node} tasks{servers}\n"
            f"Logs, checkpoints and script: {folder} ({job}.log)"
        )


target = SlurmTarget


def write(submission: Submission, folder: Path) -> None:
    """Write the configuration that a job reads."""
    options = submission.options
    signal = {"stop.warning_signal": options.signal, "stop.warning_grace": float(options.grace)}
    folder.mkdir(parents=True, exist_ok=True)
    text = submission.text(folder, signal if options.requeue else {})
    (folder / "config.yaml").write_text(text, encoding="utf-8")


def run_folder(options: ClusterOptions) -> Path:
    """A new folder's path; two submissions in one second get different ones."""
    stem = f"{options.job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := options.folder.resolve() / name).exists())
