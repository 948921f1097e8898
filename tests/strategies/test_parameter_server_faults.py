"""Tests of runs of the command line in which a process is killed or stopped.

Every test also checks that nothing is left: `run_cli` fails if a process is left, `leaves_no_sockets` if a directory of
sockets is left.
"""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cnnstrategies.paramserver.drivers import control
from cnnstrategies.paramserver.supervision import Supervision
from tests.runner.forked import leaves_no_sockets
from tests.runner.ports import free_port
from tests.strategies.digit_commands import COMMON, checkpoint, served
from tests.strategies.digit_runs import logged
from tests.strategies.fault_injection import fault_arguments

pytestmark = pytest.mark.cluster  # These tests wait for time-outs.

# Longer than a process of a busy machine is silent. A killed process is detected at once, without a time-out.
PATIENT = {"timeout": 60}
HASTE = 40  # Factor of simulated clocks. A member's clock may not jump by more than a quarter of the time-out.


def train(run_cli, quick, kill, epochs=4, **options):
    name = ["--trainer.logger.init_args.name=run", f"--trainer.max_epochs={epochs}"]
    with leaves_no_sockets():
        return run_cli("fit", *quick, *COMMON, *served(**{**PATIENT, **options}), *fault_arguments(**kill), *name)


def accuracy():
    return [row["val_acc"] for row in logged("runs/run/version_0") if "val_acc" in row]


LEFT_OUT = ["worker 1 (process", "was killed by SIGKILL; it is not replaced"]
LOST = [f"Rank {rank} ends: server 0 (process" for rank in range(2)]
LOST += ["its parameters are lost; with `replication: 2` a run survives this"]
WRONG = "AssertionError: no process nobody"
# By case: options of the fault, options of the run, whether the run continues, and parts of the output.
ENDS: dict[str, tuple[dict, dict, bool, list[str]]] = {
    "sync": ({}, {}, True, LEFT_OUT),
    "async": ({}, {"mode": "async"}, True, LEFT_OUT),
    "ssp": ({}, {"mode": "ssp", "staleness": 3}, True, LEFT_OUT),
    "rank 0": ({"rank": 0}, {}, False, ["worker 0 (process", "Rank 1 ends: worker 0 (process"]),
    "a server": ({"victim": "ps-server-0"}, {}, False, LOST),
    "an error": ({"victim": "nobody"}, {}, False, [WRONG, f"ends: worker 1 failed: {WRONG}"]),
    "an error in mode local": ({"victim": "nobody"}, {"mode": "local"}, False, [f"ends: worker 1 failed: {WRONG}"]),
}


@pytest.mark.parametrize(("kill", "options", "goes_on", "messages"), ENDS.values(), ids=ENDS)
def test_a_run_continues_or_ends_and_names_the_dead_process(run_cli, quick, kill, options, goes_on, messages):
    code, output = train(run_cli, quick, kill, epochs=4 if goes_on else 200, **options)
    assert (code == 0) is goes_on, output
    for line in messages:
        assert line in output
    if goes_on:
        assert len(accuracy()) == 4
        assert torch.load(checkpoint("run"), weights_only=True)["global_step"] == 24


def test_a_stopped_worker_is_left_out_and_ended(run_cli, quick, monkeypatch):
    look = Supervision.end_the_stopped
    monkeypatch.setattr(Supervision, "end_the_stopped", lambda self, now: look(self, HASTE * now))
    code, output = train(run_cli, quick, {"how": "SIGSTOP"})
    assert code == 0, output
    pattern = r"worker 1 \(process \d+ on .*\) was stopped, as by SIGSTOP, for (\d+) s, and is ended; "
    stopped = re.search(pattern, output)
    assert stopped, output
    assert int(stopped[1]) >= PATIENT["timeout"]
    assert len(accuracy()) == 4


@pytest.mark.parametrize(("rank", "shares"), [(0, "equal"), (1, "auto")])
def test_a_killed_worker_is_restarted_and_joins(run_cli, quick, rank, shares):
    kill = {"rank": rank, "until_back": True}
    code, output = train(run_cli, quick, kill, epochs=1000, max_restarts=1, shares=shares)
    assert code == 0, output
    assert "was killed by SIGKILL; it is started again" in output
    last = torch.load(next(Path("runs/run").glob("version_*/checkpoints/last.ckpt")), weights_only=True)
    assert last["epoch"] >= int(Path("back").read_text()) > 1
    if rank == 0:
        assert "Rank 0 was restarted and continues in epoch" in output


def hurried() -> float:
    """Return the seconds of a clock that runs fast after the fault."""
    now = time.monotonic()
    try:
        killed = Path("killed").stat().st_mtime_ns / 1e9 - time.time() + now
    except FileNotFoundError:
        return now
    return now + HASTE * max(0.0, now - killed)


def test_without_its_coordinator_the_run_ends_and_says_so(run_cli, quick, monkeypatch):
    monkeypatch.setattr(control, "time", SimpleNamespace(monotonic=hurried))
    code, output = train(run_cli, quick, {"victim": "ps-coordinator", "how": "SIGSTOP"}, epochs=200)
    assert code != 0
    for rank in range(2):
        assert f"Rank {rank} ends: the coordinator at ipc://" in output


def test_with_backups_a_lost_server_or_coordinator_changes_no_weights(run_cli, quick):
    options = {"servers_per_node": 2, "replication": 2}
    code, output = train(run_cli, quick, {"step": -1}, **options)
    assert code == 0, output
    untouched = torch.load(checkpoint("run"), weights_only=True)
    for version, restarts in ((1, 0), (2, 1)):
        code, output = train(run_cli, quick, {"victim": "ps-server-1"}, max_restarts=restarts, **options)
        assert code == 0, output
        assert "server 1 (process" in output
        assert_equal_weights(untouched, version, restarts)
    # A coordinator at a TCP address does not use the run's folder of sockets, and members have separate keys.
    options["coordinator"] = f"tcp://127.0.0.1:{free_port()}"
    code, output = train(run_cli, quick, {"victim": "ps-coordinator"}, max_restarts=1, **options)
    assert code == 0, output
    assert "coordinator (process" in output
    assert "was killed by SIGKILL; it is started again" in output
    assert_equal_weights(untouched, 3, "coordinator")


def assert_equal_weights(untouched, version, case):
    whole = torch.load(checkpoint("run", version), weights_only=True)
    for name, value in untouched["state_dict"].items():
        assert torch.allclose(whole["state_dict"][name], value, rtol=1e-9, atol=1e-12), (name, case)
