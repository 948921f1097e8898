"""Tests of one script that calls validate, fit, validate, test, predict, save_checkpoint, fit and a second Trainer.

Under every strategy and every launcher, results equal one device. The second Trainer resumes from a checkpoint under a
different strategy. Like Lightning's own DDP, a launcher that forks or spawns ranks does not bring back the Trainer's
loops and optimizers.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.multiprocessing.spawn import ProcessRaisedException

from cnnstrategies.strategies import HybridPipelineStrategy
from tests.cluster.processes_of import Program
from tests.runner.forked import in_fork
from tests.runner.ranks import run_ranks
from tests.strategies.chain_program import Chain, Leftovers
from tests.strategies.digit_runs import assert_same_run

# By strategy: the strategy of the second Trainer.
OTHERS = {"ddp": "hybrid_pipeline", "hybrid_pipeline": "parameter_server", "parameter_server": "ddp"}
PROGRAM = Path(__file__).with_name("chain_program.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TWICE = "Calling `trainer.fit()` twice on the same Trainer"


@pytest.fixture(scope="module")
def single_device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of files that the program leaves on one device."""
    folder = tmp_path_factory.mktemp("one")
    in_fork(lambda: Chain("auto", "auto", folder, devices=1).run())
    return folder


def load(folder: Path, name: str) -> Any:
    return torch.load(folder / name, weights_only=True)


def assert_equals_one_device(folder: Path, single_device: Path, ranks: int = 2) -> None:
    """Assert that a folder of several ranks equals one device's folder.

    Metrics, weights, predictions and checkpoints are compared, on every rank that runs the script.
    """
    refused = (folder / "refusal.txt").exists()
    expected = load(single_device, "notes_of_rank_0.pt")
    assert expected["test the best"]["weights"] != pytest.approx(expected["fit"]["weights"], rel=1e-6)
    for rank in range(1 if refused else ranks):
        notes = load(folder, f"notes_of_rank_{rank}.pt")
        assert refused or list(notes) == list(expected)
        for function, got in notes.items():
            wanted = expected[function]
            # Weights that a test loads stay in the ranks, and the parent has the metrics of all functions so far.
            weights = expected["fit" if refused and function == "test the best" else function]["weights"]
            assert got["weights"] == pytest.approx(weights, rel=1e-9), (rank, function)
            metrics = {name: got["metrics"][name] for name in (wanted if refused else got)["metrics"]}
            assert metrics == pytest.approx(wanted["metrics"], rel=1e-6), (rank, function)
            assert refused or got["global_step"] == wanted["global_step"], (rank, function)
    if "predict" in notes:
        assert_same_rows(folder, single_device)
    for name in ("best.ckpt", "end_of_2.ckpt", "after_fit.ckpt", *([] if refused else ["after_second_fit.ckpt"])):
        got, wanted = load(folder, name), load(single_device, name)
        if refused and name == "after_fit.ckpt":  # Only the ended ranks had more than the weights.
            assert got["optimizer_states"] == []
            more = ("optimizer_states", "lr_schedulers", "global_step")
            got |= {key: wanted[key] for key in more}
        assert_same_run(got, wanted)


def assert_same_rows(folder: Path, single_device: Path) -> None:
    rows: dict[int, list[float]] = {}
    for path in folder.glob("rows_of_rank_*.pt"):
        part = load(folder, path.name)
        assert not rows.keys() & part.keys(), "a row was predicted twice"
        rows |= part
    expected = load(single_device, "rows_of_rank_0.pt")
    assert rows.keys() == expected.keys()
    for index, row in expected.items():
        assert rows[index] == pytest.approx(row, rel=1e-8), index


