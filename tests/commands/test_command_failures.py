"""An error of a run is reported once: in one line if a line can explain it, and otherwise with a traceback."""

import errno
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException

from cnnstrategies import ConfigurationError
from cnnstrategies.commands.run import lightning_cli
from cnnstrategies.commands.run.failures import explain_run_error, lost_loader_worker, refusal_in
from cnnstrategies.errors import causes
from cnnstrategies.paramserver.core.view import RemovedError, RunEnded, ServersUnreachableError
from tests.conftest import ROOT


def raised(function) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    return caught.value


def wrapped() -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device", "events.out")
    except OSError as error:
        raise RuntimeError("unexpected pos 64 vs 0") from error


LINES = [
    (ConfigurationError("num_classes=1:\n a classifier"), "num_classes=1: a classifier"),
    (raised(wrapped), "No space left on device: events.out; free some space, and continue with --ckpt_path=last"),
    (
        raised(lambda: nn.Conv2d(3, 4, 3)(torch.zeros(2, 1, 8, 8))),
        "the network takes images with 3 channels, but the data's images have 1",
    ),
    (raised(lambda: nn.Conv2d(64, 4, 3)(torch.zeros(2, 32, 8, 8))), None),
    (
        raised(lambda: nn.Linear(2, 3).load_state_dict(nn.Linear(3, 3).state_dict())),
        "ckpt_path: the checkpoint does not fit the network of `model`: size mismatch for weight",
    ),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "labels.csv"), None),
    (
        OSError(errno.EROFS, "Read-only file system", "/mnt/runs"),
        "Read-only file system: /mnt/runs; change its permissions, or choose another folder",
    ),
    (
        TypeError("File is not creatable since parent directory not writable: '/mnt/config.yaml'"),
        "cannot write /mnt/config.yaml: change its permissions",
    ),
    (ModuleNotFoundError("Requirement 'mlflow>=1.0.0' not met."), "a package is missing: "),
    (ValueError("boom"), None),
    (MisconfigurationException("`ModelCheckpoint(monitor='a')` could not find\nit"), "`ModelCheckpoint(monitor='a')`"),
    (RuntimeError("Early stopping conditioned on metric `a` which is not available."), "Early stopping conditioned on"),
]


@pytest.mark.light
def test_expected_errors_have_a_line_and_others_a_traceback():
    for error, line in LINES:
        text = explain_run_error(error)
        assert (text is None) if line is None else text.startswith(line)


@pytest.mark.light
def test_errors_that_cause_each_other_are_visited_once():
    """Two errors can cause each other if a handler raises the error that it has caught from its own error."""
    first, second = OSError(errno.ENOENT, "No such file or directory"), ValueError("it is gone")
    first.__cause__, second.__context__ = second, first
    assert list(itertools.islice(causes(first), 3)) == [first, second]


@pytest.mark.light
def test_an_error_of_a_spawned_rank_is_explained_by_its_text():
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File x\n{}\n"
    ours = "cnnstrategies.errors.ConfigurationError: broken image a.png:\n cut"
    channels = "RuntimeError: Given groups=1, expected input[2, 1, 8, 8] to have 3 channels, but got 1 channels instead"
    assert refusal_in(text.format(ours)) == "broken image a.png: cut"
    assert refusal_in(text.format(channels)).startswith("the network takes images with 3 channels")
    full = "OSError: [Errno 28] No space left on device"
    assert refusal_in(text.format(full)).startswith("No space left on device; free some space")
    assert refusal_in(text.format(f"{full}: b'runs/events'")).startswith(
        "No space left on device: runs/events; free some"
    )
    assert refusal_in(text.format("ValueError: boom")) is None
    assert refusal_in(text.format("KeyboardInterrupt")) is None


KILLED = "DataLoader worker (pid 7) is killed by signal: {}. "
GONE = "DataLoader worker (pid(s) 7, 8) exited unexpectedly"


@pytest.mark.light
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (KILLED.format("Killed"), "SIGKILL, which the system sends when memory runs out: use fewer loader workers"),
        (KILLED.format("Bus error. It is possible that"), "SIGBUS, which the system sends when shared memory runs out"),
        (KILLED.format("Segmentation fault"), "SIGSEGV: set num_workers to 0"),
        (f"RuntimeError: {GONE}\n{KILLED.format('Killed')}", "SIGKILL, which the system sends"),
    ],
)
def test_a_killed_loader_worker_is_explained_in_one_line(text, line):
    start = "rank 3 has lost a loader worker (process 7), which was ended by "
    assert lost_loader_worker(text, 3).startswith(start + line)
    spawned = ProcessRaisedException(f"-- Process 3 terminated with the following error:\n{text}", 3, 77)
    assert explain_run_error(spawned) == lost_loader_worker(text, 3)


