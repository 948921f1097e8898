"""``cnnstrategies submit``: what it prints without SLURM, and what it refuses before a job is queued."""

import os
import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cnnstrategies.cluster.run_folder import write_record
from cnnstrategies.commands.submission import check
from cnnstrategies.commands.submit import main
from cnnstrategies.commands.submit_slurm import write
from cnnstrategies.errors import ConfigurationError

QUICKSTART = f"--config={ROOT / 'configs/quickstart.yaml'}"
TWO_NODES = ["--trainer.num_nodes=2", "--trainer.devices=1"]


def test_dry_run_prints_the_script_and_writes_nothing(run_cli):
    os.environ["PATH"] = "/nowhere"
    for spelling in ("--dry_run", "--dry-run"):
        code, output = run_cli("submit", "fit", QUICKSTART, *TWO_NODES, "--cluster.partition=short", spelling)
        assert code == 0, output
        assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in output
        assert "#SBATCH --partition=short\n" in output
        assert not list(Path().iterdir())
    code, output = run_cli("submit", "fit", QUICKSTART, *TWO_NODES)
    assert code == 2
    assert "sbatch is not found: submit on a login node" in output.splitlines()[-1]


def test_one_file_serves_fit_and_submit(run_cli):
    """The file that a job reads is whole, names the job's own folder, and is accepted by `fit`."""
    submission = check([QUICKSTART, *TWO_NODES, "--cluster.account=biology", "--trainer.max_epochs=7"])
    folder = Path("cnn-1").resolve()
    write(submission, folder / "0")
    assert yaml.safe_load((folder / "0/config.yaml").read_text())["run_name"] == "cnn-1-0"  # Of a sweep's task.
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
    assert config["stop"] == {"grace": 10.0, "warning_signal": "USR1", "warning_grace": 100.0}


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
    "global batch": ([QUICKSTART, "--trainer.num_nodes=3"], "by 6 processes that load: use 60 or 66"),
    "global batch of a pipeline": (
        [HYBRID, "--trainer.num_nodes=4", "--trainer.devices=1", "--data.init_args.global_batch_size=64"],
        "by 3 processes that load: use 63 or 66",
    ),
    "nodes disagree with an option of sbatch": ([QUICKSTART, '--cluster.sbatch=["--nodes=3"]'], "could disagree"),
    "own processes": ([QUICKSTART, "--trainer.strategy=ddp_spawn"], "starts its processes itself"),
    "no checkpoints": ([QUICKSTART, "--trainer.enable_checkpointing=false"], "from the beginning each time"),
    "unknown number of devices": ([QUICKSTART, "--trainer.devices=auto"], "trainer.devices=auto"),
    "sweep into one folder": (
        [QUICKSTART, "--checkpoint.dirpath=here", '--cluster.sweep={"seed_everything": [1, 2]}'],
        "overwrite each other's checkpoints",
    ),
    "sweep of sizes": (
        [QUICKSTART, '--cluster.sweep={"trainer.devices": [1, 2]}'],
        "tasks of an array are of one size",
    ),
}


@pytest.mark.parametrize(("args", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_run_is_refused(run_cli, args, message):
    code, output = run_cli("submit", "fit", *args, "--dry_run")
    assert code == 2
    assert re.search(f"cnnstrategies: error: .*{message}", output.splitlines()[-1])


def test_a_mistake_is_explained_as_by_fit(run_cli):
    code, output = run_cli("submit", "fit", QUICKSTART, "--cluster.partitions=short")
    assert code == 2
    assert "unknown key cluster.partitions: ClusterOptions has no 'partitions'; did you mean 'partition'?" in output
    code, output = run_cli("submit", "train", QUICKSTART)
    assert code == 2
    assert "submit takes fit" in output.splitlines()[-1]