@pytest.mark.cluster
@pytest.mark.warm
@pytest.mark.parametrize(
    ("strategy", "launcher"),
    [
        ("ddp", ()),
        ("hybrid_pipeline", ()),
        ("parameter_server", ()),
        ("hybrid_pipeline", TORCHRUN),
        ("parameter_server", TORCHRUN),
        ("hybrid_pipeline_spawn", ()),
        ("parameter_server_spawn", ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "torchrun" * bool(value),
)
def test_programs_equal_one_device(strategy: str, launcher: Sequence[str], single_device: Path, tmp_path: Path) -> None:
    """Programs are started as users start them; their ranks are programs or spawned processes."""
    other = OTHERS[strategy.removesuffix("_spawn")]
    program = Program([sys.executable, *launcher, str(PROGRAM), strategy, other, str(tmp_path)], tmp_path / "log")
    assert program.wait() == 0, program.output()
    assert_equals_one_device(tmp_path, single_device)
    assert not strategy.endswith("spawn") or TWICE in (tmp_path / "refusal.txt").read_text()


@pytest.mark.parametrize("strategy", [pytest.param("hybrid_pipeline", marks=pytest.mark.cluster), "parameter_server"])
def test_forked_ranks_equal_one_device(strategy: str, single_device: Path, tmp_path: Path) -> None:
    """A checkpoint that is saved after the ranks' end has weights only, and fit cannot resume from it."""
    chain = Chain(f"{strategy}_fork", f"{OTHERS[strategy]}_fork", tmp_path)
    chain.run()
    assert_equals_one_device(tmp_path, single_device)
    assert TWICE in (tmp_path / "refusal.txt").read_text()
    with pytest.raises(ProcessRaisedException, match="the states of 0 optimizers, but this run has 1"):
        chain.trainer(f"{strategy}_fork", 3).fit(chain.model, chain.data, ckpt_path=tmp_path / "after_fit.ckpt")


def as_rank(chain: tuple[Any, ...]) -> None:
    """Run the script in a rank that was not started by a Trainer's launcher, like ranks of torchrun."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": str(dist.get_world_size())}
    Chain(*chain).run()


@pytest.mark.cluster  # This test takes long.
def test_weight_averages_and_replicas_equal_one_device(tmp_path: Path) -> None:
    single_device, three = tmp_path / "one", tmp_path / "three"
    single_device.mkdir()
    three.mkdir()
    averages = [EMAWeightAveraging(decay=0.7)]
    in_fork(lambda: Chain("auto", "auto", single_device, 1, averages).run())
    strategies = [
        HybridPipelineStrategy(replicas=replicas, cuts=["1"], microbatches=4) for replicas in ([2, 1], [1, 2])
    ]
    run_ranks(3, as_rank, (*strategies, three, 3, averages))
    assert_equals_one_device(three, single_device, ranks=3)
    for name in ("after_fit.ckpt", "best.ckpt", "after_second_fit.ckpt"):
        expected = load(single_device, name)["current_model_state"]
        got = load(three, name)["current_model_state"]
        assert list(got) == list(expected)
        assert all(torch.allclose(got[key], expected[key], rtol=1e-9) for key in expected), name


class Weights(Callback):
    """A callback that saves each rank's weights when fit ends."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(pl_module.state_dict(), f"weights_of_rank_{trainer.global_rank}.pt")


def test_asynchronous_training_ends_with_averaged_weights(tmp_path: Path) -> None:
    """The servers hold the weights before averaging, and must not overwrite the averages."""
    chain = Chain("parameter_server_async_fork", "ddp_fork", tmp_path)
    callbacks = [Leftovers(tmp_path), Weights(), EMAWeightAveraging(decay=0.7)]
    chain.trainer(chain.strategy, 2, *callbacks).fit(chain.model, chain.data)
    end = load(tmp_path, "end_of_2.ckpt")
    ranks = [load(tmp_path, f"weights_of_rank_{rank}.pt") for rank in range(2)]
    for name, average in end["state_dict"].items():
        assert torch.equal(end["current_model_state"][name], average), name
        assert all(torch.equal(rank[name], average) for rank in ranks), name
