"""Tests of workers that join a run through the command line and leave in every way: no sample is lost."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from cnnstrategies.callbacks import summary
from cnnstrategies.cli import main
from cnnstrategies.commands.joining_cli import is_for_others, server_options_of
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.places import OVER, RunAddress, find_place
from cnnstrategies.paramserver.specification import Specification
from cnnstrategies.strategies.parameter_server.joining import JoinedDispatch, check_parameters, check_seed
from cnnstrategies.strategies.parameter_server.start import SEED
from tests.cluster.processes_of import PYTHON, Program, wait_until
from tests.conftest import ROOT
from tests.runner.forked import leaves_no_sockets
from tests.strategies.digit_commands import read_samples, write_samples

CONFIG = "experiments/digits_smallcnn_elastic_cpu"
EPOCHS = 3
SECONDS = 100.0  # Longest wait for the other workers.
OPTIONS = {"async": {"start_method": "fork"}, "ssp": {"start_method": "fork", "mode": "ssp", "staleness": 3}}


class Diary(Callback):
    """A callback that writes down each sample, and waits after the first batch until all others have had a batch.

    Args:
        name: Name of the process.
        others: Names of the processes to wait for.
        signum: Signal that the process sends itself after the second batch; 0 for no signal.
    """

    def __init__(self, name: str, others: list[str], signum: int = 0) -> None:
        self.name, self.others, self.signum = name, others, signum
        self.batches = 0

    def setup(self, trainer, pl_module, stage):
        summary.draw_curves = lambda *_: None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1
        write_samples(self.name, trainer.current_epoch, batch)
        if self.batches == 1:
            diaries = [Path(f"diary-{other}") for other in self.others]
            wait_until(lambda: all(diary.exists() for diary in diaries), lambda: str(diaries), SECONDS)
        if self.batches == 2 and self.signum:
            os.kill(os.getpid(), self.signum)


def start(name, others, *command, words=(), signum=0):
    """Start the command line as a process with a diary."""
    words = [
        *("-m", "cnnstrategies", *command, "--config", CONFIG, *words),
        *("--trainer.enable_progress_bar=false", "--data.init_args.augment=false"),
        "--trainer.callbacks+=tests.strategies.test_elastic.Diary",
        f"--trainer.callbacks.init_args.name={name}",
        f"--trainer.callbacks.init_args.others=[{','.join(others)}]",
        f"--trainer.callbacks.init_args.signum={int(signum)}",
    ]
    return Program([PYTHON, *words], Path(f"{name}.log"), PYTHONPATH=os.pathsep.join(sys.path))


@pytest.mark.cluster  # Each case takes 20 s.
@pytest.mark.warm
@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_workers_join_in_mid_epoch_and_leave_in_every_way(mode):
    ends = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM, "stays": 0}
    options = [f"--trainer.strategy.init_args.{name}={value}" for name, value in OPTIONS[mode].items()]
    with leaves_no_sockets():
        run = {"own": start("own", ends, "fit", words=[f"--trainer.max_epochs={EPOCHS}", *options])}
        run["own"].wait_until(lambda: list(Path("runs/digits_elastic").glob("*/watch.json")))
        for name, signum in ends.items():
            others = {"own", *ends} - {name}
            run[name] = start(name, others, "join", "--run", "runs/digits_elastic", signum=signum)
        codes = {name: program.wait() for name, program in run.items()}
    logs = {name: program.output() for name, program in run.items()}
    assert codes == {"own": 0, "killed": -signal.SIGKILL, "terminated": 0, "stays": 0}, logs
    assert "it was told to leave" in logs["terminated"]
    # On a busy machine, the other workers may finish an epoch before this worker has joined again.
    assert re.search(f"worked on [1-{EPOCHS}] epochs?", logs["stays"])
    # The worker learns about the end as a member, or when it asks for its next place.
    assert "the session is over: every worker has left" in logs["stays"] or OVER in logs["stays"]
    done = {name: read_samples(name) for name in run}
    # All workers joined within the first epoch and processed samples of it.
    assert all(0 in {epoch for epoch, _ in entries} for entries in done.values())
    times = Counter(sample for entries in done.values() for _, sample in entries)
    last = Counter(sample for name in ("own", "stays") for epoch, sample in done[name] if epoch == EPOCHS - 1)
    assert last.total() == 1150
    again = Counter(sample for _, sample in done["killed"])
    for sample, count in last.items():
        assert EPOCHS * count <= times[sample] <= EPOCHS * count + again[sample], sample


@pytest.mark.cluster  # The script's program imports everything again.
def test_the_documented_job_array_joins_a_run(tmp_path):
    """The documented script is run by bash, with the real command."""
    script = re.search(r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "docs/spot.md").read_text(), re.DOTALL)[1]
    assert "#SBATCH --requeue\n" in script
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text('#!/bin/bash\nexec "$@"\n')
    (folder / "cnnstrategies").write_text(f'#!/bin/bash\nexec {sys.executable} {ROOT / "cli.py"} "$@"\n')
    for program in folder.iterdir():
        program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    Path("run.yaml").write_text((ROOT / "configs" / f"{CONFIG}.yaml").read_text())
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert ended.returncode == 2
    assert "run.key does not exist on this machine" in ended.stderr


def test_a_run_that_cannot_be_joined_is_refused_in_one_line(capsys, monkeypatch, tmp_path):
    for words, message in (
        (["--run", "nowhere"], "the folder does not exist"),
        (["--run", str(tmp_path)], "the folder has no watch.json"),
        (["--run", "tcp://127.0.0.1:1", "--key_file", "none.key"], "none.key does not exist on this machine"),
    ):
        monkeypatch.setattr(sys, "argv", ["cnnstrategies", "join", "--config", CONFIG, *words])
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().err


@pytest.fixture
def coordinator(tmp_path):
    """A function that starts a coordinator with the given options in a thread and returns the run's address."""
    started = []

    def begin(**options):
        address = f"ipc://{tmp_path}/coordinator-{len(started)}"
        service = CoordinatorService(CoordinatorSettings(address, 2, 0, timeout=1.0, appear=60.0, **options))
        over = threading.Event()
        thread = threading.Thread(target=service.run, args=(over.is_set,))
        thread.start()
        started.append((service, over, thread))
        return RunAddress(address)

    yield begin
    for service, over, thread in started:
        over.set()
        thread.join()
        service.close()


