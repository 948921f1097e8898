"""In one script validate, fit, validate, test, predict, save_checkpoint, fit and another Trainer, as on one device.

Under every strategy and every launcher. What a launcher cannot bring back from the ranks that it forked or spawned (the
Trainer's loops and optimizers) is the same as with Lightning's own DDP.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from chain_program import Chain, Leftovers, names
from cluster.processes_of import Program
from conftest import in_fork
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from ranks import run_ranks
from torch.multiprocessing.spawn import ProcessRaisedException

from cnnstrategies.strategies import HybridPipelineStrategy

PROGRAM = Path(__file__).with_name("chain_program.py")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the program leaves on one device."""
    folder = tmp_path_factory.mktemp("one")
    in_fork(lambda: Chain(*names("one"), folder).run())
    return folder


def start(strategy: str, folder: Path, *launcher: str) -> None:
    """Run the program as a user does."""
    program = Program([sys.executable, *launcher, str(PROGRAM), strategy, str(folder)], folder / "log")
    assert program.wait() == 0, program.output()


def load(folder: Path, name: str) -> Any:
    return torch.load(folder / name, weights_only=True)


def assert_equals_one_device(folder: Path, one: Path, rtol: float = 1e-9, ranks: int = 2) -> None:
    """Metrics, weights, predictions, and checkpoints with the optimizer's state, on every rank that runs the script."""
    refused = (folder / "refusal.txt").exists()
    expected = load(one, "notes_of_rank_0.pt")
    assert expected["test the best"]["weights"] != pytest.approx(expected["fit"]["weights"], rel=1e-6)
    for rank in range(1 if refused else ranks):
        notes = load(folder, f"notes_of_rank_{rank}.pt")
        assert refused or list(notes) == list(expected)
        for function, got in notes.items():
            wanted = expected[function]
            # What a test loads stays in the ranks, and the parent's metrics are those of all functions so far.
            weights = expected["fit" if refused and function == "test the best" else function]["weights"]
            assert got["weights"] == pytest.approx(weights, rel=rtol), (rank, function)
            metrics = {name: got["metrics"][name] for name in (wanted if refused else got)["metrics"]}
            assert metrics == pytest.approx(wanted["metrics"], rel=max(rtol, 1e-6)), (rank, function)
            assert refused or got["global_step"] == wanted["global_step"], (rank, function)
    if "predict" in notes:
        assert_same_rows(folder, one, rtol)
    for name in ("best.ckpt", "end_of_2.ckpt", "after_fit.ckpt", *([] if refused else ["after_second_fit.ckpt"])):
        lost = refused and name == "after_fit.ckpt"
        assert_same_checkpoint(load(folder, name), load(one, name), rtol, lost, name)


def assert_same_rows(folder: Path, one: Path, rtol: float) -> None:
    rows: dict[int, list[float]] = {}
    for path in folder.glob("rows_of_rank_*.pt"):
        part = load(folder, path.name)
        assert not rows.keys() & part.keys(), "a row is there twice"
        rows |= part
    expected = load(one, "rows_of_rank_0.pt")
    assert rows.keys() == expected.keys()
    for index, row in expected.items():
        assert rows[index] == pytest.approx(row, rel=10 * rtol), index


def assert_same_checkpoint(got: Any, expected: Any, rtol: float, lost: bool, name: str) -> None:
    """The optimizer's state, too; or its absence, where only the ranks that have ended had it."""
    assert list(got["state_dict"]) == list(expected["state_dict"])
    for key, value in expected["state_dict"].items():
        assert float((got["state_dict"][key] - value).norm() / value.norm()) <= rtol, (name, key)
    if lost:
        assert got["optimizer_states"] == []
        return
    (got_state,), (expected_state,) = got["optimizer_states"], expected["optimizer_states"]
    assert got_state["param_groups"] == expected_state["param_groups"]
    assert got_state["state"].keys() == expected_state["state"].keys()
    for index, state in expected_state["state"].items():
        momentum = state["momentum_buffer"]
        error = (got_state["state"][index]["momentum_buffer"] - momentum).norm() / momentum.norm()
        assert float(error) <= 100 * rtol, (name, index)
    assert got["global_step"] == expected["global_step"]


@pytest.mark.cluster
@pytest.mark.warm
@pytest.mark.parametrize("strategy", ["ddp", "hybrid_pipeline", "parameter_server"])
def test_programs_that_start_their_other_ranks_equal_one_device(strategy: str, one: Path, tmp_path: Path) -> None:
    start(strategy, tmp_path)
    assert_equals_one_device(tmp_path, one)


