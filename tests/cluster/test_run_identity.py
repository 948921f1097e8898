"""The launch of a run: equal on all ranks of a launch, and different for two launches."""

import pytest

from cnnstrategies.cluster.run_identity import FIRST_PORT, launch_of, launch_secret, process_start
from cnnstrategies.identity import LAUNCH, LONGEST, Identity

pytestmark = pytest.mark.light

SLURM = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
MPI = {
    "PMI_RANK": "0",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
BY_HAND = {"NODE_RANK": "0", "NNODES": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        (SLURM, "SLURM step 12.3"),
        ({**SLURM, "SLURM_RESTART_COUNT": "2"}, "SLURM step 12.3 after 2 requeues"),
        ({**SLURM, **TORCHRUN, "TORCHELASTIC_RUN_ID": "digits"}, "torchrun digits"),
        # Each torchrun of this run may have been started by a step of its own.
        ({**SLURM, **TORCHRUN}, ""),
        ({"SLURM_JOB_ID": "12", LAUNCH: "0123 process 7 on n1"}, "SLURM step 12, process 7 on n1"),
        ({LAUNCH: "0123 process 7 on n1"}, "process 7 on n1"),
        ({**SLURM, LAUNCH: "0123"}, "SLURM step 12.3"),
        (BY_HAND, "MASTER_PORT 29500"),
        ({**BY_HAND, FIRST_PORT: "29500", "MASTER_PORT": "41234"}, "MASTER_PORT 29500"),
        ({}, ""),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "cnn-1129-0", "JOB_COMPLETION_INDEX": "0"},
            "Kubernetes kubernetes_cnn-1129",
        ),
    ],
)
def test_a_launch_has_a_name(environ: dict[str, str], launch: str) -> None:
    assert launch_of(environ) == launch


def test_ranks_of_one_launch_have_one_name_and_two_commands_have_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH has no ids, so the name is a digest of the command, which contains slashes."""
    names = set()
    for run in ("/runs/a", "/runs/b"):
        monkeypatch.setattr("sys.argv", ["cnnstrategies", "fit", f"--trainer.default_root_dir={run}", "x" * 200])
        first, second = launch_of(MPI), launch_of({**MPI, "PMI_RANK": "3", "MPI_LOCALRANKID": "1"})
        assert first == second
        assert len(first) < LONGEST
        names.add(first)
    assert len(names) == 2


def test_the_secret_is_not_part_of_the_identity() -> None:
    environ = {LAUNCH: "0123 process 7 on n1"}
    assert launch_secret(environ) == b"0123"
    assert launch_secret({}) == b""
    identity = Identity("digits", "0123456789ab", launch_of(environ))
    assert "0123 " not in identity.text()
    assert str(identity) == "the run digits (configuration 0123456789ab, process 7 on n1)"
    assert str(Identity()) == "the run without a name"
    assert process_start() > 0


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, Identity("a\nb").text(), Identity("a" * 257).text()])
def test_an_identity_from_elsewhere_is_checked(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Identity.read(text)
