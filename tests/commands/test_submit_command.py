"""``cnnstrategies submit``: what it prints without SLURM, and what it refuses before a job is queued."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cnnstrategies import cli
from cnnstrategies.cluster.run_folder import write_record
from cnnstrategies.commands.submit.command import check, main
from cnnstrategies.commands.submit.kubernetes import KubernetesTarget
from cnnstrategies.commands.submit.slurm import write
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import ParameterServerStrategy

QUICKSTART = f"--config={ROOT / 'configs/quickstart.yaml'}"
TWO_NODES = ["--trainer.num_nodes=2", "--trainer.devices=1"]


def test_dry_run_prints_the_script_and_writes_nothing(capsys):
    os.environ["PATH"] = "/nowhere"
    for spelling in ("--dry_run", "--dry-run"):
        cli.main(["submit", "fit", QUICKSTART, *TWO_NODES, "--cluster.partition=short", spelling])
        output = capsys.readouterr().out
        assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in output
        assert "#SBATCH --partition=short\n" in output
        assert not list(Path().iterdir())
    assert "sbatch is not found: submit on a login node" in refusal([QUICKSTART, *TWO_NODES], capsys)


def test_one_file_serves_fit_and_submit(run_cli):
    """The file that a job reads is whole, names the job's own folder, and is accepted by `fit`."""
    submission = check([QUICKSTART, *TWO_NODES, "--cluster.account=biology", "--trainer.max_epochs=7"])
    folder = Path("cnn-1").resolve()
    write(submission, folder)
    code, output = run_cli("fit", f"--config={folder / 'config.yaml'}", "--print_config")
    assert code == 0, output
    config = yaml.safe_load(output)
    assert config["trainer"]["max_epochs"] == 7
    assert config["model"]["init_args"]["lr_scheduler"]["init_args"]["T_max"] == 7
    assert config["cluster"]["account"] == "biology"
    assert config["checkpoint"]["dirpath"] == str(folder / "checkpoints")
    # By which a job that is queued again goes on.
    assert config["run_name"] == config["trainer"]["logger"]["init_args"]["version"] == "cnn-1"
    assert config["stop"] == {"grace": 10.0, "warning_signal": "USR1", "warning_grace": 100.0, "on_each_node": False}


def test_a_job_goes_on_from_its_own_checkpoints_only():
    """What `fit` would refuse in the job is refused before it is queued."""
    submit = ["submit", "fit", QUICKSTART, *TWO_NODES, "--dry_run"]
    Path("mine").mkdir()
    Path("mine/last.ckpt").touch()
    own = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=mine"]
    with pytest.raises(ConfigurationError, match=r"mine/last.ckpt is not of the run cnnstrategies-\d+"):
        main([*submit, *own])
    write_record(Path("mine"), {"run": "resnet"})
    main([*submit, *own, "--run_name=resnet"])
    with pytest.raises(ConfigurationError, match="fresh: a job has this option at each restart"):
        main([*submit, "--fresh"])


HYBRID = f"--config={ROOT / 'configs/experiments/digits_smallcnn_hybrid_3-1_cpu.yaml'}"
SERVER = "--trainer.strategy.init_args"
PARAMETER_SERVER = [QUICKSTART, "--trainer.strategy=ParameterServerStrategy", f"{SERVER}.mode=async"]
REFUSED = {
    "parameter server without keys": ([*PARAMETER_SERVER, "--trainer.num_nodes=2"], "make a key file with"),
    "server nodes of another strategy": ([QUICKSTART, "--cluster.server_nodes=1"], "trainer.strategy=ddp: "),
    "server nodes and endpoints": (
        [
            *(*PARAMETER_SERVER, f"{SERVER}.security=none", f'{SERVER}.endpoints=["tcp://10.0.0.5:7700"]'),
            *(f"{SERVER}.coordinator=tcp://10.0.0.1:7000", "--cluster.server_nodes=1"),
        ],
        "leave out endpoints",
    ),
    "nodes disagree with the layout": ([HYBRID, *TWO_NODES], r"replicas=\[3, 1\] need 4 devices, but there are 2"),
    "global batch of a pipeline": (
        [HYBRID, "--trainer.num_nodes=4", "--trainer.devices=1", "--data.init_args.global_batch_size=64"],
        "by 3 processes that load: use 63 or 66",
    ),
    "own processes": ([QUICKSTART, "--trainer.strategy=ddp_spawn"], "starts its processes itself"),
    "no checkpoints": ([QUICKSTART, "--trainer.enable_checkpointing=false"], "from the beginning each time"),
}