@pytest.mark.parametrize("strategy", ["ddp_fork", "hybrid_pipeline_fork", "parameter_server_fork"])
def test_forked_ranks_equal_one_device(strategy: str, one: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        Chain(*names(strategy), tmp_path).run()
    assert_equals_one_device(tmp_path, one)
    assert "Calling `trainer.fit()` twice on the same Trainer" in (tmp_path / "refusal.txt").read_text()
    # DDP says nothing.
    warned = any("after_fit.ckpt holds weights alone" in str(warning.message) for warning in caught)
    assert warned != strategy.startswith("ddp")


def test_a_checkpoint_without_optimizer_is_not_resumed_from(tmp_path: Path) -> None:
    chain = Chain(*names("ddp_fork"), tmp_path)
    trainer = chain.trainer("ddp_fork", 1)
    trainer.fit(chain.model, chain.data)
    trainer.save_checkpoint(tmp_path / "weights.ckpt")
    for strategy in ("hybrid_pipeline_fork", "parameter_server_fork"):
        with pytest.raises(ProcessRaisedException, match="the states of 0 optimizers, and this run has 1"):
            chain.trainer(strategy, 2).fit(chain.model, chain.data, ckpt_path=tmp_path / "weights.ckpt")


@pytest.mark.cluster
@pytest.mark.warm
@pytest.mark.parametrize("strategy", ["hybrid_pipeline_spawn", "parameter_server_spawn"])
def test_spawned_ranks_equal_one_device(strategy: str, one: Path, tmp_path: Path) -> None:
    start(strategy, tmp_path)
    assert_equals_one_device(tmp_path, one)
    assert "Calling `trainer.fit()` twice on the same Trainer" in (tmp_path / "refusal.txt").read_text()


@pytest.mark.cluster
@pytest.mark.warm
@pytest.mark.parametrize("strategy", ["hybrid_pipeline", "parameter_server"])
def test_ranks_of_torchrun_equal_one_device(strategy: str, one: Path, tmp_path: Path) -> None:
    start(strategy, tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert_equals_one_device(tmp_path, one)


def as_rank(strategy: Any, other: Any, devices: int, folder: Path, callbacks: Sequence[Callback] = ()) -> None:
    """Run the script in a rank that something else has started, as torchrun and `popen` do."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0", "WORLD_SIZE": str(devices)}
    Chain(strategy, other, devices, folder, callbacks).run()


def test_averages_and_replicas_across_stages_equal_one_device(tmp_path: Path) -> None:
    one, three = tmp_path / "one", tmp_path / "three"
    one.mkdir()
    three.mkdir()
    averages = [EMAWeightAveraging(decay=0.7)]
    in_fork(lambda: Chain(*names("one"), one, averages).run())
    strategies = [
        HybridPipelineStrategy(replicas=replicas, cuts=["1"], microbatches=4) for replicas in ([2, 1], [1, 2])
    ]
    run_ranks(3, as_rank, *strategies, 3, three, averages)
    assert_equals_one_device(three, one, ranks=3)
    for name in ("after_fit.ckpt", "best.ckpt", "after_second_fit.ckpt"):
        expected = load(one, name)["current_model_state"]
        got = load(three, name)["current_model_state"]
        assert list(got) == list(expected)
        assert all(torch.allclose(got[key], expected[key], rtol=1e-9) for key in expected), name


class Weights(Callback):
    """Writes each rank's weights when fit ends."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(pl_module.state_dict(), f"weights_of_rank_{trainer.global_rank}.pt")


def test_asynchronous_training_ends_with_averaged_weights(tmp_path: Path) -> None:
    """The servers have the weights that were averaged, and must not put them back."""
    chain = Chain(*names("parameter_server_async_fork"), tmp_path)
    callbacks = [Leftovers(tmp_path), Weights(), EMAWeightAveraging(decay=0.7)]
    chain.trainer(chain.strategy, 2, *callbacks).fit(chain.model, chain.data)
    end = load(tmp_path, "end_of_2.ckpt")
    ranks = [load(tmp_path, f"weights_of_rank_{rank}.pt") for rank in range(2)]
    for name, average in end["state_dict"].items():
        assert torch.equal(end["current_model_state"][name], average), name
        assert all(torch.equal(rank[name], average) for rank in ranks), name
