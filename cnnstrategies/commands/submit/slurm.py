"""Runs that are sent to SLURM."""

import shutil
import sys
from dataclasses import fields
from pathlib import Path

from typing_extensions import override

from cnnstrategies.cluster.job import sbatch_script, submit
from cnnstrategies.cluster.options import ClusterOptions
from cnnstrategies.commands.submit.command import Submission, Target
from cnnstrategies.errors import ConfigurationError


class SlurmTarget(Target):
    """A job; the run folder holds its script and its configuration."""

    READS = frozenset(one.name for one in fields(ClusterOptions))

    @override
    def check(self) -> None:
        base = self.base
        if base.options.requeue:
            base.refuse_without_checkpoints("a requeued job", "set cluster.requeue to false")
        self.folder = base.run_folder(base.options.folder)
        if base.options.check_data and base.cli.datamodule is not None:
            base.cli.datamodule.prepare_data()

    @override
    def show(self) -> str:
        base = self.base
        goes_on = base.server_options is not None
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
