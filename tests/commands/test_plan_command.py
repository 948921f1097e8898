"""``cnnstrategies plan`` for configurations, and for a profile and a cluster file without a configuration."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
CLUSTER = "nodes: [{count: 2, devices: 2, price: 1, inside: {gbit: 80}, interconnect: {gbit: 1}}]\n"
PROFILE = """node,operation,forward_ms,backward_ms,activation_bytes,parameter_bytes,inputs
data,Input,5,0,100000,0,
conv1,Conv2d,20,40,800000,9000,data
conv2,Conv2d,20,40,200000,90000,conv1
classifier,Linear,1,2,4000,100000000,conv2
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Return the command-line arguments that plan for a profile on a cluster."""
    (tmp_path / "net.csv").write_text(PROFILE)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return ["plan", f"--profile={tmp_path / 'net.csv'}", "--profile_batch=32", f"--cluster={tmp_path / 'cluster.yaml'}"]


def test_a_plan_from_files_needs_neither_torch_nor_lightning(files: list[str], tmp_path: Path) -> None:
    """A laptop can plan for a GPU cluster; the output is a table and a configuration for fit."""
    written = tmp_path / "strategy.yaml"
    words = [*files, "--batch_per_device", "16", "--write", str(written)]
    code = "import sys; from cnnstrategies.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    lines = result.stdout.splitlines()
    assert lines[-1] == "False"
    assert "…" not in result.stdout, "80 columns are enough"
    assert re.search(r"^ hybrid \[2, 2\], M=\d+ +[\d.]+ +\d+ +compute", result.stdout, re.MULTILINE)
    assert re.search(r"^ ddp +\d+ +\d+ +nic +\S+ +\S+ +[\d.]+", result.stdout, re.MULTILINE)
    assert "cost: price of training a million samples" in result.stdout
    strategy = yaml.safe_load(written.read_text())["trainer"]["strategy"]
    assert strategy["init_args"]["replicas"] == [2, 2]
    assert "cuts" not in strategy["init_args"], "fit does not know the profile's names"


def test_missing_or_invalid_options_are_named(files: list[str]) -> None:
    file_options = profile, batch, cluster = files[1:]
    for words, message in (
        (
            ["--config", QUICKSTART, "--profile=net.csv"],
            "profile: the arguments have a configuration and a profile",
        ),
        ([profile, cluster], "profile_batch is missing"),
        ([profile, batch], "cluster is missing: give a YAML file"),
        (file_options, "batch_size is missing: give the number of samples in a step"),
        (
            [*file_options, "--batch_size=8", "--batch_per_device=2"],
            "batch_size and batch_per_device set the same number",
        ),
        ([*file_options, "--batch_size=0"], "batch_size=0: a step needs at least 1 sample"),
        ([*file_options, "--batch_size=many"], "--batch_size: 'many' is not accepted; it must be a whole number"),
        ([*file_options, "--cluster"], "--cluster needs a value: YAML file that describes the machines"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            COMMANDS["plan"].run([*words])


def test_a_configuration_is_measured_and_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timetable = tmp_path / "plan.png"
    COMMANDS["plan"].run(["--config", QUICKSTART, "--bandwidth", "1000", f"--timetable={timetable}"])
    text = capsys.readouterr().out
    assert "\n ddp " in text
    assert "stage 0: block1" in text
    assert "of 64 samples" not in text, "two devices divide the samples evenly"
    assert timetable.read_bytes().startswith(b"\x89PNG")
    assert "proportional to the samples" not in text, "two batch sizes are measured"


def test_the_number_of_devices_must_be_known_and_equal_the_clusters(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"trainer.devices=auto: a plan needs the number of devices"):
        COMMANDS["plan"].run(["--config", QUICKSTART, "--trainer.devices", "auto"])
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    message = rf"{file}: nodes: the machines have 4 devices, but trainer.devices x trainer.num_nodes is 2"
    with pytest.raises(ConfigurationError, match=message):
        COMMANDS["plan"].run(["--config", QUICKSTART, f"--cluster={file}"])


def test_options_of_a_hybrid_pipeline_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = {
        "class_path": "cnnstrategies.strategies.hybrid_pipeline.HybridPipelineStrategy",
        "init_args": {
            "replicas": [2, 1],
            "cuts": ["pool1"],
            "microbatches": 6,
            "schedule": "gpipe",
            "shares": [2, 1, 1],
        },
    }
    arguments = {
        "config": QUICKSTART,
        "trainer.devices": 3,
        "trainer.accumulate_grad_batches": 2,
        "trainer.strategy": json.dumps(strategy),
        "bandwidth": 1000,
    }
    COMMANDS["plan"].run([*[f"--{name}={value}" for name, value in arguments.items()]])
    text = " ".join(capsys.readouterr().out.split())
    assert "hybrid [2, 1], M=6: the devices get 4, 2, 6 microbatches of a step" in text
    assert "stage 0: block1_0_0 to pool1" in text
    assert "for 32 samples" in text, "all samples, although the 6 microbatches have unequal sizes"
    assert "on 3 devices, gpipe" in text


def test_a_plan_uses_the_microbatches_of_fit(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--data.init_args.batch_size=16", "--data.init_args.global_batch_size=null"]
    COMMANDS["plan"].run(["--config", QUICKSTART, "--bandwidth=1000", "--trainer.strategy=hybrid_pipeline", *sizes])
    assert re.search("for 16 .* with 2 microbatches", " ".join(capsys.readouterr().out.split()))
