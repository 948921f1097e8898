"""An error of a run is reported once: in one line if a line can explain it, and otherwise with a traceback."""

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from cnnstrategies import ConfigurationError
from cnnstrategies.commands.run import lightning_cli
from cnnstrategies.commands.run.failures import explain_run_error, refusal_in
from cnnstrategies.errors import causes
from cnnstrategies.paramserver.core.view import RemovedError, RunEnded, ServersUnreachableError


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


def fit(ranks, statement, strategy="ddp", **variables):
    Path("mine.py").write_text(FAILS.format(ranks=ranks, statement=statement))
    command = [sys.executable, str(ROOT / "cli.py"), "fit", f"--config={ROOT / 'configs/quickstart.yaml'}"]
    options = [
        "--trainer.callbacks+=mine.Fails",
        f"--trainer.strategy={strategy}",
        "--trainer.enable_progress_bar=false",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:.", **variables}
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, env=environment)


@pytest.mark.warm
@pytest.mark.parametrize(
    "ranks", [pytest.param((0, 1), id="all_ranks"), pytest.param((1,), id="rank_1", marks=pytest.mark.cluster)]
)
def test_an_error_of_the_user_appears_once_with_its_traceback(ranks):
    ended = fit(ranks, BOOM)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("ValueError: boom") == 1
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
    assert "Traceback" not in ended.stderr


WHY = "worker 1 had no answer"
ENDED = [
    *(
        (kind(WHY), 1, f"The run cannot continue: {WHY}\n")
        for kind in (ServersUnreachableError, RemovedError, RunEnded)
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
