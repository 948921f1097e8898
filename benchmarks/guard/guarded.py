"""Run a program under its strategy with the callback `Guard`, in a forked process, and collect the findings."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from programs import Program

from cnnstrategies.callbacks import Guard
from cnnstrategies.cluster.rendezvous import ranks_meet
from cnnstrategies.guarding.findings import Finding
from cnnstrategies.guarding.loading import watch_loading
from cnnstrategies.verifying.runs import QUIET, forked

EVERY = 20  # Number of steps from one check of the guard to the next.
SECONDS = 300.0  # Time limit of a run.
watch_loading()  # Programs make their modules before the callback.


class KeepFindings(Callback):
    """Callback that saves the findings of a rank's guard.

    Args:
        guard: The guard.
        folder: Folder of the files, which have the ranks' numbers as names.
    """

    def __init__(self, guard: Guard, folder: Path) -> None:
        self.guard, self.folder = guard, folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the findings."""
        torch.save(self.guard.findings, self.folder / str(trainer.global_rank))


def findings_of(
    program: Program,
    steps: int,
    devices: int = 2,
    every: int = EVERY,
    replay_every: int = EVERY // 2,
    seconds: float = SECONDS,
) -> list[Finding]:
    """Return the findings of all ranks, the earliest first, and findings before notes.

    Args:
        program: The program.
        steps: Number of steps.
        devices: Number of ranks.
        every: Number of steps from one check to the next.
        replay_every: Number of steps from one batch whose layers are computed twice to the next.
        seconds: Time limit of the run.

    Raises:
        RuntimeError: The run fails.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "findings").mkdir()

        def prepare() -> None:
            """Save the checkpoint from which the program continues."""
            trainer = Trainer(accelerator="cpu", devices=1, max_steps=6, logger=False, default_root_dir=folder, **QUIET)
            trainer.fit(program.module, datamodule=program.data)
            trainer.save_checkpoint(folder / "earlier.ckpt")
            checkpoint = torch.load(folder / "earlier.ckpt", weights_only=False)
            assert program.resume is not None
            program.resume(checkpoint)
            torch.save(checkpoint, folder / "earlier.ckpt")

        def train() -> None:
            seed_everything(0, verbose=False)
            guard = Guard(every=every, replay_every=replay_every)
            strategy = forked(program.strategy) if isinstance(program.strategy, str) else program.strategy
            callbacks = [*program.callbacks, guard, KeepFindings(guard, folder / "findings")]
            settings: dict[str, Any] = {"max_steps": steps, "logger": False, "max_epochs": 1000, **program.trainer}
            trainer = Trainer(
                accelerator="cpu",
                devices=devices,
                strategy=strategy,
                callbacks=callbacks,
                default_root_dir=folder,
                **QUIET,
                **settings,
            )
            with ranks_meet(trainer.strategy):
                earlier = folder / "earlier.ckpt" if program.resume else None
                trainer.fit(program.module, datamodule=program.data, ckpt_path=earlier, weights_only=False)

        if program.resume is not None:
            run_in_fork(prepare, folder / "prepared", seconds)
        run_in_fork(train, folder / "printed", seconds)
        files = sorted((folder / "findings").iterdir())
        findings = [finding for file in files for finding in torch.load(file, weights_only=False)]
    return sorted(findings, key=lambda finding: (finding.is_note, finding.step))


def run_in_fork(function: Callable[[], None], output: Path, seconds: float) -> None:
    """Call a function in a forked process.

    Args:
        function: The function.
        output: File to which the process writes.
        seconds: Time limit.

    Raises:
        RuntimeError: The function fails, or takes too long; the error has the last lines of the output.
    """

    def call() -> None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(file, stream)
        try:
            function()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)

    process = multiprocessing.get_context("fork").Process(target=call)
    process.start()
    process.join(seconds)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError("\n".join(output.read_text(errors="replace").splitlines()[-40:]))
