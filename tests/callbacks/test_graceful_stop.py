"""Signals end every process of a run within seconds, and a resumed run equals an uninterrupted run."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cnnstrategies import ImageClassifier
from cnnstrategies.callbacks import GracefulStop, graceful_stop
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.strategies.protocol import StrategyFacts
from tests.cluster.processes_of import PYTHON, Program, environment, fit
from tests.conftest import PlainCNN, quiet_trainer
from tests.runner.forked import alive, kill_group
from tests.strategies.digit_commands import served

pytestmark = pytest.mark.warm

# Dropout, mixup and random shifts are all on: a resumed run must draw what the uninterrupted one draws.
# There is no schedule, because its length would depend on the run's number of epochs.
DRAWS = ("--model.init_args.mixup_alpha=0.2", "--model.init_args.lr_scheduler=null")


def start(name, *args):
    words = fit(*DRAWS, "--trainer.max_epochs=3000", f"--trainer.logger.init_args.name={name}", *args)
    return Program([PYTHON, *words], Path(f"{name}.log"))


def rank_one(rank_zero):
    """Return the process id of the process that rank 0 has started last."""
    started = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = status.read_text().partition(" (")
            after = rest.rpartition(")")[2].split()
            if int(after[1]) == rank_zero:
                started[int(number)] = int(after[19])
    return max(started, key=lambda number: started[number])


def train_on(run_cli, quick, name, *args):
    code, output = run_cli("fit", *quick, *DRAWS, f"--trainer.logger.init_args.name={name}", *args)
    assert code == 0, output
    return torch.load(Path("runs") / name / "version_0/checkpoints/last.ckpt", weights_only=True)


@pytest.mark.parametrize(
    "signum", [pytest.param(signal.SIGTERM, marks=pytest.mark.cluster), signal.SIGINT], ids=["SIGTERM", "ctrl-c"]
)
def test_a_signal_stops_all_ranks_and_they_resume_exactly(run_cli, quick, signum):
    program = start("stopped", "--stop.grace=100")  # The stop takes long on a busy machine.
    process = program.process
    path = Path("runs/stopped/version_0/checkpoints/last.ckpt")
    program.wait_until(path.exists)
    time.sleep(0.4)  # The signal should arrive in the middle of an epoch.
    if signum == signal.SIGINT:
        os.killpg(process.pid, signum)  # A terminal signals the whole process group.
    else:
        # A scheduler may signal only one of several pods or hosts. All ranks stop.
        os.kill(rank_one(process.pid), signum)
    assert program.wait() == 128 + signum, program.output()
    assert not kill_group(process.pid, 60)
    step = int(re.search(r"Stopped by SIG\w+ after step (\d+); continue with --ckpt_path", program.output())[1])
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["global_step"] == step
    assert checkpoint["epoch"] < 2999, "the run was over before the signal"
    if signum == signal.SIGINT:
        return  # The rest of the test does not depend on the signal.

    epochs = f"--trainer.max_epochs={checkpoint['epoch'] + 2}"
    resumed = train_on(run_cli, quick, "resumed", epochs, f"--ckpt_path={path}")
    whole = train_on(run_cli, quick, "whole", epochs)
    assert resumed["global_step"] == whole["global_step"] > step
    for name, value in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], value), name
    # Together the stopped and the resumed run log the same as the uninterrupted run, also for the interrupted epoch.
    expected = dict(scalars("whole"))
    logged = scalars("stopped") + scalars("resumed")
    assert dict(logged).keys() == expected.keys()
    for key, value in logged:
        assert value == pytest.approx(expected[key], abs=1e-6), key


class Warned(Callback):
    """Sends the last rank a signal in the batch in which its optimizer makes a certain step.

    Args:
        step: Number of the step.
        signum: Name of the signal; by default a scheduler's warning signal.
    """

    def __init__(self, step: int, signum: str = "SIGUSR1") -> None:
        self.step, self.signum = step, signum

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.Signals[self.signum])


class ManualSteps(ImageClassifier):
    """A module that calls its optimizer itself, after every third batch, also across the end of an epoch."""

    def __init__(self) -> None:
        super().__init__(PlainCNN(), 10)
        self.automatic_optimization = False
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.batches += 1
        if self.batches % 3 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Stopped(NamedTuple):
    """A run that gets a warning signal in a step, and the step after which it stops.

    Attributes:
        pace: Seconds between two checks for a signal. The first step of an epoch always checks. Then either every step
            of the epoch checks, or no further step; otherwise the machine's speed would decide.
        warned: Step in which the warning arrives.
        stops: Step after which the run stops.
        processed: Number of batches up to this step. A step takes three batches, or ends with the epoch's last batch.
        batches: Number of batches of an epoch.
        manual: Whether the module calls its optimizer itself.
    """

    pace: float
    warned: int
    stops: int
    processed: int
    batches: int = 7
    manual: bool = False


EVERY_STEP, ONCE_AN_EPOCH = 0.0, 1e9
WARNED = {
    "in the middle of an epoch": Stopped(EVERY_STEP, 2, 2, 6),
    "and first noticed in the next epoch": Stopped(ONCE_AN_EPOCH, 2, 4, 10),
    "in the last batch, which steps early": Stopped(EVERY_STEP, 3, 4, 10),
    "where each step is the last of an epoch": Stopped(EVERY_STEP, 1, 4, 8, batches=2),
    "with manual steps": Stopped(EVERY_STEP, 2, 2, 6, manual=True),
    "with manual steps, and first noticed in the next epoch": Stopped(ONCE_AN_EPOCH, 2, 3, 9, manual=True),
}


@pytest.mark.parametrize("run", WARNED.values(), ids=WARNED)
def test_a_warned_run_saves_the_step_after_which_it_stops(monkeypatch, run):
    """The run stops only after a batch with an optimizer step: checkpoints do not contain accumulated gradients."""
    monkeypatch.setattr(graceful_stop, "CHECK_SECONDS", run.pace)
    trainer = quiet_trainer(
        callbacks=[Warned(run.warned), GracefulStop(), ModelCheckpoint("saved")],
        enable_checkpointing=True,
        max_epochs=6,
        limit_train_batches=run.batches,
        accumulate_grad_batches=1 if run.manual else 3,
    )
    with pytest.raises(SystemExit) as stop:
        trainer.fit(ManualSteps() if run.manual else ImageClassifier(PlainCNN(), 10), DigitsDataModule())
    assert stop.value.code == 128 + signal.SIGUSR1
    assert progress("saved/last.ckpt") == (run.stops, run.processed)


# The ranks of modes `async` and `local` make steps independently of each other, and check for a signal at every step.
STRATEGIES = {
    "ddp": ["--trainer.strategy=ddp_fork"],
    "hybrid_pipeline": ["--trainer.strategy=hybrid_pipeline_fork"],
    "parameter_server": ["--trainer.strategy=parameter_server_fork"],
    "async": served(mode="async", start_method="fork"),
    "local": served(mode="local", start_method="fork"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.cluster] * (name in ("async", "local"))) for name in STRATEGIES]
)
def test_no_strategy_stops_within_an_accumulation(monkeypatch, run_cli, quick, name):
    monkeypatch.setattr(graceful_stop, "CHECK_SECONDS", ONCE_AN_EPOCH)
    warned = ["--trainer.callbacks+=tests.callbacks.test_graceful_stop.Warned", "--trainer.callbacks.init_args.step=2"]
    warned += ["--trainer.callbacks.init_args.signum=SIGTERM", "--stop.grace=100"]
    few = ["--trainer.limit_train_batches=7", "--trainer.limit_val_batches=1", "--trainer.max_epochs=1000"]
    few += ["--trainer.accumulate_grad_batches=3"]
    code, output = run_cli("fit", *quick, *STRATEGIES[name], *few, *warned)
    assert code == 128 + signal.SIGTERM, output  # Only rank 1 has got the signal.
    assert output.count("SIGTERM: stopping after this step") == output.count("Stopped by SIGTERM after step") == 1, (
        output
    )
    step, processed = progress(next(Path("runs").rglob("last.ckpt")))
    # An epoch has three steps; the last of them is made after a single batch.
    assert processed == step // 3 * 7 + step % 3 * 3
    assert step == 4 or name in ("async", "local")  # Rank 0 may be in any step when rank 1 gets the signal.


def progress(path):
    """Return the numbers of optimizer steps and of batches before a checkpoint."""
    saved = torch.load(path, weights_only=True)
    return saved["global_step"], saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]


def scalars(name):
    """Return the scalars of a run in TensorBoard, without measured times."""
    events = EventAccumulator(f"runs/{name}/version_0").Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag not in ("hp_metric", "epoch") and "samples" not in tag]
    return [((tag, event.step), event.value) for tag in tags for event in events.Scalars(tag)]


@pytest.mark.parametrize(("each", "codes"), [(False, [143, 0, 0, 0]), (True, [143, 0, 143, 0])])
def test_rank_0_or_each_nodes_first_rank_ends_with_the_signals_code(each, codes):
    """Rank 0 determines the run's exit code; with `on_each_node` each node's launcher sees the signal's code."""
    exit_codes = []

    class Independent(StrategyFacts):
        steps_in_lockstep = False

        def agree_on_stop(self, received):
            return signal.SIGTERM

    strategy = Independent()
    for rank in range(4):
        place = {"is_global_zero": rank == 0, "local_rank": rank % 2, "global_step": 1, "checkpoint_callback": None}
        place["progress_bar_callback"] = None
        trainer = SimpleNamespace(strategy=strategy, **place)
        with pytest.raises(SystemExit) as stop:
            GracefulStop(on_each_node=each).on_train_batch_end(trainer, None, None, None, 0)
        exit_codes.append(stop.value.code)
    assert exit_codes == codes


