"""A fit whose steps do not wait for the slowest worker."""

import csv
import itertools
import time
from pathlib import Path

import pytest
from test_parameter_server import served

from cnnstrategies.callbacks import graceful_stop
from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import ParameterServerStrategy

BATCHES, AHEAD = 10, 6


def test_a_slow_rank_is_not_waited_for_and_ends_with_the_others(run_cli, quick, monkeypatch):
    """It is stuck in its second step until the other is ahead of it; a step has two batches."""
    began, train = [], ParameterServerStrategy.training_step

    def training_step(self, *args, **kwargs):
        began.append(self._stepper.worker.step)
        if self.global_rank == 0 and began[-1] == AHEAD:
            Path("ahead").touch()
        while self.global_rank == 1 and began[-1] == 1 and not Path("ahead").exists():
            time.sleep(0.01)
        loss = train(self, *args, **kwargs)
        if self.global_rank == 1 and len(began) == 2 * BATCHES:
            Path("left-out").write_text(str(max(later - step for step, later in itertools.pairwise(began))))
        Path(f"steps-{self.global_rank}").write_text(f"{self._stepper.worker.step} {len(began)}")
        return loss

    monkeypatch.setattr(ParameterServerStrategy, "training_step", training_step)
    monkeypatch.setattr(graceful_stop, "SELDOM_SECONDS", 1e6)  # There the ranks meet, as at the end of an epoch.
    strategy = served(backup_workers=1)
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.init_args.save_dir=runs"]
    length = [f"--trainer.limit_train_batches={2 * BATCHES}", "--trainer.accumulate_grad_batches=2"]
    code, output = run_cli("fit", *quick, *strategy, *logger, *length, "--trainer.max_epochs=2")
    assert code == 0, output
    assert "backup_workers 1" in output
    for rank in range(2):
        step, seen = map(int, Path(f"steps-{rank}").read_text().split())
        assert seen == 4 * BATCHES, "each goes through its own batches, worked on or left out"
        assert step in (2 * BATCHES - 1, 2 * BATCHES)
    assert int(Path("left-out").read_text()) >= AHEAD - 2
    with next(Path("runs").rglob("metrics.csv")).open() as file:
        dropped = [float(row["servers/dropped"]) for row in csv.DictReader(file) if row.get("servers/dropped")]
    assert len(dropped) == 2
    assert dropped[0] >= (AHEAD - 2) / BATCHES / 2


@pytest.mark.light
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "async"}, "backup_workers=1 is for mode='sync', not mode='async'"),
        ({"backup_workers": -1}, "backup_workers=-1: use at least 0"),
        ({"elastic": 2}, "backup_workers=1 with elastic=2"),
    ],
)
def test_backup_workers_are_for_common_steps(options, message):
    with pytest.raises(ConfigurationError, match=message):
        ParameterServerStrategy(**{"backup_workers": 1, **options})


@pytest.mark.light
def test_backup_workers_leave_some_to_wait_for():
    options = ParameterServerStrategy(backup_workers=2).options
    options.check_workers(3)
    with pytest.raises(ConfigurationError, match=r"backup_workers=2 of 2 workers leaves none .*: use at most 1"):
        options.check_workers(2)
