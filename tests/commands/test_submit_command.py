"""``cnnstrategies submit`` without a cluster: printed scripts, and jobs that are refused before they are queued."""

import contextlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cnnstrategies import cli
from cnnstrategies.cluster.job_files import JobFiles
from cnnstrategies.cluster.launchers import launcher_named, ray
from cnnstrategies.cluster.lease import TOKEN, take
from cnnstrategies.cluster.options import KubernetesOptions
from cnnstrategies.cluster.ray.driver import Driver
from cnnstrategies.cluster.run_folder import write_record
from cnnstrategies.cluster.submission import Submission
from cnnstrategies.commands.arguments.options import COMMANDS
from cnnstrategies.commands.submit.command import check
from cnnstrategies.errors import ConfigurationError
from tests.conftest import ROOT

QUICKSTART = f"--config={ROOT / 'configs/quickstart.yaml'}"
TWO_NODES = ["--trainer.num_nodes=2", "--trainer.devices=1"]


@pytest.mark.parametrize("strategy", [[], ["--trainer.strategy=spatial"]], ids=["auto", "spatial"])
def test_dry_run_prints_the_script_and_writes_nothing(strategy, capsys):
    os.environ["PATH"] = "/nowhere"
    cli.main(["submit", "fit", QUICKSTART, *TWO_NODES, *strategy, "--cluster.partition=short", "--dry-run"])
    output = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in output
    assert "#SBATCH --partition=short\n" in output
    assert not list(Path().iterdir())
    assert "sbatch is not installed: run submit on a login node" in refusal([QUICKSTART, *TWO_NODES], capsys)


def test_one_file_serves_fit_and_submit(run_cli):
    """The job's configuration is complete, names the job's folder, and is accepted by `fit`."""
    submission = check([QUICKSTART, *TWO_NODES, "--cluster.account=biology", "--trainer.max_epochs=7"])
    folder = Path("cnn-1").resolve()
    replace(submission.job(launcher_named("slurm"), "submit"), files=JobFiles(folder)).write()
    code, output = run_cli("fit", f"--config={folder / 'config.yaml'}", "--print_config")
    assert code == 0, output
    config = yaml.safe_load(output)
    assert config["trainer"]["max_epochs"] == 7
    assert config["model"]["init_args"]["lr_scheduler"]["init_args"]["T_max"] == 7
    assert config["cluster"]["account"] == "biology"
    assert config["checkpoint"]["dirpath"] == str(folder / "checkpoints")
    # A job that is queued again needs this name to continue.
    assert config["run_name"] == config["trainer"]["logger"]["init_args"]["version"] == "cnn-1"
    assert config["stop"] == {"grace": 10.0, "warning_signal": "USR1", "warning_grace": 100.0, "on_each_node": False}


HYBRID = f"--config={ROOT / 'configs/experiments/digits_smallcnn_hybrid_3-1_cpu.yaml'}"
SERVER = "--trainer.strategy.init_args"
PARAMETER_SERVER = [QUICKSTART, "--trainer.strategy=ParameterServerStrategy", f"{SERVER}.mode=async"]
REFUSED = {
    "server nodes and a name": (
        [QUICKSTART, "--trainer.strategy=parameter_server", "--cluster.server_nodes=1"],
        "trainer.strategy=parameter_server: ",
    ),
    "server nodes and endpoints": (
        [
            *(*PARAMETER_SERVER, f"{SERVER}.security=none", f'{SERVER}.endpoints=["tcp://10.0.0.5:7700"]'),
            *(f"{SERVER}.coordinator=tcp://10.0.0.1:7000", "--cluster.server_nodes=1"),
        ],
        "leave out endpoints",
    ),
    "nodes disagree with the layout": ([HYBRID, *TWO_NODES], r"replicas=\[3, 1\] need 4 devices, but there are 2"),
    "nodes disagree with the parts": (
        [QUICKSTART, *TWO_NODES, "--trainer.strategy=spatial", "--trainer.strategy.parts=3"],
        "parts=3: 2 devices cannot",
    ),
    "global batch of a pipeline": (
        [HYBRID, "--trainer.num_nodes=4", "--trainer.devices=1", "--data.init_args.global_batch_size=2"],
        "each of 3 processes that load data: set it to at least 3",
    ),
    "a misspelt field of pods": (
        [
            *(QUICKSTART, *TWO_NODES, "--to=kubernetes", "--cluster.kubernetes.image=cnn:1"),
            "--cluster.kubernetes.pod={nodeSelectr: {pool: a100}}",
        ],
        "pod.nodeSelectr is not a field of PodSpec: did you mean nodeSelector?",
    ),
    "own processes": ([QUICKSTART, "--trainer.strategy=ddp_spawn"], "the strategy starts its processes itself"),
}


def test_what_cannot_run_is_refused(capsys):
    for name, (args, message) in REFUSED.items():
        assert re.search(message, refusal([*args, "--dry_run"], capsys)), name
    with pytest.raises(ConfigurationError, match="only fit can be submitted"):
        COMMANDS["submit"].run(["train", QUICKSTART])


