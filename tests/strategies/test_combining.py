"""`combine: true`: the workers of a node push as one, through the command line and with what users switch on."""

import csv
import json
from pathlib import Path

import pytest
from lightning.pytorch import Callback
from test_hybrid_pipeline import ONE, assert_same_run, fit
from test_parameter_server import OPTIMIZERS, served


class Traffic(Callback):
    """Writes down what a worker has sent and received over the network."""

    def on_train_end(self, trainer, pl_module):
        counters = trainer.strategy.counters
        Path(f"traffic-{trainer.global_rank}").write_text(json.dumps([counters.bytes_sent, counters.bytes_received]))


def traffic(workers):
    return [json.loads(Path(f"traffic-{rank}").read_text()) for rank in range(workers)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_push_for_all_equals_one_process(run_cli, quick, optimizer):
    """With clipping, accumulation, validations and checkpoints; the last batch has uneven parts."""
    write = "--trainer.callbacks+=test_combining.Traffic"
    single = fit(run_cli, quick, "single", *OPTIMIZERS[optimizer], *ONE)
    combined = fit(run_cli, quick, "combined", *OPTIMIZERS[optimizer], *served(4, servers=2, combine="true"), write)
    assert_same_run(combined, single)
    with Path("runs/combined/version_0/metrics.csv").open() as file:
        assert {row["servers/dropped"] for row in csv.DictReader(file)} == {"", "0.0"}
    assert [sent > 0 for sent, _ in traffic(4)] == [received > 0 for _, received in traffic(4)]
    assert [sent > 0 for sent, _ in traffic(4)] == [True, False, False, False]
