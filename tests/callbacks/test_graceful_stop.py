"""Signals end every process within seconds, and a resumed run is the uninterrupted one."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, PlainCNN, alive, kill_group
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import GracefulStop
from cnnstrategies.data import DigitsDataModule

pytestmark = pytest.mark.warm

# Dropout, mixup and random shifts are all on: a resumed run must draw what the uninterrupted one draws.
RUN = [
    sys.executable,
    str(ROOT / "cli.py"),
    "fit",
    f"--config={ROOT / 'configs/quickstart.yaml'}",
    "--model.init_args.mixup_alpha=0.2",
    "--model.init_args.lr_scheduler=null",  # Its length is that of the run.
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.max_epochs=3000",
]


def start(name, *args):
    log = open(f"{name}.log", "w")  # noqa: SIM115
    command = [*RUN, f"--trainer.logger.init_args.name={name}", *args]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def wait_until(condition, name, process, seconds=150):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return
        assert process.poll() is None, Path(f"{name}.log").read_text()
        time.sleep(0.05)
    pytest.fail(f"not within {seconds} s:\n" + Path(f"{name}.log").read_text())


def wait_for(name, text, process):
    wait_until(lambda: text in Path(f"{name}.log").read_text(), name, process)


def rank_one(rank_zero):
    """The process that rank 0 has started last."""
    started = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = status.read_text().partition(" (")
            after = rest.rpartition(")")[2].split()
            if int(after[1]) == rank_zero:
                started[int(number)] = int(after[19])
    return max(started, key=lambda number: started[number])


def assert_group_ends(group, seconds):
    left = kill_group(group, seconds)
    assert not left, f"processes were still there after {seconds} s:\n{left}"


def train_on(run_cli, quick, name, *args):
    mixup = ["--model.init_args.mixup_alpha=0.2", "--model.init_args.lr_scheduler=null"]
    code, output = run_cli("fit", *quick, *mixup, f"--trainer.logger.init_args.name={name}", *args)
    assert code == 0, output
    return torch.load(Path("runs") / name / "version_0/checkpoints/last.ckpt", weights_only=True)


@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGTERM, marks=pytest.mark.cluster), signal.SIGINT], ids=["SIGTERM", "ctrl-c"]
)
def test_a_signal_stops_all_ranks_and_they_resume_exactly(run_cli, quick, signum):
    process = start("stopped", "--stop.grace=100")  # A busy machine is slow.
    path = Path("runs/stopped/version_0/checkpoints/last.ckpt")
    wait_until(path.exists, "stopped", process)
    time.sleep(0.4)  # Into the middle of an epoch.
    if signum == signal.SIGINT:
        os.killpg(process.pid, signum)  # What a terminal does.
    else:
        # What happens to one of several pods or hosts; it stops all ranks.
        os.kill(rank_one(process.pid), signum)
    code = process.wait(timeout=150)
    output = Path("stopped.log").read_text()
    assert code == 128 + signum, output
    assert_group_ends(process.pid, 60)
    step = int(re.search(r"Stopped by SIG\w+ after step (\d+); continue with --ckpt_path", output)[1])
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == step
    assert checkpoint["epoch"] < 2999, "the run was over before the signal"
    if signum == signal.SIGINT:
        return  # From here on it is the same.

    epochs = f"--trainer.max_epochs={checkpoint['epoch'] + 2}"
    resumed = train_on(run_cli, quick, "resumed", epochs, f"--ckpt_path={path}")
    whole = train_on(run_cli, quick, "whole", epochs)
    assert resumed["global_step"] == whole["global_step"] > step
    for name, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value), name
    # Together the stopped and the resumed run log what the whole one does, the interrupted epoch's means included.
    expected = dict(scalars("whole"))
    logged = scalars("stopped") + scalars("resumed")
    assert dict(logged).keys() == expected.keys()
    for key, value in logged:
        assert value == pytest.approx(expected[key], abs=1e-6), key


class Warned(Callback):
    """Gets a scheduler's warning after the third step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)


def test_a_warned_run_saves_the_step_after_which_it_stops():
    callbacks = [Warned(), GracefulStop(), ModelCheckpoint("saved")]
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, max_epochs=1000, callbacks=callbacks)
    with pytest.raises(SystemExit) as stop:
        trainer.fit(ImageClassifier(PlainCNN(), 10), DigitsDataModule())
    assert stop.value.code == 128 + signal.SIGUSR1
    assert torch.load("saved/last.ckpt", weights_only=True)["global_step"] == trainer.global_step >= 3


def scalars(name):
    """What TensorBoard shows of a run, without times."""
    events = EventAccumulator(f"runs/{name}/version_0").Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag not in ("hp_metric", "epoch") and "samples" not in tag]
    return [((tag, event.step), event.value) for tag in tags for event in events.Scalars(tag)]


@pytest.mark.parametrize(("each", "codes"), [(False, [143, 0, 0, 0]), (True, [143, 0, 143, 0])])
def test_who_ends_with_the_signals_code(each, codes):
    """Rank 0, which speaks for the run; with `on_each_node` what the launcher of each node sees."""
    found = []
    strategy = SimpleNamespace(steps_together=False, stop_signal=lambda received: signal.SIGTERM)
    for rank in range(4):
        place = {"is_global_zero": rank == 0, "local_rank": rank % 2, "global_step": 1, "checkpoint_callback": None}
        trainer = SimpleNamespace(strategy=strategy, **place)
        with pytest.raises(SystemExit) as stop:
            GracefulStop(on_each_node=each).on_train_batch_end(trainer, None, None, None, 0)
        found.append(stop.value.code)
    assert found == codes


def test_a_signal_before_training_ends_every_process():
    process = start("early")
    # Itself and the helper that starts programs warm; then the other rank.
    wait_until(lambda: len(alive(process.pid)) > 2, "early", process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=150) == 128 + signal.SIGTERM
    assert_group_ends(process.pid, 60)


def test_a_killed_rank_ends_the_others():
    process = start("killed")
    wait_for("killed", "Training", process)
    os.kill(process.pid, signal.SIGKILL)  # Rank 0, which started the other.
    assert process.wait(timeout=150) == -signal.SIGKILL
    assert_group_ends(process.pid, 60)


def test_the_middle_of_an_accumulation_is_no_place_to_stop(run_cli, quick):
    """Checkpoints of every second step resume exactly too, with gradients accumulated over three batches."""
    options = [
        "--trainer.strategy=auto",
        "--trainer.devices=1",
        "--trainer.max_epochs=2",
        "--trainer.accumulate_grad_batches=3",
        "--data.init_args.global_batch_size=192",
        "--trainer.limit_train_batches=10",
        "--trainer.limit_val_batches=1",
    ]
    every = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=2"]
    files = ["--trainer.callbacks.save_top_k=-1", "--trainer.callbacks.filename={step}"]
    code, output = run_cli("fit", *quick, *options, *every, *files, "--trainer.logger.init_args.name=whole")
    assert code == 0, output
    folder = Path("runs/whole/version_0/checkpoints")
    resume = [*options, *every, *files, "--trainer.logger.init_args.name=resumed", f"--ckpt_path={folder}/step=2.ckpt"]
    code, output = run_cli("fit", *quick, *resume)
    assert code == 0, output
    whole = torch.load(folder / "step=8.ckpt", weights_only=True)["state_dict"]
    resumed = torch.load("runs/resumed/version_0/checkpoints/step=8.ckpt", weights_only=True)["state_dict"]
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
