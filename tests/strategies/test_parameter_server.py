"""The parameter server trains the same model as one process, through the command line and with what users switch on."""

import csv
from pathlib import Path

import pytest
from test_hybrid_pipeline import COMMON, ONE, assert_same_run, checkpoint, fit, hybrid, logged

OPTIMIZERS = {
    "sgd": [],
    "adamw": [
        "--model.init_args.optimizer=torch.optim.AdamW",
        "--model.init_args.optimizer.init_args.lr=0.002",
        "--model.init_args.lr_scheduler=torch.optim.lr_scheduler.OneCycleLR",
        "--model.init_args.lr_scheduler.init_args.max_lr=0.004",
        "--model.init_args.lr_scheduler.init_args.total_steps=100",
        "--model.init_args.lr_interval=step",
    ],
    "clipping": ["--trainer.gradient_clip_val=0.5"],
    # Without the last 31 samples: 16 and 15 beside two batches of 32 cannot be weighted exactly, under DDP neither.
    "accumulation": [
        "--trainer.gradient_clip_val=0.5",
        "--trainer.accumulate_grad_batches=2",
        "--data.init_args.drop_last=true",
    ],
    "clipping by value": ["--trainer.gradient_clip_val=0.01", "--trainer.gradient_clip_algorithm=value"],
}


def served(workers=2, **options):
    options = {"start_method": "fork", **options}
    return [
        "--trainer.strategy.class_path=ParameterServerStrategy",
        f"--trainer.devices={workers}",
        *(f"--trainer.strategy.init_args.{name}={value}" for name, value in options.items()),
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sync_equals_one_process(run_cli, quick, optimizer):
    """Weights, optimizer state, schedulers and everything logged; 5 batches of 64 and one of 31 samples."""
    single = fit(run_cli, quick, "single", *OPTIMIZERS[optimizer], *ONE)
    layouts = {"2 workers": served(), "1 worker, 2 servers": served(1, servers=2), "4 workers": served(4)}
    for name, layout in layouts.items() if optimizer == "sgd" else list(layouts.items())[:1]:
        assert_same_run(fit(run_cli, quick, name, *OPTIMIZERS[optimizer], *layout), single)
        for got, expected in zip(logged(name), logged("single"), strict=True):
            # `train_loss_step` is that of rank 0's part of the batch.
            both = [{k: v for k, v in row.items() if k != "train_loss_step"} for row in (got, expected)]
            assert both[0] == pytest.approx(both[1], rel=1e-6), name


def test_resumes_under_any_other_strategy(run_cli, quick):
    """One epoch each under servers, DDP, a pipeline, servers again and one process, as if one process had not stopped.

    Lightning loads a checkpoint before it converts the module to float64, so each resumption rounds to float32.
    """
    options = ["--model.init_args.optimizer=torch.optim.AdamW", "--model.init_args.optimizer.init_args.lr=0.002"]
    options += ["--model.init_args.lr_scheduler=torch.optim.lr_scheduler.ExponentialLR"]
    options += ["--model.init_args.lr_scheduler.init_args.gamma=0.7", "--data.init_args.drop_last=true"]
    ddp = ["--trainer.strategy=ddp_fork", "--trainer.devices=2"]
    chain = {
        "served": served(),
        "ddp": ddp,
        "two servers": served(servers=2),
        "pipeline": hybrid([1, 1], ["1"], microbatches=4),
        "served again": served(),
        "one": ONE,
    }
    whole = fit(run_cli, quick, "whole", *options, *ONE, f"--trainer.max_epochs={len(chain)}")
    previous = None
    for epochs, (name, layout) in enumerate(chain.items(), start=1):
        resume = [] if previous is None else [f"--ckpt_path={previous}"]
        last = fit(run_cli, quick, name, *options, *layout, *resume, f"--trainer.max_epochs={epochs}")
        previous = checkpoint(name).resolve()
    assert_same_run(last, whole, rtol=1e-4)


def test_validate_test_and_predict_equal_one_process(run_cli, quick):
    fit(run_cli, quick, "single", *ONE, "--trainer.max_epochs=1")
    results = {}
    for name, layout in {"one": ONE, "served": served()}.items():
        place = [*layout, f"--ckpt_path={checkpoint('single').resolve()}", f"--trainer.logger.init_args.name={name}"]
        for command in ("validate", "test", "predict"):
            code, output = run_cli(command, *quick, *COMMON, *place)
            assert code == 0, output
        versions = sorted((Path("runs") / name).glob("version_*"))
        predictions = next(
            version / "predictions.csv" for version in versions if (version / "predictions.csv").exists()
        )
        with predictions.open() as file:
            rows = list(csv.reader(file))
        results[name] = [logged(name, version) for version in (0, 1)], rows
    (metrics, rows), (other_metrics, other_rows) = results.values()
    assert len(rows) > 300
    assert [row[:2] for row in other_rows] == [row[:2] for row in rows]
    for got, expected in zip(other_metrics, metrics, strict=True):
        assert got == [pytest.approx(one, rel=1e-6) for one in expected]
