"""Plans as whole configurations, with which ``fit`` needs no other file."""

from pathlib import Path
from typing import Any

from cnnstrategies.commands.arguments.keys import read_yaml
from cnnstrategies.commands.run.lightning_cli import ModelAndData
from cnnstrategies.data import ImageDataModule
from cnnstrategies.planning.candidates import Candidate
from cnnstrategies.planning.configuration_file import write_commented
from cnnstrategies.planning.device_report import best_plans
from cnnstrategies.planning.rank import Ranking
from cnnstrategies.planning.report import trainer_section


def write_plans(file: Path, ranking: Ranking, configuration: ModelAndData) -> None:
    """Write each of the best plans as a configuration for ``fit``, and print the names of the files.

    Args:
        file: File for the best plan. The names of the files for the second and the third plan end with ``_2`` and
            ``_3``.
        ranking: The plans.
        configuration: The configuration for which the plans were made.
    """
    for number, row in enumerate(best_plans(ranking), start=1):
        path = file if number == 1 else file.with_stem(f"{file.stem}_{number}")
        content, lines = planned(ranking, row, configuration)
        write_commented(path, content, [*lines, f"  cnnstrategies fit --config {path}"])
        print(f"Wrote plan {number} to {path}; train with cnnstrategies fit --config {path}")


def planned(ranking: Ranking, row: Candidate, configuration: ModelAndData) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration with a plan's strategy and batch, and comments about the plan."""
    content: dict[str, Any] = read_yaml(configuration.parser.dump(configuration.config, skip_none=False))
    accumulated = int(content["trainer"]["accumulate_grad_batches"])
    trainer, lines = trainer_section(ranking, row)
    # If the configuration accumulates gradients, the plan is for one of the batches of a step.
    trainer["accumulate_grad_batches"] *= accumulated
    if ranking.order and content["trainer"]["accelerator"] != "cpu":
        # Rank r of a machine uses the r-th device of this list. The ranks on a CPU are not bound to parts of it.
        trainer["devices"] = list(ranking.order)
    if (added := trainer.pop("callbacks+", None)) is not None:
        callbacks = content["trainer"].get("callbacks") or []
        trainer["callbacks"] = [*(callbacks if isinstance(callbacks, list) else [callbacks]), added]
    content["trainer"] |= trainer
    samples = ranking.job.samples * accumulated
    if isinstance(configuration.datamodule, ImageDataModule):
        content["data"].setdefault("init_args", {})
        content["data"]["init_args"] |= {"global_batch_size": samples, "batch_size": None}
    else:
        lines.append(f"The plan is for {samples} samples in a step: set the batch size of your loader accordingly.")
    return content, lines
