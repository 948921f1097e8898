"""The trainings of `digit_runs.py` by the command line, for what only that does."""

import csv
from pathlib import Path
from typing import Any

COMMON = [
    "--model.init_args.network=conftest.PlainCNN",
    "--trainer.precision=64-true",
    "--trainer.max_epochs=2",
    "--trainer.num_sanity_val_steps=0",
    "--data.init_args.augment=false",
    "--data.init_args.val_split=0.7565",
    "--trainer.limit_val_batches=3",
    "--checkpoint.monitor=null",
    "--trainer.logger=CSVLogger",
    "--trainer.logger.init_args.save_dir=runs",
]


def served(workers: int = 2, **options: Any) -> list[str]:
    """A parameter server with options of its strategy."""
    return [
        "--trainer.strategy.class_path=ParameterServerStrategy",
        f"--trainer.devices={workers}",
        *(
            f"--trainer.strategy.init_args.{name}={value}"
            for name, value in ({"start_method": "fork"} | options).items()
        ),
    ]


def checkpoint(name: str, version: int = 0) -> Path:
    """A run's last one."""
    return Path("runs") / name / f"version_{version}/checkpoints/last.ckpt"


def logged(name: str, version: int = 0) -> list[dict[str, float]]:
    """What a run has logged, without the speed and what servers were sent."""
    with (Path("runs") / name / f"version_{version}/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = [key for key in rows[0] if key != "samples_per_s" and not key.startswith("servers/")]
    return [{key: float(row[key]) for key in names if row[key]} for row in rows]