def test_what_cannot_run_is_refused(capsys):
    for name, (args, message) in REFUSED.items():
        assert re.search(message, refusal([*args, "--dry_run"], capsys)), name


def refusal(args, capsys):
    """Why the command line ends, in a line, without a job."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(["submit", "fit", *args])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("cnnstrategies: error: ")


KUBERNETES = [QUICKSTART, *TWO_NODES, "--to=kubernetes", "--cluster.job_name=cnn", "--cluster.kubernetes.image=cnn:1"]
VOLUME = '--cluster.kubernetes.volumes={"/runs": "runs"}'
PS = ["--trainer.strategy=ParameterServerStrategy", f"{SERVER}.mode=async"]
BY_KUBERNETES = {
    "no image": ({"image": None}, {}, "cluster.kubernetes.image: name the container image"),
    "name": ({}, {"job_name": "My_Run"}, "small letters"),
    "no volume": ({"volumes": {}}, {}, r"only in a volume; add one .* cluster.kubernetes.volumes: {/runs: CLAIM}"),
    "folder elsewhere": ({}, {"folder": Path("/data")}, "choose a directory in /runs"),
    "keys of nothing": ({"key_secret": "run-key"}, {}, "is for a ParameterServerStrategy"),
}


def test_what_kubernetes_cannot_run_is_refused():
    base = check([*KUBERNETES, VOLUME])

    def refused(base, why):
        with pytest.raises(ConfigurationError, match=why):
            KubernetesTarget(base, "")

    for own, options, why in BY_KUBERNETES.values():
        kubernetes = replace(base.options.kubernetes, **own)
        refused(replace(base, options=replace(base.options, kubernetes=kubernetes, **options)), why)
    server = ParameterServerStrategy(mode="async")
    refused(replace(base, parameter_server=server), "kubectl create secret generic run-key --from-file=run.key")
    base.cli.config.checkpoint.dirpath = "/data"
    refused(base, "checkpoint.dirpath=/data: .* choose")


def test_the_pods_read_a_configuration_that_fits_them(capsys):
    """Their servers by name, the key where the pod has it, a grace that ends before the pod's."""
    keys = ["--cluster.kubernetes.key_secret=run-key", "--cluster.server_nodes=2"]
    slurms = ["--cluster.partition=short", "--cluster.memory=64G", "--cluster.python=python3"]
    main(["submit", "fit", *KUBERNETES, VOLUME, *PS, *keys, *slurms, "--dry_run"])
    said = capsys.readouterr()
    assert said.err == "Note: with --to kubernetes these keys do not count: cluster.partition, cluster.memory\n"
    configuration, _, _, job = yaml.safe_load_all(said.out)
    name = job["metadata"]["name"]
    config = yaml.safe_load(configuration["data"]["config.yaml"])
    strategy = config["trainer"]["strategy"]["init_args"]
    assert strategy["endpoints"] == [f"tcp://{name}-servers-{number}.{name}:29600" for number in (0, 1)]
    assert strategy["coordinator"] == f"tcp://{name}-0.{name}:29500"
    assert strategy["key_file"] == "/dev/shm/run.key"
    assert config["checkpoint"]["dirpath"] == f"/runs/{name}/checkpoints"
    assert (config["stop"]["grace"], config["stop"]["on_each_node"]) == (110, True)
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 120
    variables = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == (f"{name}-0.{name}", "29500")
    main(["submit", "doctor", *KUBERNETES, VOLUME, *PS, *keys, "--dry_run"])
    jobs = list(yaml.safe_load_all(capsys.readouterr().out))[-2:]
    assert [job["spec"]["completions"] for job in jobs] == [2, 2]  # Of the servers, and of the trainer.
    for job in jobs:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert "cnnstrategies doctor --shared" in container["command"][-1]
        assert job["spec"]["backoffLimit"] == 0
    without = ["--trainer.enable_checkpointing=false", "--dry_run"]
    with pytest.raises(ConfigurationError, match=r"a pod would start .*; set cluster\.kubernetes\.max_restarts to 0"):
        main(["submit", "fit", *KUBERNETES, VOLUME, *without])
    with pytest.raises(ConfigurationError, match=r"trainer\.num_nodes=1: doctor checks what lies between nodes"):
        main(["submit", "doctor", *KUBERNETES, VOLUME, "--trainer.num_nodes=1", *without])


def test_a_mistake_is_explained_as_by_fit(capsys):
    line = refusal([QUICKSTART, "--cluster.kubernetes.imag=cnn"], capsys)
    assert line.startswith("unknown key cluster.kubernetes.imag: ")
    with pytest.raises(ConfigurationError, match="submit takes fit"):
        main(["submit", "train", QUICKSTART])
