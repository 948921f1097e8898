"""Workers join a run through the command line, and leave it in every way; every sample is worked on all the same."""

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
from cluster.processes_of import PYTHON, Program, wait_until
from conftest import ROOT, leaves_no_sockets
from digit_commands import read_samples, write_samples
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

CONFIG = "experiments/digits_smallcnn_elastic_cpu"
EPOCHS = 3
SECONDS = 100.0  # for the others to come
OPTIONS = {"async": {"start_method": "fork"}, "ssp": {"start_method": "fork", "mode": "ssp", "staleness": 3}}


class Diary(Callback):
    """Writes down each sample, and waits after the first batch until all others have had one.

    Args:
        name: Of the process.
        others: Whom it waits for.
        signum: What it sends itself after the second batch; 0 for nothing.
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
    """A process of the command line, with a diary."""
    words = [
        *("-m", "cnnstrategies", *command, "--config", CONFIG, *words),
        *("--trainer.enable_progress_bar=false", "--data.init_args.augment=false"),
        "--trainer.callbacks+=test_elastic.Diary",
        f"--trainer.callbacks.init_args.name={name}",
        f"--trainer.callbacks.init_args.others=[{','.join(others)}]",
        f"--trainer.callbacks.init_args.signum={int(signum)}",
    ]
    return Program([PYTHON, *words], Path(f"{name}.log"), PYTHONPATH=os.pathsep.join(sys.path))


@pytest.mark.warm
@pytest.mark.parametrize(  # They take 20 s each.
    "mode", ["async", pytest.param("ssp", marks=pytest.mark.cluster)]
)
def test_workers_come_in_mid_epoch_and_go_in_every_way(mode):
    ends = {"killed": signal.SIGKILL, "told": signal.SIGTERM, "stays": 0}
    options = [f"--trainer.strategy.init_args.{name}={value}" for name, value in OPTIONS[mode].items()]
    with leaves_no_sockets():
        run = {"own": start("own", ends, "fit", words=[f"--trainer.max_epochs={EPOCHS}", *options])}
        run["own"].wait_until(lambda: list(Path("runs/digits_elastic").glob("*/watch.json")))
        for name, signum in ends.items():
            others = {"own", *ends} - {name}
            run[name] = start(name, others, "join", "--run", "runs/digits_elastic", signum=signum)
        codes = {name: program.wait() for name, program in run.items()}
    logs = {name: program.output() for name, program in run.items()}
    assert codes == {"own": 0, "killed": -signal.SIGKILL, "told": 0, "stays": 0}, logs
    assert "it was told to leave" in logs["told"]
    # On a busy machine the others may be through an epoch before it is back.
    assert re.search(f"worked on [1-{EPOCHS}] epochs?", logs["stays"])
    # It hears so as a member, or when it asks for its next place.
    assert "the session is over: every worker has left" in logs["stays"] or OVER in logs["stays"]
    done = {name: read_samples(name) for name in run}
    # They came in the middle of the first epoch, in which all of them had a part.
    assert all(0 in {epoch for epoch, _ in entries} for entries in done.values())
    times = Counter(sample for entries in done.values() for _, sample in entries)
    last = Counter(sample for name in ("own", "stays") for epoch, sample in done[name] if epoch == EPOCHS - 1)
    assert last.total() == 1150
    again = Counter(sample for _, sample in done["killed"])
    for sample, count in last.items():
        assert EPOCHS * count <= times[sample] <= EPOCHS * count + again[sample], sample


@pytest.mark.cluster  # It imports everything once more.
def test_the_array_of_the_docs_joins(tmp_path):
    """The script is bash, and its words are those of the command."""
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
    assert "run.key does not exist here" in ended.stderr


def test_what_cannot_be_joined_is_said_in_a_line(capsys, monkeypatch, tmp_path):
    for words, message in (
        (["--run", "nowhere"], "the folder does not exist"),
        (["--run", str(tmp_path)], "the folder has no watch.json"),
        (["--run", "tcp://127.0.0.1:1", "--key_file", "none.key"], "none.key does not exist here"),
    ):
        monkeypatch.setattr(sys, "argv", ["cnnstrategies", "join", "--config", CONFIG, *words])
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().err


@pytest.fixture
def coordinator(tmp_path):
    """Serves what the test is about in a thread; gives its address and the service."""
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


def test_who_may_not_join_is_told_why(coordinator, tmp_path):
    with pytest.raises(ConfigurationError, match=r"accepts no joiners: .* start it with max_joiners: N"):
        find_place(coordinator())
    address = coordinator(max_joiners=1)
    place = find_place(address)
    assert (place.id, place.incarnation, place.workers) == (2, 0, 2)
    member = Membership(Address(address.coordinator, "worker", place.id, place.incarnation, 0.1, 1.0))
    member.wait_registered()
    with pytest.raises(ConfigurationError, match=r"all 1 places of the run .* are taken"):
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
def test_another_configuration_is_not_the_runs(monkeypatch):
    def of(*sizes):
        parameters = [(f"layer{one}", nn.Parameter(torch.zeros(size))) for one, size in enumerate(sizes)]
        return Specification.of(parameters, torch.optim.SGD([one for _, one in parameters], lr=0.1), 2)

    check_parameters(of((3, 2), (4,)), of((3, 2), (4,)))
    with pytest.raises(ConfigurationError, match=r"'layer0', shape=\(3, 2\), .* there is .* shape=\(3, 1\)"):
        check_parameters(of((3, 2), (4,)), of((3, 1), (4,)))
    with pytest.raises(ConfigurationError, match=r"2 parameters, and this configuration 1: .*'layer1'.* None here"):
        check_parameters(of((3, 2), (4,)), of((3, 2)))
    monkeypatch.setenv(SEED, "3")
    check_seed("3")
    with pytest.raises(ConfigurationError, match="the run has seed_everything=1, and this configuration 3"):
        check_seed("1")
    run = JoinedDispatch(SimpleNamespace(collectives=SimpleNamespace(begin_epoch=lambda *_: 36)))
    run.begin(0, 36, "")
    with pytest.raises(
        ConfigurationError, match="an epoch of the run has 36 batches, and an epoch of this configuration 72"
    ):
        run.begin(0, 72, "")
    with pytest.raises(ConfigurationError, match=r"trainer\.strategy=ddp: give the configuration of the run to join"):
        server_options_of("ddp")
    assert server_options_of("parameter_server_async").mode == "async"


@pytest.mark.light
def test_a_joiner_leaves_to_others_what_monitors_and_saves():
    assert is_for_others(EarlyStopping("val_acc"))
    assert is_for_others(ModelCheckpoint())
    assert not is_for_others(Diary("own", []))
