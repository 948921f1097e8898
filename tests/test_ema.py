"""Weight averaging from the command line, which copies the model with all that it holds, such as factories."""

from pathlib import Path

import pytest
import torch
from cluster.processes_of import PYTHON, Program, fit

MINE = """
from torch import nn


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10))
"""
RUN = fit(
    "--model.init_args.network=mine.network",
    "--data.init_args.augment=false",
    *("--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.8", "--checkpoint.monitor=null"),
    *("--trainer.precision=64-true", "--trainer.max_epochs=1", "--trainer.limit_train_batches=4"),
    "--trainer.limit_val_batches=0",
)
ONE = ("--trainer.strategy=auto", "--trainer.devices=1")
STAGES = (
    "--trainer.strategy=HybridPipelineStrategy",
    '--trainer.strategy.cuts=["1"]',
    "--trainer.strategy.start_method=fork",
)


@pytest.mark.warm
def test_the_average_of_two_processes_is_that_of_one(run_cli, tmp_path):
    """With DDP's ranks started as programs, as they are by default, and with two stages."""
    Path("mine.py").write_text(MINE)
    for name, strategy in (("one", ONE), ("stages", STAGES)):
        code, output = run_cli(*RUN[2:], *strategy, f"--trainer.logger.init_args.name={name}")
        assert code == 0, output
    program = Program([PYTHON, *RUN, "--trainer.logger.init_args.name=ddp"], tmp_path / "log")
    assert program.wait() == 0, program.output()
    one, *others = (
        torch.load(Path("runs") / name / "version_0/checkpoints/last.ckpt", weights_only=True)
        for name in ("one", "stages", "ddp")
    )
    average, current = one["state_dict"], one["current_model_state"]
    assert all((average[name] - current[name]).norm() > 1e-3 * current[name].norm() for name in average)
    for two in others:
        for kind in ("state_dict", "current_model_state", "averaging_state"):
            assert two[kind].keys() == one[kind].keys()
            for name, value in one[kind].items():
                torch.testing.assert_close(two[kind][name], value, rtol=1e-10, atol=1e-14)


def test_an_average_that_cannot_be_sent_to_a_process_is_refused(run_cli, quick):
    """It holds a function inside a function of torch's."""
    average = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.strategy=ddp_spawn"]
    code, output = run_cli("fit", *quick, *average)
    assert code == 2, output
    # Not the last line everywhere: what Python 3.12 has to say of a fork that ends at once comes after it.
    (line,) = (line for line in output.splitlines() if line.startswith("cnnstrategies: error"))
    for word in ("cannot all be pickled", "ema_update", "ddp_fork"):
        assert word in line
