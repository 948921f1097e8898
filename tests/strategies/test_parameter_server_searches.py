"""Callbacks that train to find something, under the parameter server: they find it, or are refused by name."""

import sys
from pathlib import Path

import pytest
from chain_program import Chain, names
from cluster.processes_of import Program
from conftest import in_fork
from finder_program import search_and_train
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from test_chain import assert_same_checkpoint, load

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import ParameterServerStrategy


@pytest.mark.warm
def test_a_learning_rate_is_found_and_trained_with_as_on_one_device(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    in_fork(lambda: search_and_train("auto", 1, one))
    words = [sys.executable, str(Path(__file__).with_name("finder_program.py")), "parameter_server", "2", str(two)]
    program = Program(words, tmp_path / "log")
    assert program.wait() == 0, program.output()
    expected = load(one, "found_by_rank_0.pt")
    assert len(expected["loss"]) == 20
    assert 1e-4 < expected["found"] < 2
    assert expected["found"] != 0.1
    for rank in range(2):
        found = load(two, f"found_by_rank_{rank}.pt")
        assert found["found"] == pytest.approx(expected["found"], rel=1e-12)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
    assert_same_checkpoint(load(two, "end.ckpt"), load(one, "end.ckpt"), 1e-9, False, "end")
    assert not list(two.glob(".lr_find*"))


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (BatchSizeFinder, {}, "BatchSizeFinder: Lightning searches on one device only"),
        (LearningRateFinder, {"max_restarts": 2}, "LearningRateFinder with max_restarts=2"),
        (
            LearningRateFinder,
            {"endpoints": ["tcp://127.0.0.1:7000"], "coordinator": "tcp://127.0.0.1:7001"},
            "LearningRateFinder with endpoints",
        ),
    ],
)
@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_searches_that_could_not_be_right_are_refused_before_a_process_starts(
    tmp_path: Path, start_method: str, callback: type[Callback], options: dict[str, object], message: str
) -> None:
    chain = Chain(*names("one"), tmp_path)
    strategy = ParameterServerStrategy(start_method=start_method, **options)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, callbacks=[callback()])
    with pytest.raises(ConfigurationError, match=message):
        trainer.fit(chain.model, chain.data)


def test_a_tuner_is_refused_where_what_it_finds_would_stay_in_the_ranks(tmp_path: Path) -> None:
    chain = Chain(*names("one"), tmp_path)
    chain.model.lr = 0.1
    with pytest.raises(ConfigurationError, match=r"Tuner\.lr_find"):
        Tuner(chain.trainer("parameter_server_fork", 1)).lr_find(chain.model, datamodule=chain.data)


class Rollback(Callback):
    """Loads weights in the middle of training."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.strategy.load_model_state_dict({"state_dict": pl_module.state_dict()})


def test_weights_that_are_loaded_while_training_are_refused(tmp_path: Path) -> None:
    chain = Chain("parameter_server_fork", "auto", 2, tmp_path)
    with pytest.raises(Exception, match="weights were loaded in the middle of training"):
        chain.trainer(chain.strategy, 1, Rollback()).fit(chain.model, chain.data)