def refusal(args, capsys):
    """Return the error message with which `submit` ends, in one line, without a job."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["submit", "fit", *args])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("cnnstrategies: error: ")


def test_jobs_that_a_launcher_cannot_run_are_refused():
    base = check([*PARAMETER_SERVER, "--trainer.num_nodes=2"])

    def refused(launcher, message, base=base, kubernetes=None, **options):
        kubernetes = KubernetesOptions(**{"image": "cnn:1", "volumes": {"/runs": "runs"}, **(kubernetes or {})})
        changed = replace(base.options, **{"kubernetes": kubernetes, "job_name": "cnn", **options})
        with pytest.raises(ConfigurationError, match=message):
            replace(base, options=changed).job(launcher_named(launcher), "submit")

    refused("slurm", "make a key file with")
    refused("ray", "make a key file with")
    refused("ray", "cluster.server_nodes=1 cannot be used with --to ray", server_nodes=1)
    refused("kubernetes", "kubectl create secret generic run-key --from-file=run.key")
    refused("kubernetes", "cluster.kubernetes.image is not set: set the container image", kubernetes={"image": None})
    refused("kubernetes", "lower-case letters, digits", job_name="My_Run")
    base = replace(base, server_options=None)
    refused("kubernetes", "has no effect without a ParameterServerStrategy", base, {"key_secret": "run-key"})
    no_volume = r"is not in a volume, .*: add a volume .* cluster.kubernetes.volumes: {/runs: CLAIM}"
    refused("kubernetes", no_volume, base, {"volumes": {}})
    refused("kubernetes", "set a directory in /runs", base, folder=Path("/data"))
    # If `fit` would refuse the job's configuration, the job is not queued.
    base.config.checkpoint.dirpath = "mine"
    Path("mine").mkdir()
    Path("mine/last.ckpt").touch()
    refused("slurm", r"mine/last.ckpt does not belong to the run cnn-\d+", base)
    refused("kubernetes", r"checkpoint.dirpath=mine is not in .* set", base)
    write_record(Path("mine"), {"run": "resnet"})
    base.config.run_name = "resnet"
    base.job(launcher_named("slurm"), "submit")
    base.config.trainer.enable_checkpointing = False
    refused("slurm", "from the beginning each time", base)
    refused("ray", "set cluster.ray.max_restarts to 0", base)
    refused("kubernetes", r"a pod would start .*; set cluster\.kubernetes\.max_restarts to 0", base)


KUBERNETES = [
    *(QUICKSTART, *TWO_NODES, "--to=kubernetes", "--cluster.job_name=cnn", "--cluster.kubernetes.image=cnn:1"),
    '--cluster.kubernetes.volumes={"/runs": "runs"}',
]


def test_ignored_keys_for_pods_are_named_and_a_stop_ends_before_the_pods_grace(capsys):
    slurms = ["--cluster.partition=short", "--cluster.memory=64G", "--cluster.python=python3"]
    COMMANDS["submit"].run(["fit", *KUBERNETES, *slurms, "--dry_run"])
    output = capsys.readouterr()
    assert output.err == "Note: --to kubernetes ignores these keys: cluster.partition, cluster.memory\n"
    configuration, _, job = yaml.safe_load_all(output.out)
    assert yaml.safe_load(configuration["data"]["config.yaml"])["stop"]["grace"] == 110
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 120


def test_a_ray_nodes_request_is_shown(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # As if Ray were not installed.
    base = check([QUICKSTART, *TWO_NODES, "--trainer.devices=2", "--cluster.cpus_per_task=3"])
    options = replace(base.options, setup=["ulimit -n 4096"], venv=Path("/home/me/venv"))
    shown = replace(base, options=options).job(launcher_named("ray"), "submit").show()
    assert "(STRICT_SPREAD) of 2 nodes with 6 CPUs each" in shown
    lines = "export OMP_NUM_THREADS=3\nulimit -n 4096\nsource /home/me/venv/bin/activate\nexec python -m cnnstrategies "
    assert f"{lines}fit --config {Path.cwd()}/ray/cnnstrategies-" in shown
    with pytest.raises(ConfigurationError, match=r"pip install '\.\[ray\]'"):
        base.job(launcher_named("ray"), "submit").submit()
    assert not list(Path().iterdir())


def test_two_ray_drivers_do_not_write_to_one_run_folder(monkeypatch):
    """The programs that a driver starts know the driver's token, and so may use the driver's folder."""
    base = check([QUICKSTART, *TWO_NODES, "--run_name=digits"])
    monkeypatch.setattr(ray, "connected", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(Submission, "prepare_data", lambda self: None)
    folder = Path("ray/digits")
    codes = []

    def run(driver, connection):
        mine = Path(driver.configuration).read_text()
        assert take(folder, "", driver.variables[TOKEN]).process == 0
        with pytest.raises(ConfigurationError, match=r"digits is already running: .*, Ray.* --run_name digits-2"):
            base.job(launcher_named("ray"), "submit").submit()
        assert [path.name for path in folder.iterdir() if path.suffix == ".yaml"] == ["config.yaml"]
        assert Path(driver.configuration).read_text() == mine
        codes.append(0)
        return codes[0]

    monkeypatch.setattr(Driver, "run", run)
    assert "Logs and checkpoints" in base.job(launcher_named("ray"), "submit").submit()
    assert codes == [0]
