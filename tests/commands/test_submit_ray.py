"""``cnnstrategies submit --to ray``: what it prints, and what it refuses before it asks a cluster."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT

from cnnstrategies.commands.submit import main
from cnnstrategies.errors import ConfigurationError

TWO_NODES = [f"--config={ROOT / 'configs/quickstart.yaml'}", "--trainer.num_nodes=2", "--trainer.devices=3", "--to=ray"]
SERVER = "--trainer.strategy=ParameterServerStrategy"
REFUSED = {
    "sweep": (["--cluster.sweep={seed_everything: [1, 2]}"], "cluster.sweep with --to ray"),
    "servers": ([SERVER, "--cluster.server_nodes=1"], "cluster.server_nodes=1 with --to ray"),
    "no keys": ([SERVER], "make a key file with"),
    "no checkpoints": (
        ["--trainer.enable_checkpointing=false", "--cluster.requeue=false"],
        "set cluster.ray.max_restarts to 0",
    ),
    "no Ray": ([], "pip install 'cnnstrategies.ray.'"),
}


def test_dry_run_shows_what_each_node_is_asked_for_and_runs(capsys):
    options = ["--cluster.cpus_per_task=2", "--cluster.setup=[ulimit -n 4096]", "--cluster.venv=/home/me/venv"]
    main(["submit", "fit", *TWO_NODES, *options, "--dry_run"])
    output = capsys.readouterr().out
    assert "(STRICT_SPREAD) of 2 nodes with 6 CPUs each" in output
    assert "source /home/me/venv/bin/activate\nexport OMP_NUM_THREADS=2\nulimit -n 4096\nexec python -m " in output
    assert f"--config {Path.cwd()}/ray/cnnstrategies-" in output
    main(["submit", "doctor", *TWO_NODES, "--dry_run"])
    assert f" -m cnnstrategies doctor --shared {Path.cwd()}/ray/cnnstrategies-" in capsys.readouterr().out
    assert not list(Path().iterdir())


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_before_a_cluster_is_asked(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "ray", None)  # As if it were not installed.
    arguments, words = REFUSED[name]
    with pytest.raises(ConfigurationError, match=words):
        main(["submit", "fit", *TWO_NODES, *arguments])
    assert not list(Path().iterdir())
