"""``cnnstrategies submit --to ray``: what it prints, and what it refuses before it asks a cluster."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from cnnstrategies.commands.submit.command import check
from cnnstrategies.commands.submit.ray import RayTarget
from cnnstrategies.errors import ConfigurationError

SERVER = "--trainer.strategy"
ARGUMENTS = [
    *(f"--config={ROOT / 'configs/quickstart.yaml'}", "--trainer.num_nodes=2", "--trainer.devices=2", "--to=ray"),
    *(f"{SERVER}=ParameterServerStrategy", f"{SERVER}.init_args.mode=async", "--cluster.cpus_per_task=3"),
]


def test_each_nodes_request_is_shown_and_the_unfit_refused(monkeypatch):
    base = check(ARGUMENTS)
    monkeypatch.setitem(sys.modules, "ray", None)  # As if it were not installed.

    def refused(words: str, **options: object) -> None:
        with pytest.raises(ConfigurationError, match=words):
            RayTarget(replace(base, options=replace(base.options, **options)), "")

    refused("make a key file with")
    refused("cluster.server_nodes=1 with --to ray", server_nodes=1)
    base = replace(base, parameter_server=None)
    options = replace(base.options, setup=["ulimit -n 4096"], venv=Path("/home/me/venv"))
    shown = RayTarget(replace(base, options=options), "submit").show()
    assert "(STRICT_SPREAD) of 2 nodes with 6 CPUs each" in shown
    lines = "source /home/me/venv/bin/activate\nexport OMP_NUM_THREADS=3\nulimit -n 4096\nexec python -m cnnstrategies "
    assert f"{lines}fit --config {Path.cwd()}/ray/cnnstrategies-" in shown
    doctor = RayTarget(base, "submit", "doctor").show()
    assert f" -m cnnstrategies doctor --shared {Path.cwd()}/ray/cnnstrategies-" in doctor
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[ray\]'"):
        RayTarget(base, "submit").submit()
    base.cli.config.trainer.fast_dev_run = True
    refused("set cluster.ray.max_restarts to 0")
    assert not list(Path().iterdir())