@pytest.mark.light
def test_a_loader_worker_that_ended_for_an_unknown_reason_has_a_line():
    text = lost_loader_worker(GONE, 0)
    assert text.startswith(
        "rank 0 has lost a loader worker (process 7, 8), which has ended unexpectedly: if memory has run out"
    )
    assert lost_loader_worker("ValueError: boom", 0) is None


class Killer(torch.utils.data.Dataset):
    """A data set that is killed while it loads a sample, as by the system when memory runs out."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def test_torchs_error_about_a_killed_loader_worker_is_recognised():
    error = raised(lambda: next(iter(torch.utils.data.DataLoader(Killer(), num_workers=1))))
    line = explain_run_error(error)
    assert re.match(r"rank 0 has lost a loader worker \(process \d+\), which was ended by SIGKILL, which the", line), (
        line
    )


FAILS = """
import os
import torch
from lightning.pytorch import Callback


class Fails(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank in {ranks}:
            {statement}
"""
BOOM = "raise ValueError('boom')"
CHANNELS = "torch.nn.Conv2d(3, 4, 3)(batch[0])"


def fit(ranks, statement, strategy="ddp", *more, **variables):
    Path("mine.py").write_text(FAILS.format(ranks=ranks, statement=statement))
    command = [sys.executable, str(ROOT / "cli.py"), "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"]
    options = [
        "--trainer.callbacks+=mine.Fails",
        f"--trainer.strategy={strategy}",
        "--trainer.enable_progress_bar=false",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:.", **variables}
    return subprocess.run([*command, *options, *more], capture_output=True, text=True, timeout=100, env=environment)


@pytest.mark.warm
@pytest.mark.parametrize(
    "ranks", [pytest.param((0, 1), id="all_ranks"), pytest.param((1,), id="rank_1", marks=pytest.mark.cluster)]
)
def test_an_error_of_the_user_appears_once_with_its_traceback(ranks):
    """The error's own line is the last line, also if checkpoints are saved because of the error."""
    ended = fit(ranks, BOOM, "ddp", "--checkpoint.save_on_exception=true")
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1].endswith("ValueError: boom")
    assert len(list(Path("runs").rglob("best.ckpt"))) == (len(ranks) == 2)
    assert ended.stderr.count("Traceback") == 1
    assert "mine.py" in ended.stderr


@pytest.mark.warm
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", (0, 1)),
        ("ddp_fork", (1,)),
        pytest.param("ddp", (1,), marks=pytest.mark.cluster),
        pytest.param("parameter_server", (0, 1), marks=pytest.mark.cluster),
    ],
)
def test_an_expected_error_appears_once_without_a_traceback(strategy, ranks):
    ended = fit(ranks, CHANNELS, strategy)
    assert ended.returncode == 2, ended.stderr
    # torch sends SIGTERM to the remaining ranks that it has started.
    lines = [line for line in ended.stderr.splitlines() if line and not line.startswith("SIGTERM: stopping")]
    assert len(lines) == 1
    assert lines[0].startswith("cnnstrategies: error: the network takes images with 3 channels")


@pytest.mark.cluster
@pytest.mark.warm
def test_the_debug_variable_shows_the_traceback():
    ended = fit((1,), CHANNELS, CNNSTRATEGIES_DEBUG="1")
    assert ended.returncode != 0
    assert "mine.py" in ended.stderr


@pytest.mark.warm
def test_a_killed_rank_is_named_in_one_line():
    """The killed rank is named even if another rank reports first, which knows only that it lost a connection."""
    spoken = "__import__('cnnstrategies.runtime.processes').runtime.processes.first_to_fail(1)"
    ended = fit((1,), f"{spoken}; os.kill(os.getpid(), 9)")
    assert ended.returncode == 1, ended.stderr
    assert (
        "The run cannot continue: rank 1 was ended by SIGKILL, which the system sends when memory runs out"
        in ended.stderr
    )
    assert len(re.findall(f"; {HELD.format(1)}", ended.stderr)) == 1, ended.stderr
    assert "Traceback" not in ended.stderr


