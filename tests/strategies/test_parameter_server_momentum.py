"""Momentum that the workers make, and a share that falls, through Lightning."""

import csv
from pathlib import Path

import pytest
from test_hybrid_pipeline import COMMON, ONE, checkpoint, fit
from test_parameter_server import served

from cnnstrategies.errors import ConfigurationError
from cnnstrategies.strategies import ParameterServerStrategy
from cnnstrategies.strategies.parameter_server import launcher

CORRECTED = {"compression": "topk", "momentum_correction": "true"}
WHOLE_BATCHES = "--data.init_args.drop_last=true"  # Of a smaller one workers have shares of other sizes.


def test_where_everything_is_sent_a_run_equals_one_process(run_cli, quick):
    """With Nesterov momentum, weight decay and a schedule; the checkpoint has no momentum, which is no worker's own."""
    single = fit(run_cli, quick, "single", WHOLE_BATCHES, *ONE)
    got = fit(run_cli, quick, "served", WHOLE_BATCHES, *served(compression_ratio=1.0, servers=2, **CORRECTED))
    for name, value in single["state_dict"].items():
        assert (got["state_dict"][name] - value).norm() <= 1e-6 * value.norm(), name
    (expected,), (state,) = single["optimizer_states"], got["optimizer_states"]
    assert expected["param_groups"][0]["momentum"] == 0.9
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"] == {}


def test_a_resumed_run_does_not_warm_up_again(run_cli, quick):
    def sent(name):
        with (Path("runs") / name / "version_0/metrics.csv").open() as file:
            return [float(row["servers/sent_mb"]) for row in csv.DictReader(file) if row["servers/sent_mb"]]

    options = served(compression_ratio=0.01, compression_warmup=12, **CORRECTED)
    whole = fit(run_cli, quick, "whole", *options)
    assert whole["global_step"] == 12
    resumed = [f"--ckpt_path={checkpoint('whole').resolve()}", "--trainer.max_epochs=3"]
    assert fit(run_cli, quick, "resumed", *options, *resumed)["global_step"] == 18
    first, second = sent("whole")
    (third,) = sent("resumed")
    assert first > second > third


def test_refuses_to_clip_velocities_before_a_process_starts(run_cli, quick, monkeypatch):
    monkeypatch.setattr(launcher, "supervised", None)  # Starts them.
    code, output = run_cli("fit", *quick, *COMMON, *served(**CORRECTED), "--trainer.gradient_clip_val=0.5")
    assert code == 2, output
    assert "gradients are clipped at 0.5, in mode='sync'" in output.splitlines()[-1]


def test_refuses_an_optimizer_whose_momentum_it_does_not_know(run_cli, quick):
    adamw = "--model.init_args.optimizer=torch.optim.AdamW"
    code, output = run_cli("fit", *quick, *COMMON, *served(**CORRECTED), adamw)
    assert code == 2, output
    assert "not torch.optim.adamw.AdamW: leave it out" in output.splitlines()[-1]


@pytest.mark.light
def test_refuses_a_compression_that_leaves_nothing_out():
    with pytest.raises(ConfigurationError, match="not compression='none': leave it out"):
        ParameterServerStrategy(momentum_correction=True)
