"""Tests of sessions: scripts with several functions, waits for missing processes, and stops."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import Address
from cnnstrategies.paramserver.core.view import RunEnded
from cnnstrategies.paramserver.drivers.coordinator import JournalFile
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server import base, run
from cnnstrategies.strategies.parameter_server.run import VARIABLE, NodeLayout, Sessions
from tests.runner.ports import free_port
from tests.runner.ranks import run_started
from tests.strategies.chain_program import Chain
from tests.strategies.digit_commands import served
from tests.strategies.fault_injection import Fault

LAYOUT = NodeLayout(1, 0, 2, "127.0.0.1", 29400)
DEDICATED = {"endpoints": ["tcp://127.0.0.1:7000"], "coordinator": "tcp://127.0.0.1:7001"}


def layout() -> NodeLayout:
    return LAYOUT


def options(**changes):
    return ParameterServerStrategy(**changes).options


def test_a_coordinator_that_is_stopped_at_its_start_can_be_replaced(monkeypatch, tmp_path):
    """The coordinator has not written its journal yet, so the process that replaces it finds an empty journal."""
    processes = []

    def start(process, method):
        processes.append(process)
        return SimpleNamespace(pid=1, poll=lambda: 0, send_signal=lambda signum: None)

    monkeypatch.setattr(run, "start", start)
    chosen = options(max_restarts=1)
    place = run.choose_rendezvous(chosen, LAYOUT, 0, supervised=True, directory=str(tmp_path))
    run.open_supervision(chosen, LAYOUT, place, False, "fork")
    (coordinator,) = processes
    assert JournalFile(Path(coordinator.journal)).read() == b""


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("node", "line", "expected"),
    [
        (0, "worker 1, server 1 did not appear within 3 s: start the run on all its machines", 1),
        (1, "for 3 s: no process listens at the port; check that rank 0 was started", 2),
    ],
    ids=["the second", "the first"],
)
def test_a_node_that_was_never_started_is_named(run_cli, quick, monkeypatch, node, line, expected):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": node}.items():
        monkeypatch.setenv(name, str(value))
    layout = [*served(1, security="none"), "--trainer.num_nodes=2", "--interconnect.wait=3"]
    code, output = run_cli("fit", *quick, *layout)
    assert code == expected, output
    assert line in output


@pytest.mark.cluster  # This test waits for a time-out of several seconds.
def test_a_script_that_lost_a_rank_gets_an_error_in_its_next_function(tmp_path):
    def script():
        chain = Chain("parameter_server", "auto", tmp_path)
        trainer = chain.trainer(ParameterServerStrategy(timeout=6.0), 3, Fault(step=3))
        trainer.fit(chain.model, chain.data)
        assert trainer.current_epoch == 3
        with pytest.raises(RunEnded, match="rank 1 died in an earlier"):
            trainer.test(chain.model, chain.data)

    assert run_started(2, script) == [0, -signal.SIGKILL]


def test_dedicated_servers_serve_only_the_first_session(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    rank = Sessions()
    rank.open(options(**DEDICATED), layout, True)
    rank.open(options(**DEDICATED), layout, False)  # This function needs no servers.
    with pytest.raises(ConfigurationError, match="endpoints: dedicated servers end with a script's first trainer"):
        rank.open(options(**DEDICATED), layout, True)


class Gone:
    """Collectives of a run whose other workers no longer answer."""

    def __init__(self, membership: Any) -> None:
        self.membership = membership

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} would wait forever")


def test_after_a_stop_a_worker_waits_for_no_other_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """In modes async and ssp, other workers may be in a different step or may have ended."""
    stops: list[int] = []
    membership: Any = SimpleNamespace(stop_all=stops.append, stop_signal=None)
    monkeypatch.setattr(base, "Membership", lambda address, keys: membership)
    monkeypatch.setattr(base, "Collectives", Gone)
    strategy = ParameterServerStrategy()
    strategy.register(Address("ipc://coordinator", "worker", 0), None)
    assert strategy.agree_on_stop(None) is None
    assert strategy.agree_on_stop(15) == 15
    assert stops == [15]
    assert strategy.gather("mine", "metric") == {0: "mine"}
    assert strategy.broadcast("mine") == "mine"
    assert float(strategy.reduce(torch.tensor(2.0), reduce_op="sum")) == 2
