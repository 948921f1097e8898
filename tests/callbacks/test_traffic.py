"""What is logged of the servers in each epoch, and what a run with some leaves in its folder."""

import csv
from pathlib import Path

import pytest

from cnnstrategies.networks import SmallCNN


def test_every_parameter_is_sent_and_received_once_in_a_step(run_cli, quick):
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.init_args.save_dir=runs"]
    args = ["--trainer.strategy=parameter_server_fork", *logger, "--trainer.logger.init_args.name=traffic"]
    few = ["--trainer.limit_train_batches=4", "--trainer.limit_val_batches=1", "--trainer.max_epochs=2"]
    code, output = run_cli("fit", *quick, *args, *few)
    assert code == 0, output
    with Path("runs/traffic/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["servers/sent_mb"]]
    assert len(rows) == 2
    megabytes = sum(4e-6 * parameter.numel() for parameter in SmallCNN(10, widths=[32, 64]).parameters())
    for row in rows[1:]:  # In the first epoch the values are received once more, before the first step.
        assert float(row["servers/sent_mb"]) == pytest.approx(megabytes, rel=0.1)
        assert float(row["servers/received_mb"]) == pytest.approx(megabytes, rel=0.1)
        assert float(row["servers/waited_ms"]) >= 0
        assert [float(row[f"servers/{name}"]) for name in ("workers", "alive", "losses")] == [2, 1, 0]
        assert float(row["servers/staleness"]) == 0, "in sync no update comes between"
    assert not Path("runs/traffic/version_0/watch.json").exists(), "the run cannot be watched any more"
