"""Runs on a real Ray cluster; one test kills a node during the run."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cluster.processes_of import PYTHON, Program, fit, process_with, wait_until
from tests.cluster.ray_cluster import RayCluster, missing, ray_cluster
from tests.conftest import ROOT

reason = missing()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.ray,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(reason is not None, reason=str(reason)),
]

EPOCHS = 40
SERVER = ("--trainer.strategy=ParameterServerStrategy", "--trainer.strategy.init_args.security=none")
STRATEGIES = {
    "ddp": ("--trainer.strategy=ddp",),
    "hybrid_pipeline": ("--trainer.strategy=hybrid_pipeline",),
    "parameter_server": SERVER,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(2) as running:
        yield running


def submit(cluster: RayCluster, log: Path, *arguments: str) -> Program:
    words = fit("--trainer.num_nodes=2", "--trainer.devices=1", "--trainer.limit_train_batches=4", *arguments)
    command = [*words[:2], "submit", *words[2:], "--to=ray", "--trainer.limit_val_batches=1"]
    return Program([PYTHON, *command], log, RAY_ADDRESS=cluster.address)


def wait_until_gone(folder: Path) -> None:
    """Wait until all programs of a run have ended, and fail if a program is left."""
    wait_until(lambda: process_with(CNNSTRATEGIES_RUN_NAME=folder.name) is None, lambda: "a program is left")


@pytest.mark.parametrize("strategy", ["hybrid_pipeline", "parameter_server"])
def test_after_a_nodes_death_the_run_resumes_on_another(tmp_path: Path, cluster: RayCluster, strategy: str) -> None:
    run = submit(cluster, tmp_path / "log", *STRATEGIES[strategy], f"--trainer.max_epochs={EPOCHS}")
    run.wait_until(lambda: list(tmp_path.glob("ray/*/checkpoints/last.ckpt")))
    (folder,) = tmp_path.glob("ray/*")
    program = process_with(CNNSTRATEGIES_RUN_NAME=folder.name, NODE_RANK="1")
    assert program is not None, run.output()
    cluster.replace(int(program["RAY_RAYLET_PID"]))
    assert run.wait() == 0, run.output()
    output = run.output()
    # The other node's program may fail because of the loss, and end, before Ray knows of the loss.
    why = r"node 1 \(.*\) was lost(; node 0 then ended with code 1)?"
    assert len(re.findall(rf"The run restarts \(restart 1 of at most 3\), because {why}\n", output)) == 1, output
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    history = next(state["history"] for state in checkpoint["callbacks"].values() if "history" in state)
    assert list(history) == list(range(EPOCHS))  # Every epoch was trained exactly once.
    # The driver has printed the programs' output, and has written it to a file.
    log = (folder / "node0.log").read_text()
    assert "parameters" in log
    assert set(log.splitlines()) <= set(output.splitlines())
    wait_until_gone(folder)


def test_a_signal_stops_all_nodes_with_a_checkpoint(tmp_path: Path, cluster: RayCluster) -> None:
    run = submit(cluster, tmp_path / "log", *STRATEGIES["ddp"], "--trainer.max_epochs=10000")
    run.wait_until(lambda: list(tmp_path.glob("ray/*/checkpoints/last.ckpt")))
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.output()
    assert re.search(r"Stopped by SIGTERM after step \d+; continue with --ckpt_path .*last.ckpt", run.output())
    (folder,) = tmp_path.glob("ray/*")
    wait_until_gone(folder)


TRAINED = {name: repr(name) for name in STRATEGIES} | {"parameter_server": "ParameterServerStrategy(security='none')"}


@pytest.mark.parametrize("strategy", TRAINED)
def test_a_strategy_trains_inside_ray_train_and_reports(tmp_path: Path, cluster: RayCluster, strategy: str) -> None:
    """The test runs the script of the documentation's page."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/ray.md").read_text(), re.DOTALL)
    changes = {
        '"hybrid_pipeline"': TRAINED[strategy],
        "max_epochs=10": "max_epochs=2",
        "use_gpu=False": "resources_per_worker={'CPU': 2}",
        "/shared/runs": str(tmp_path),
    }
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "train.py").write_text(f"from cnnstrategies.strategies import ParameterServerStrategy\n{script}")
    run = Program([PYTHON, str(tmp_path / "train.py")], tmp_path / "log", RAY_ADDRESS=cluster.address)
    assert run.wait() == 0, run.output()
    reported = [torch.load(path, weights_only=True) for path in tmp_path.rglob("checkpoint.ckpt")]
    assert sorted(checkpoint["epoch"] for checkpoint in reported) == [0, 1], run.output()