def test_a_refused_joiner_gets_the_reason(coordinator, tmp_path):
    with pytest.raises(ConfigurationError, match=r"accepts no joiners: .* start the run with `max_joiners: N`"):
        find_place(coordinator())
    address = coordinator(max_joiners=1)
    place = find_place(address)
    assert (place.id, place.incarnation, place.workers) == (2, 0, 2)
    member = Membership(Address(address.coordinator, "worker", place.id, place.incarnation, 0.1, 1.0))
    member.wait_registered()
    with pytest.raises(ConfigurationError, match=r"all 1 places for joiners of the run .* are taken"):
        find_place(address)
    member.close()
    assert find_place(address).incarnation == 1
    with pytest.raises(ConfigurationError, match=r"no coordinator answers at ipc://nowhere: .*\(then pass --key_file"):
        find_place(RunAddress("ipc://nowhere"))
    silent = tmp_path / "silent"
    silent.touch()
    with pytest.raises(ConfigurationError, match="no coordinator answers"):
        find_place(RunAddress(f"ipc://{silent}"), patience=0.1)


@pytest.mark.light
def test_a_joiner_with_a_different_configuration_is_refused(monkeypatch):
    def of(*sizes):
        parameters = [(f"layer{index}", nn.Parameter(torch.zeros(size))) for index, size in enumerate(sizes)]
        return Specification.of(parameters, torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1), 2)

    check_parameters(of((3, 2), (4,)), of((3, 2), (4,)))
    with pytest.raises(ConfigurationError, match=r"'layer0', shape=\(3, 2\), .* in the run and .* shape=\(3, 1\)"):
        check_parameters(of((3, 2), (4,)), of((3, 1), (4,)))
    with pytest.raises(
        ConfigurationError, match=r"2 parameters, but this configuration has 1; .*'layer1'.* no parameter here"
    ):
        check_parameters(of((3, 2), (4,)), of((3, 2)))
    monkeypatch.setenv(SEED, "3")
    check_seed("3")
    with pytest.raises(ConfigurationError, match="the run has seed_everything=1, but this configuration has 3"):
        check_seed("1")
    run = JoinedDispatch(SimpleNamespace(collectives=SimpleNamespace(begin_epoch=lambda *_: 36)))
    run.begin(0, 36, "")
    with pytest.raises(
        ConfigurationError, match="an epoch of the run has 36 batches, but an epoch of this configuration has 72"
    ):
        run.begin(0, 72, "")
    with pytest.raises(
        ConfigurationError, match=r"trainer\.strategy=ddp: .* give the configuration of the run to join"
    ):
        server_options_of("ddp")
    assert server_options_of("parameter_server_async").mode == "async"


@pytest.mark.light
def test_a_joiner_does_not_run_callbacks_that_monitor_or_save():
    assert is_for_others(EarlyStopping("val_acc"))
    assert is_for_others(ModelCheckpoint())
    assert not is_for_others(Diary("own", []))
