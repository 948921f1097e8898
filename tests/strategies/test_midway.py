"""Tests of epochs with distributed batches that a worker, or the whole run, starts in the middle."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from tests.cluster.processes_of import wait_until
from tests.runner.forked import leaves_no_sockets
from tests.strategies.digit_commands import COMMON, checkpoint, read_samples, served, write_samples
from tests.strategies.test_parameter_server_faults import PATIENT

pytestmark = pytest.mark.cluster  # These tests take long.
SECONDS = 60.0  # Longest wait for the restarted worker.
BATCH_SECONDS = 0.05  # Without a pause, one rank may be so fast that the other rank gets a single batch.
DIVIDED = ["--trainer.strategy.init_args.mode=sync", "--trainer.strategy.init_args.data_dispatch=static"]
FIRST, EPOCHS = 1, 3  # First epoch of the resumed run, and number of epochs.


class Diary(Callback):
    """A callback that writes down each sample.

    Rank 1 dies after two batches of an epoch; rank 0 waits for rank 1's restart after three batches.

    Args:
        fatal: Epoch in which rank 1 dies.
    """

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        incarnation, epoch = os.environ["CNNSTRATEGIES_INCARNATION"], trainer.current_epoch
        write_samples(f"{trainer.global_rank}-{incarnation}", epoch, batch)
        if epoch <= self.fatal:
            time.sleep(BATCH_SECONDS)
        if epoch != self.fatal:
            return
        if trainer.global_rank == 1 and incarnation == "0" and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_rank == 0 and batch_idx == 2:
            wait_until(Path("diary-1-1").exists, lambda: "rank 1 was not restarted in this epoch", SECONDS)


class Stop(Callback):
    """A callback that writes down each sample.

    In the first run, batches take at least 0.1 s, and rank 1 requests a stop in epoch 1.
    """

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        write_samples(f"{trainer.global_rank}-0", trainer.current_epoch, batch)
        if trainer.ckpt_path is None:
            time.sleep(0.1)
            if trainer.global_rank == 1 and trainer.current_epoch == 1 and batch_idx == 1:
                os.kill(os.getppid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("fatal", "options"),
    [
        pytest.param(FIRST + 1, {"mode": "async"}, id="async"),
        pytest.param(FIRST, {"mode": "async"}, id="async, in the epoch that it loads as it starts"),
        pytest.param(FIRST + 1, {"mode": "ssp", "staleness": 3}, id="ssp"),
    ],
)
def test_a_restarted_worker_joins_in_mid_epoch_of_a_resumed_run(run_cli, quick, fatal, options):
    options = {**options, "data_dispatch": "dynamic", "max_restarts": 1, **PATIENT}
    few = ["--data.init_args.global_batch_size=32", "--trainer.logger.init_args.name=run"]

    def fit(epochs, *args):
        with leaves_no_sockets():
            return run_cli("fit", *quick, *COMMON, *served(**options), *few, f"--trainer.max_epochs={epochs}", *args)

    code, output = fit(FIRST)
    assert code == 0, output
    diary = ["--trainer.callbacks+=tests.strategies.test_midway.Diary", f"--trainer.callbacks.init_args.fatal={fatal}"]
    code, output = fit(EPOCHS, f"--ckpt_path={checkpoint('run').resolve()}", *diary)
    assert code == 0, output
    assert f"Rank 1 was restarted and continues in epoch {fatal}" in output, output
    mine, before, after = read_samples("0-0"), read_samples("1-0"), read_samples("1-1")
    assert {epoch for epoch, _ in after} == set(range(fatal, EPOCHS))
    samples = {sample for _, sample in [*mine, *before, *after]}
    for epoch in range(FIRST, EPOCHS):
        assert {sample for sample_epoch, sample in [*mine, *before, *after] if sample_epoch == epoch} == samples, epoch
    # Only samples that rank 1 had not reported are processed again, including samples of the previous epoch.
    again = len(mine) + len(before) + len(after) - (EPOCHS - FIRST) * len(samples)
    assert 0 <= again <= 3 * 16


def test_a_run_stopped_within_an_epoch_resumes_with_the_remaining_samples(run_cli, quick):
    options = {"mode": "async", "data_dispatch": "dynamic", **PATIENT}
    few = [
        "--data.init_args.global_batch_size=32",
        "--trainer.callbacks+=tests.strategies.test_midway.Stop",
        "--trainer.max_epochs=3",
    ]
    common = [*quick, *COMMON, *served(**options), *few]
    code, output = run_cli("fit", *common, "--trainer.logger.init_args.name=stopped")
    assert code == 128 + signal.SIGTERM, output
    path = checkpoint("stopped")
    saved = torch.load(path, weights_only=True)
    assert saved["epoch"] == 1
    first = Counter([*read_samples("0-0"), *read_samples("1-0")])
    some = sum(epoch == 1 for epoch, _ in first)
    whole = {sample for epoch, sample in first if epoch == 0}
    assert 0 < some < len(whole)
    code, output = run_cli("fit", *common, f"--ckpt_path={path.resolve()}", "--trainer.logger.init_args.name=resumed")
    assert code == 0, output
    done = Counter([*read_samples("0-0"), *read_samples("1-0")])
    assert done == Counter((epoch, sample) for epoch in range(3) for sample in whole)
    code, output = run_cli("fit", *common, f"--ckpt_path={path.resolve()}", *DIVIDED)
    assert code == 2, output
    assert "was saved within an epoch with `data_dispatch: dynamic`, but this run does not use this option" in output
