"""Dedicated servers, started from the configuration of the run."""

import multiprocessing
import stat
from pathlib import Path

import pytest
import yaml

from cnnstrategies.commands.server import APPEAR, main, server_of
from cnnstrategies.errors import ConfigurationError
from tests.runner.ports import free_port


def configuration(**arguments):
    path = Path("servers.yaml")
    strategy = {"class_path": "cnnstrategies.strategies.ParameterServerStrategy", "init_args": arguments}
    path.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    return path


def test_a_run_with_dedicated_servers_trains(run_cli, quick):
    main(["--make-keys", "keys"])
    assert stat.S_IMODE(Path("keys").stat().st_mode) == 0o600
    arguments = {
        "endpoints": [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)],
        "coordinator": f"tcp://127.0.0.1:{free_port()}",
        "security": "curve",
        "key_file": "keys",
        "start_method": "fork",
    }
    path = configuration(**arguments)
    context = multiprocessing.get_context("fork")
    servers = [context.Process(target=main, args=(["--config", str(path), "--index", str(i)],)) for i in range(2)]
    for server in servers:
        server.start()
    few = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.limit_val_batches=1"]
    code, output = run_cli("fit", *quick, f"--config={path}", *few)
    assert code == 0, output
    for server in servers:
        server.join(60)
    assert [server.exitcode for server in servers] == [0, 0]


def test_keys_are_not_overwritten(capsys):
    main(["--make-keys", "keys"])
    before = Path("keys").read_text()
    with pytest.raises(SystemExit, match="2"):
        main(["--make-keys", "keys"])
    assert "keys are not overwritten" in capsys.readouterr().err
    assert Path("keys").read_text() == before


LOCAL = {"endpoints": ["tcp://127.0.0.1:4000"], "coordinator": "tcp://127.0.0.1:4001"}


@pytest.mark.parametrize(
    ("arguments", "index", "words"),
    [
        ({"mode": "sync"}, 0, "names no endpoints"),
        (LOCAL, 1, "--index 1: the configuration names 1 endpoints"),
        ({"endpoints": ["tcp://10.0.0.1:4000"], "coordinator": "tcp://10.0.0.1:4001"}, 0, "make a key file with"),
    ],
)
def test_configurations_without_the_requested_server_are_refused(arguments, index, words):
    with pytest.raises(ConfigurationError, match=words):
        server_of([configuration(**arguments)], index)


def test_a_server_waits_for_the_run_as_long_as_configured():
    path = configuration(**LOCAL)
    waits = [Path(f"{seconds}.yaml") for seconds in (20, 30)]
    for file in waits:
        file.write_text(f"interconnect: {{wait: {file.stem}}}")
    assert server_of([*waits, path], 0).address.appear == 30
    assert server_of([path], 0).address.appear == APPEAR


def test_a_server_whose_endpoint_is_a_name_listens_on_the_route():
    """On Debian a machine's own name is a loopback address, on which no other machine could connect."""
    endpoints = ["tcp://node2:4000", "tcp://10.0.0.3:4000"]
    path = configuration(endpoints=endpoints, coordinator="tcp://127.0.0.1:4001", security="none")
    assert server_of([path], 0).endpoint == "tcp://127.0.0.1:4000"
    assert server_of([path], 1).endpoint == "tcp://10.0.0.3:4000"