def test_a_signal_before_training_ends_every_process():
    program = start("early")
    # The first two processes are the program and the helper that starts programs warm. The third is the other rank.
    program.wait_until(lambda: len(alive(program.process.pid)) > 2)
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.wait() == 128 + signal.SIGTERM
    assert not kill_group(program.process.pid, 60)


def test_a_killed_rank_ends_the_others():
    program = start("killed")
    program.wait_until(lambda: "Training" in program.output())
    os.kill(program.process.pid, signal.SIGKILL)  # The program is rank 0, which has started the other rank.
    assert program.wait() == -signal.SIGKILL
    assert not kill_group(program.process.pid, 60)


# A run with loader workers. A terminal sends its signal to the whole process group; so does `timeout`, which also sends
# it to the program itself.
LOADERS = ("--trainer.devices=1", "--data.init_args.num_workers=1", "--trainer.max_epochs=3000", "--stop.grace=100")


@pytest.mark.parametrize("bar", ["TQDMProgressBar", "RichProgressBar"])
def test_a_terminal_shows_one_notice_and_one_last_line(bar):
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    words = [*fit(*LOADERS), "--trainer.enable_progress_bar=true", f"--trainer.callbacks+={bar}"]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    variables = environment(TERM="xterm", COLUMNS="200")
    process = subprocess.Popen([PYTHON, *words], **streams, env=variables, start_new_session=True)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # The terminal is closed when the last process has ended.
        while part := os.read(terminal, 65536):
            shown += part
            if process and b"Epoch 1" in shown:
                os.killpg(process.pid, signal.SIGINT)
                process, stopped = None, process
    assert stopped.wait(100) == 128 + signal.SIGINT
    text = shown.decode()
    assert "Traceback" not in text
    assert text.count("SIGINT: stopping after this step") == 1
    last = "Stopped by SIGINT after step"
    assert text.count(last) == 1
    # Nothing but the end of the line follows, and the line begins at the start of a line.
    before, _, after = text.partition(last)
    assert re.fullmatch(r" \d+; continue with --ckpt_path \S+/last\.ckpt\r\n", after), text[-1000:]
    assert re.search(r"[\r\n](\x1b\[\??\d*[A-Za-z])*$", before), text[-1000:]


def test_a_log_shows_one_notice_and_one_last_line():
    program = start("logged", *LOADERS)
    program.wait_until(lambda: Path("runs/logged/version_0/checkpoints/last.ckpt").exists())
    before = program.output()
    for _ in range(2):
        os.killpg(program.process.pid, signal.SIGTERM)
    assert program.wait() == 128 + signal.SIGTERM
    notice, last = program.output().removeprefix(before).splitlines()
    assert notice == "SIGTERM: stopping after this step, within 100 s; send the signal again to stop at once"
    assert re.fullmatch(r"Stopped by SIGTERM after step \d+; continue with --ckpt_path \S+/last.ckpt", last)
    assert not kill_group(program.process.pid, 60)
