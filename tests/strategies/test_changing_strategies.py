"""A checkpoint is no strategy's own: it is resumed and evaluated under any other, or on one device."""

import csv
from pathlib import Path

import pytest
from test_hybrid_pipeline import ALL_VALIDATION_DATA, COMMON, LAYOUTS, ONE, assert_same_run, checkpoint, fit, logged
from test_parameter_server import served

DDP = ["--trainer.strategy=ddp_fork", "--trainer.devices=2"]


@pytest.mark.cluster  # It takes long.
def test_resumes_under_any_other_strategy(run_cli, quick):
    """An epoch each under servers, pipelines, DDP and one process, as if one process had not stopped.

    Lightning loads a checkpoint before it converts the module to float64, so each resumption rounds to float32.
    """
    options = ["--model.init_args.optimizer=torch.optim.AdamW", "--model.init_args.optimizer.init_args.lr=0.002"]
    options += ["--model.init_args.lr_scheduler=torch.optim.lr_scheduler.ExponentialLR"]
    options += ["--model.init_args.lr_scheduler.init_args.gamma=0.7", "--data.init_args.drop_last=true"]
    chain = {
        "served": served(),
        "2-1": LAYOUTS["2-1 gpipe"],
        "two servers": served(servers=2),
        "ddp": DDP,
        "one": ONE,
    }
    whole = fit(run_cli, quick, "whole", *options, *ONE, f"--trainer.max_epochs={len(chain)}")
    previous = None
    for epochs, (name, layout) in enumerate(chain.items(), start=1):
        resume = [] if previous is None else [f"--ckpt_path={previous}"]
        last = fit(run_cli, quick, name, *options, *layout, *resume, f"--trainer.max_epochs={epochs}")
        previous = checkpoint(name).resolve()
    assert_same_run(last, whole, rtol=1e-4)


def test_validate_and_predict_equal_one_process(run_cli, quick):
    """`test_chain.py` has `test`, too."""
    fit(run_cli, quick, "single", *ONE, "--trainer.max_epochs=1")
    results = {}
    for name, layout in {"one": ONE, "2-1": LAYOUTS["2-1 gpipe"], "served": served()}.items():
        place = [*layout, f"--ckpt_path={checkpoint('single').resolve()}", f"--trainer.logger.init_args.name={name}"]
        place.append(ALL_VALIDATION_DATA)
        for command in ("validate", "predict"):
            code, output = run_cli(command, *quick, *COMMON, *place)
            assert code == 0, output
        versions = sorted((Path("runs") / name).glob("version_*"))
        predictions = next(
            version / "predictions.csv" for version in versions if (version / "predictions.csv").exists()
        )
        with predictions.open() as file:
            rows = list(csv.reader(file))
        results[name] = logged(name), rows
    (metrics, rows), *others = results.values()
    assert len(rows) > 300
    for other_metrics, other_rows in others:
        assert [row[:2] for row in other_rows] == [row[:2] for row in rows]
        assert other_metrics == [pytest.approx(one, rel=1e-6) for one in metrics]
