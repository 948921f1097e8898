"""Invalid options of clusters, names and addresses are refused with the reason."""

import re
import socket
from collections.abc import Callable
from functools import partial

import pytest

from cnnstrategies.cluster.addresses import find_interface, main_port_of, resolve
from cnnstrategies.cluster.hosts import Interconnect
from cnnstrategies.cluster.job import Size, job_size
from cnnstrategies.cluster.launchers.slurm import tasks_per_node
from cnnstrategies.cluster.options import ClusterOptions, KubernetesOptions, RayOptions
from cnnstrategies.cluster.ray.connection import demand
from cnnstrategies.cluster.run_folder import find_run
from cnnstrategies.errors import ConfigurationError

pytestmark = pytest.mark.light

UNNAMED = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "3"}
NAMES = ("", "a/b", "..", "-x", "a b", "version_3", "x" * 121)  # These names cannot be names of folders.
REFUSED: list[tuple[Callable[[], object], str]] = [
    (partial(ClusterOptions, time=5400), "without quotes"),
    (partial(ClusterOptions, signal_seconds=10), "at least 30"),
    (partial(ClusterOptions, job_name="bash"), "assumes an interactive shell"),
    (partial(ClusterOptions, job_name="a b"), "letters, digits"),
    (partial(ClusterOptions, cpus_per_task=0), "cpus_per_task=0"),
    (partial(ClusterOptions, sbatch=["exclusive"]), "must be one option of sbatch"),
    (partial(ClusterOptions, sbatch=["--nodes=3"]), "according to trainer.num_nodes: leave"),
    (partial(ClusterOptions, sbatch=["-N 3"]), "according to trainer.num_nodes: leave"),
    (partial(ClusterOptions, sbatch=["-N2"]), "according to trainer.num_nodes: leave"),
    (partial(ClusterOptions, sbatch=["--exclusive -n8"]), "according to trainer.devices: leave"),
    (partial(ClusterOptions, sbatch=["--gres=gpu:2"]), "according to trainer.devices: leave"),
    (partial(ClusterOptions, sbatch=["--gres gpu:2"]), "according to trainer.devices: leave"),
    (partial(ClusterOptions, sbatch=["--array=0-3"]), "according to cluster.folder: leave"),
    (
        partial(ClusterOptions, server_nodes=1, server_sbatch=["-N3"]),
        "cluster.server_sbatch: submit sets the option in '-N3'",
    ),
    (partial(ClusterOptions, python="apptainer exec a.sif python"), "container='apptainer exec a.sif' and cluster.py"),
    (partial(ClusterOptions, server_nodes=-1), "server_nodes=-1"),
    (partial(ClusterOptions, server_sbatch=["--mem=8G"]), "has no effect without server nodes"),
    (partial(KubernetesOptions, grace_seconds=15), "at least 20"),
    (partial(KubernetesOptions, max_restarts=-1), "negative"),
    (partial(KubernetesOptions, volumes={"runs": "runs"}), "absolute path"),
    (partial(KubernetesOptions, volumes={"/dev/shm/mine": "runs"}), "outside of"),
    (partial(KubernetesOptions, pod={"volumes": []}), "pod: submit sets volumes"),
    (partial(KubernetesOptions, env={"PET_NNODES": "3"}), "submit sets PET_NNODES"),
    (partial(RayOptions, max_restarts=-1), "cluster.ray.max_restarts=-1"),
    (partial(RayOptions, wait=0), "cluster.ray.wait=0"),
    (partial(Interconnect, timeout=0), "interconnect.timeout=0 is too short: it must be above 0"),
    (partial(job_size, 1, "auto", "gpu"), "trainer.devices=auto"),
    (partial(job_size, 1, -1, "gpu"), "trainer.devices=-1"),
    (partial(job_size, 1, 2, "auto"), "trainer.accelerator=auto"),
    (partial(demand, ClusterOptions(memory="much"), Size(1, 1, 0)), "cluster.memory='much'"),
    (partial(find_interface, "none0"), rf"{socket.gethostname()} has no interface 'none0'; use one of lo (127.0.0.1)"),
    (partial(find_interface, "10.0.0.0/99"), "'10.0.0.0/99' is not a subnet"),
    (partial(resolve, "nowhere.invalid"), "cannot resolve the host name 'nowhere.invalid'"),
    (partial(main_port_of, {"MASTER_PORT": ""}), "MASTER_PORT='' is not a port from 1 to 65535: set it to a free port"),
    (partial(main_port_of, {"MASTER_PORT": "0"}), "MASTER_PORT='0' is not a port from 1 to 65535: set it to a free"),
    (partial(main_port_of, {"MASTER_PORT": "tcp://10.0.0.1:80"}), "'tcp://10.0.0.1:80' is not a port from 1 to 65535"),
    (partial(tasks_per_node, {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}), "different numbers of tasks on the nodes"),
    (partial(find_run, None, "hash", UNNAMED), "--run_name <name>"),
    *((partial(find_run, name, "", {}), "run_name=") for name in NAMES),
    (partial(find_run, None, "", {"CNNSTRATEGIES_RUN_NAME": ".."}), "CNNSTRATEGIES_RUN_NAME="),
]


def test_invalid_cluster_options_and_names_are_refused() -> None:
    for call, words in REFUSED:
        with pytest.raises(ConfigurationError, match=re.escape(words)):
            call()


def test_valid_options_that_resemble_invalid_ones_are_accepted() -> None:
    lines = ["--exclusive", "-p gpu", "--gres=nvme:1", "--gpu-freq=high", "--nodelist=n1", "-w n1", "--mail-type=END"]
    ClusterOptions(sbatch=lines, server_nodes=1, server_sbatch=["--cpus-per-task=8", "--mem=8G"])
