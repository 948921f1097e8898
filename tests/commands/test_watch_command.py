"""`cnnstrategies watch` shows a run that trains, and says in one line why it cannot show a run."""

import os
import stat
import threading
import time

import pytest

from cnnstrategies.cli import main
from cnnstrategies.commands import watch
from cnnstrategies.commands.arguments.options import WatchOptions
from cnnstrategies.commands.watch import table
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.paramserver.coordinator.settings import Address, CoordinatorSettings
from cnnstrategies.paramserver.drivers.coordinator import CoordinatorService
from cnnstrategies.paramserver.membership import Membership
from cnnstrategies.paramserver.places import NAME, RunAddress
from cnnstrategies.paramserver.security import KeyPair

MEMBER = {"role": "worker", "id": 1, "incarnation": 0, "process": 7, "host": "node1", "silent": 0.1, "takes_part": True}
ANSWER = {"training": True, "missing": [], "waits": [], "faults": [], "losses": 0, "members": []}


def shown(before, now, capsys):
    from rich.console import Console

    Console(width=100).print(table(before, now))
    return capsys.readouterr().out


@pytest.mark.light
def test_speeds_are_differences_between_two_heartbeats(capsys):
    def at(seconds, **figures):
        return {**ANSWER, "members": [{**MEMBER, "measured": seconds, "figures": figures}]}

    before = at(10.0, step=100, samples=3200, sent=0, received=0, waited=1.0, staleness=50)
    now = at(12.0, step=120, samples=3840, sent=5_000_000, received=9_000_000, waited=1.5, staleness=80)
    text = shown(before, now, capsys)
    row = next(line.split() for line in text.splitlines() if "worker 1" in line)
    assert row == ["worker", "1", "node1:7", "120", "10", "320", "1.5", "2.5", "4.5", "25"]


@pytest.mark.light
def test_waits_and_faults_are_shown_without_terminal_control_codes(capsys):
    member = {**MEMBER, "incarnation": 1, "takes_part": False, "silent": 8.0, "measured": 0.0, "figures": {}}
    now = {
        **ANSWER,
        "training": False,
        "losses": 3,
        "members": [member],
        "missing": ["server 0"],
        "waits": [["metric", "worker 0", "worker 1"]],
        "faults": [[9.0, "first"], [3.0, "worker 1 [red](process 7 on \x1b]0;node1)"]],
    }
    lines = [" ".join(line.split()) for line in shown(now, now, capsys).splitlines()]
    assert "The run is being set up: workers 1, servers 0, 3 lost" in lines
    assert "not registered yet: server 0" in lines
    assert "worker 0 in `metric` for worker 1" in lines
    assert lines.index("3 s ago: worker 1 [red](process 7 on ?]0;node1)") < lines.index("9 s ago: first")
    assert any(line.startswith("worker 1, incarnation 2, joins node1:7") and line.endswith(" 8") for line in lines)


@pytest.mark.light
def test_a_runs_folder_names_its_newest_version_and_is_private(tmp_path):
    for number in range(2):
        folder = tmp_path / f"version_{number}"
        for _ in range(2):
            RunAddress(f"ipc:///{number}", "run.key").save(folder)
        assert [path.name for path in folder.iterdir()] == [NAME]
        assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600
        os.utime(folder / NAME, (number, number))
    assert RunAddress.find(str(tmp_path)) == RunAddress("ipc:///1", "run.key")
    assert RunAddress.find(str(tmp_path / "version_0")) == RunAddress("ipc:///0", "run.key")
    RunAddress.remove(tmp_path / "version_0")
    RunAddress.remove(tmp_path / "version_0")
    with pytest.raises(ConfigurationError, match="no run with a parameter server is training there"):
        RunAddress.find(str(tmp_path / "version_0"))
    (tmp_path / "version_1" / NAME).write_text("[]")
    with pytest.raises(ConfigurationError, match="does not contain a valid address"):
        RunAddress.find(str(tmp_path))


@pytest.mark.light
def test_a_run_that_does_not_answer_is_named_in_one_line(monkeypatch):
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.1)
    for run, why in (
        ("nowhere", "the folder does not exist; use a run's folder, or a run's address"),
        ("tcp://node1", "use ipc://path or tcp://address:port"),
        ("ipc:///nowhere/at-all", "no coordinator answers at ipc:///nowhere/at-all: the run does not train"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            watch.main(WatchOptions(run, once=True))


def test_a_run_is_watched_until_it_ends(tmp_path, capfd):
    """The run is a coordinator with a key and one worker; `watch` finds the coordinator through the run's folder."""
    keys = KeyPair.create()
    keys.save(tmp_path / "keys")
    settings = CoordinatorSettings(f"ipc://{tmp_path}/coordinator", 1, 0, timeout=1000.0)
    over = threading.Event()
    service = CoordinatorService(settings, keys)
    serving = threading.Thread(target=service.run, args=(over.is_set,))
    serving.start()
    RunAddress(settings.endpoint, str(tmp_path / "keys")).save(tmp_path / "run")
    membership = Membership(Address(settings.endpoint, "worker", 0, 0, 0.05, 1000.0), keys=keys)
    steps = iter(range(1 << 30))
    membership.report_figures(lambda: {"step": next(steps)})
    membership.wait_registered()
    watch.PAUSE, watch.FIRST_SECONDS = 0.2, 60.0
    main(["watch", "--run", str(tmp_path / "run"), "--once"])
    text = capfd.readouterr().out
    assert "The run is being set up: workers 1, servers 0" in text
    assert "worker 0 " in text

    membership.end("as planned", clean=True)
    until = time.monotonic() + 60
    while "The run is over: as planned" not in text and time.monotonic() < until:
        main(["watch", "--run", str(tmp_path / "run")])
        text = capfd.readouterr().out
    membership.close()
    over.set()
    serving.join()
    service.close()
    assert text.splitlines()[-1] == "The run is over: as planned"
