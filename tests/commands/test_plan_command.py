"""``cnnstrategies plan`` for configurations, and for a profile and a cluster file without a configuration."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cnnstrategies.commands.arguments.options import COMMANDS, PlanOptions
from cnnstrategies.commands.plan import largest, written
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.planning.candidates import Job
from cnnstrategies.planning.costs import UNMEASURED, Link
from cnnstrategies.planning.devices import Device
from tests.planning.test_unequal import job, room

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
        ([*file_options, "--have=1x8GiB"], "have='1x8GiB' and cluster=.* both describe the devices: leave one"),
        ([profile, batch, "--have=1x8GiB"], "bandwidth is missing: --have does not describe the connections"),
        ([profile, batch, "--have=8GiB", "--bandwidth=1000"], "have='8GiB': '8GiB' is not a group of devices"),
        ([profile, batch, "--have=doctor"], "cluster is missing: give a YAML file .* or a list of devices with --have"),
        (
            ["--config", QUICKSTART, "--have=3x8GiB", "--trainer.num_nodes=2"],
            "have='3x8GiB': 3 devices do not divide evenly among the machines of trainer.num_nodes=2",
        ),
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


def test_connections_that_options_describe_have_prices_of_sums_and_exchanges() -> None:
    assert PlanOptions(sum_latency=2.0).link("gloo") is None
    assert PlanOptions(bandwidth=8.0, latency=1.0).link("nccl") == Link(1e6, 1e-3, 0.0, *UNMEASURED["nccl"])
    options = PlanOptions(bandwidth=8.0, latency=1.0, sum_latency=2.0, exchange_latency=0.0)
    assert options.link("gloo") == Link(1e6, 1e-3, sum=2e-3, exchange=0.0)


def test_the_error_if_nothing_fits_names_the_largest_batch(files: list[str]) -> None:
    """The classifier has 100 MB of parameters, so a device with 300 MiB can only be a parameter server's worker."""
    words = [*files[1:3], "--bandwidth=1000", "--batch_size=40000"]
    message = (
        "^no strategy fits into the devices' memory: .* comes closest, and needs .* on rank 0, whose device has 300 "
        r"MiB: .* too much on rank 0; .* a batch of at most \d+ samples fits, with parameter_server.*: give "
        r"--batch_size \d+"
    )
    with pytest.raises(ConfigurationError, match=message):
        COMMANDS["plan"].run([*words, "--have=1x300MiB, 1x301MiB"])
    with pytest.raises(ConfigurationError, match=r"^no strategy fits into the devices' memory: (?!.*batch of at most)"):
        COMMANDS["plan"].run([*words, "--have=2x1MiB"])


def test_a_plan_for_unequal_devices_shows_each_device(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*files[1:3], "--bandwidth=1000", "--batch_size=64", "--have=1x24GiB@1.0, 2x2GiB@0.4"]
    COMMANDS["plan"].run(words)
    text = capsys.readouterr().out
    assert text.count("busy limited by") == 3
    assert "…" not in text
    assert re.search(r"^ +\d +2 +0\.4 +2\.00 GiB", text, re.MULTILINE)


def test_the_largest_batch_is_predicted_and_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trial is simulated here: a rank runs out of memory with more than 90 % of the predicted batch."""
    tried: list[int] = []

    def simulated(folder: Path, file: Path) -> str | None:
        tried.append(yaml.safe_load(file.read_text())["data"]["init_args"]["global_batch_size"])
        return "rank 1 was ended by SIGKILL" if tried[-1] > 0.9 * tried[0] else None

    monkeypatch.setattr(largest, "try_steps", simulated)
    file = tmp_path / "largest.yaml"
    words = ["--config", QUICKSTART, "--bandwidth=1000", "--largest_batch", f"--write={file}"]
    COMMANDS["plan"].run([*words, "--have=1x8MiB, 1x6MiB"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"Largest batch by prediction: {tried[0]} samples" in text
    assert re.search(r"MiB \w+ \d+ \d+% memory", text)
    assert f"Not confirmed: with {tried[0]} samples a rank ran out of memory: rank 1 was ended by SIGKILL" in text
    assert f"Confirmed: {tried[1]} samples, with 2 steps on all 2 ranks together" in text
    written = yaml.safe_load(file.read_text())
    assert written["data"]["init_args"]["global_batch_size"] == tried[1]
    assert written["trainer"]["devices"] == 2


def test_a_largest_batch_that_is_never_confirmed_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(largest, "try_steps", lambda folder, file: "out of memory")
    monkeypatch.setattr(written, "planned", lambda ranking, row, configuration: ({}, []))
    made = job(Device(memory=room(50)), Device(memory=room(50)))

    def show(of: Job, machines: int = 1) -> str:
        configuration: Any = SimpleNamespace(config=SimpleNamespace(trainer=SimpleNamespace(num_nodes=machines)))
        largest.show_largest(of, ["ddp"], 1000, configuration, None)
        return capsys.readouterr().out

    with pytest.raises(SystemExit):
        show(made)
    text = capsys.readouterr().out
    first = int(re.findall(r"prediction: (\d+) samples", text)[0])
    tried = map(int, re.findall(r"Not confirmed: with (\d+) samples a rank ran out of memory", text))
    assert [*tried] == [first, *(int(first * fraction) for fraction in (0.9, 0.8, 0.7))]
    assert "Not confirmed, because the configuration has trainer.num_nodes=2" in show(made, machines=2)
    with pytest.raises(ConfigurationError, match="largest_batch: not even one sample for each of the 2 devices fits"):
        show(job(Device(memory=1000), Device(memory=1000)))
    with pytest.raises(ConfigurationError, match="largest_batch: the memory of the devices is not known; give it"):
        show(job(Device(), Device()))


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


def test_a_data_module_may_ask_the_trainer_for_the_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    COMMANDS["plan"].run(["--config", QUICKSTART, "--bandwidth=1000", "--data=tests.asking_data.AskingData"])
    assert "for 64 samples" in " ".join(capsys.readouterr().out.split()), "each of two processes loads 32"


def test_two_devices_may_divide_a_batch_of_one_image(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", QUICKSTART, "--bandwidth=1000", "--data.init_args.global_batch_size=1"]
    COMMANDS["plan"].run([*words, "--trainer.strategy=spatial"])
    assert "spatial, parts=2" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="global_batch_size=1 is less than one sample for each of 2 processes"):
        COMMANDS["plan"].run([*words, "--trainer.strategy.class_path=spatial", "--trainer.strategy.init_args.parts=1"])
