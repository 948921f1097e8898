"""A chosen strategy as the lines of a configuration."""

from pathlib import Path
from typing import Any

from cnnstrategies.planning.rank import Ranking, Row
from cnnstrategies.planning.tune.settings import write_commented

HYBRID = "cnnstrategies.strategies.HybridPipelineStrategy"


def overlay(ranking: Ranking, row: Row) -> dict[str, Any]:
    """What ``fit`` takes after the configuration that was planned for.

    Args:
        ranking: Of which it is a row.
        row: The strategy.
    """
    job, candidate = ranking.job, row.candidate
    trainer: dict[str, Any] = {}
    counts = {host.devices for host in job.cluster.taken(candidate.devices).hosts}
    if len(counts) == 1:
        trainer |= {"num_nodes": candidate.devices // min(counts), "devices": min(counts)}
    options = dict(candidate.options)
    trainer["accumulate_grad_batches"] = options.pop("accumulate_grad_batches", 1)
    if candidate.family == "hybrid":
        assert ranking.hybrid is not None
        if job.profile.nodes_have_names:
            nodes = ranking.hybrid.predictor.costs.nodes
            options["cuts"] = [nodes[cut - 1].name for cut in ranking.hybrid.layout.cuts]
        options |= {"schedule": job.schedule, "activation_checkpointing": job.activation_checkpointing}
        trainer["strategy"] = {"class_path": HYBRID, "init_args": options}
    else:
        trainer["strategy"] = candidate.family
    written: dict[str, Any] = {"trainer": trainer}
    if candidate.samples != job.samples:
        written["data"] = {"init_args": {"global_batch_size": candidate.samples}}
    return written


def write_overlay(file: Path, ranking: Ranking) -> None:
    """Write the best strategy's lines.

    Args:
        file: Where to.
        ranking: The strategies.
    """
    row = ranking.best
    made = row.prediction
    lines = [
        f"{row.candidate}: {made.step * 1e3:.4g} ms a step predicted, {made.rate:.4g} samples/s",
        "  cnnstrategies fit --config YOURS --config THIS",
    ]
    if row.candidate.family == "hybrid" and not ranking.job.profile.nodes_have_names:
        lines.append("The profile's nodes are not those that fit knows: it chooses the cuts by a profile of its own.")
    write_commented(file, overlay(ranking, row), lines)