HELD = r"in step {} it had held [\d,]+ MB of main memory \(predicted: .*\); if memory has run out, "
ALLOCATES, DIES = "torch.empty(2**50)", "os.kill(os.getpid(), 9)"
FITS = r"a plan that fits by prediction: --trainer\.{} \([\d,]+ MB beside the parameters\)"
RECOMPUTES = FITS.format(r"callbacks\+=ActivationCheckpointing")
PIPELINE = (
    f"rank 1 was ended by SIGKILL, .*; {HELD.format(1)}"
    f"{FITS.format('strategy.init_args.activation_checkpointing=always')}"
)
# By case: the strategy, the statement of rank 1 in step 1, and a pattern of the output.
EXHAUSTED = {
    "ddp": ("ddp", ALLOCATES, r"error: rank 1 on \S+ has run out of memory in step 1: it had held .* \(predicted: "),
    "ddp_fork": ("ddp_fork", DIES, f"rank 1 was ended by SIGKILL, .*; {HELD.format(1)}{RECOMPUTES}"),
    "pipeline": ("hybrid_pipeline", DIES, PIPELINE),
    "pipeline_fork": ("hybrid_pipeline_fork", DIES, PIPELINE),
    "worker's allocator": (
        "parameter_server",
        ALLOCATES,
        r"error: rank 1 on \S+ has run out of memory in step 1: it had held .* \(predicted: ",
    ),
    "worker": (
        "parameter_server",
        DIES,
        rf"worker 1 \(.* was killed by SIGKILL; it is .*; {HELD.format(1)}{RECOMPUTES}",
    ),
}


@pytest.mark.cluster
@pytest.mark.warm
@pytest.mark.parametrize("case", EXHAUSTED)
def test_a_rank_without_memory_is_named_once_with_its_step_and_peaks(case):
    strategy, statement, pattern = EXHAUSTED[case]
    ended = fit((1,), statement, strategy, "--trainer.max_epochs=2")
    # Under the parameter server, the other worker continues the run.
    assert (ended.returncode == 0) is (case == "worker"), ended.stderr
    assert ended.returncode >= 0, "no process has waited until a time-out"
    assert len(re.findall(pattern, ended.stderr)) == ended.stderr.count("it had held") == 1, ended.stderr


# The servers are forked, so they run this code as well.
SERVER = """
from cnnstrategies.paramserver.server.server import Server

goes_on = Server.on_time

def on_time(self, now):
    if self.mode.finished >= 2:
        {statement}
    return goes_on(self, now)

Server.on_time = on_time
"""


@pytest.mark.cluster
@pytest.mark.warm
@pytest.mark.parametrize(
    ("statement", "pattern"),
    [
        (ALLOCATES, rf"server 0 on \S+ has run out of memory in step 2: it had held .* asked for {2**52} bytes more; "),
        (DIES, r"server 0 \(.* was killed by SIGKILL; it is not replaced; in step \d+ it had held [\d,]+ MB of main "),
    ],
    ids=["allocator", "killed"],
)
def test_a_server_without_memory_is_named_once_with_its_step_and_peak(statement, pattern):
    ended = fit((), f"pass{SERVER.format(statement=statement)}", "parameter_server_fork")
    assert ended.returncode > 0, ended.stderr
    assert len(re.findall(pattern, ended.stderr)) == ended.stderr.count("it had held") == 1, ended.stderr
    assert "use servers on more machines" in ended.stderr


WHY = "worker 1 had no answer"
ENDED = [
    *(
        (kind(WHY), 1, f"The run cannot continue: {WHY}\n")
        for kind in (ServersUnreachableError, RemovedError, RunEnded)
    ),
    (
        RunEnded("worker 1 failed: ValueError: bad: a.png"),
        *(1, "The run cannot continue: worker 1 failed\nValueError: bad: a.png\n"),
    ),
    (RunEnded("every worker has left", clean=True), 0, "Nothing is left to do: every worker has left\n"),
]


def test_a_worker_that_cannot_go_on_says_why_in_one_line(monkeypatch, capsys):
    for error, code, message in ENDED:

        def fail(_, error=error):
            raise error

        monkeypatch.setattr(lightning_cli.CLI, "__init__", fail)
        with pytest.raises(SystemExit) as ended:
            lightning_cli.main(["fit"])
        assert (ended.value.code, capsys.readouterr().err) == (code, message)


@pytest.mark.light
@pytest.mark.parametrize(
    ("layer", "shape", "line"),
    [
        (
            nn.BatchNorm2d(3),
            (1, 3, 1, 1),
            "batch norm cannot train on .* the shape .1, 3, 1, 1.: set data.*drop_last to",
        ),
        (
            nn.BatchNorm1d(3),
            (1, 3),
            "batch norm cannot train on .* its input has the shape .1, 3.: set data.*drop_last",
        ),
        (nn.MaxPool2d(3), (1, 3, 2, 2), "too small .* gets an input of 3x2x2: set a larger data.init_args.image_size"),
        (
            nn.Conv2d(3, 3, 5),
            (1, 3, 2, 2),
            "too small .* has a kernel of 5 x 5: set a larger data.init_args.image_size",
        ),
    ],
)
def test_images_and_batches_that_are_too_small_are_one_line(layer, shape, line):
    with pytest.raises((RuntimeError, ValueError)) as failure:
        layer(torch.zeros(shape))
    message = explain_run_error(failure.value)
    assert message is not None
    assert re.search(line, message), message
    assert refusal_in(f"Traceback\n{type(failure.value).__name__}: {failure.value}\n") == message
